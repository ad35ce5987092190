"""What does a draft head say next? One layer over hidden states that the target has computed.

At each position i the head reads the target's state there and the token behind it, i + 1, and its
own state says token i + 2. After each step of the target it reads the tokens that came out of it.
So it has read all of a row but its newest token; its state of the last position that it has read is
kept, and the next draft begins with it. From then on its own state stands in for the target's. It
has one layer of cache in the target's blocks. The last position of a block has read the next
block's first token: who finds the block cached and goes on otherwise drafts worse for a while.
Letters: B rows of a step, N rows there is room for, T tokens, n states of the target that the head
reads at one position, E hidden, V vocabulary, k draft tokens of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ridgeline.architectures.draft_groups import draft_groups
from ridgeline.architectures.spec import ModelSpec
from ridgeline.attention.layout import DecodeLayout, ForwardBatch
from ridgeline.kernels.drafts import History, draft_inputs, first_inputs, put_drafts
from ridgeline.kernels.draw_rows import draw_rows
from ridgeline.kernels.launching import make_workspace
from ridgeline.kernels.step_inputs import make_step_inputs
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.speculation.contract import DraftMethod, DraftStep
from ridgeline.speculation.draft_model import DRAW_CHUNK


class DraftHead(ABC):
    """Of EAGLE-3 or MTP. `taps`: layers of the target before which its states are read."""

    taps: tuple[int, ...]

    @property
    @abstractmethod
    def cache_spec(self) -> ModelSpec:
        """Of the KV cache that `forward` fills: a model of one layer."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """All that its parameters take."""

    @abstractmethod
    def of_target(self, tapped_nTE: torch.Tensor) -> torch.Tensor:
        """What `forward` reads, [T, E], of the target's states."""

    @abstractmethod
    def forward(self, states_TE: torch.Tensor, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        """Its own states [T, E]; fills the cache. `states_TE` (overwritten) are those of
        `of_target`, or its own of the position before; the tokens stand one place behind the
        positions of `batch`."""

    @abstractmethod
    def draft_logits(self, states_BE: torch.Tensor) -> torch.Tensor:
        """Of states that `forward` gave, [B, V] float32."""


class HeadDrafts(DraftMethod):
    def __init__(
        self,
        name: str,
        head: DraftHead,
        target: Decoder,
        target_kv: KVCache,
        *,
        max_draft_tokens: int,
        max_rows: int,
        max_logit_rows: int,
    ) -> None:
        """Steps of up to `max_rows` rows; with draws, of rows * drafts <= `max_logit_rows`."""
        self.name, self.head, self.max_draft_tokens, self.taps = (
            name,
            head,
            max_draft_tokens,
            head.taps,
        )
        spec, where = head.cache_spec, target.device
        self.kv = KVCache(
            spec,
            draft_groups(target_kv.groups, spec),
            target_kv.num_blocks,
            target_kv.block_size,
            target.dtype,
            where,
        )
        self._max_positions, vocab_size = target.max_model_len, target.spec.vocab_size
        self._inputs = make_step_inputs(len(target_kv.groups), max_rows, where)
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=where)
        self._logits = torch.empty(max(max_rows, max_logit_rows), vocab_size, device=where)
        programs = max_rows * (vocab_size // DRAW_CHUNK + 1)
        self._workspace = make_workspace(where, 3 * programs, max_rows)
        self._states_NE = torch.zeros(1, spec.hidden_size, dtype=target.dtype, device=where)

    def make_room(self, num_rows: int) -> None:
        if (more := num_rows - len(self._states_NE)) > 0:
            room = self._states_NE.new_zeros(more, self._states_NE.shape[1])
            self._states_NE = torch.cat((self._states_NE, room))

    def draft(self, step: DraftStep, num_draft_tokens: int) -> torch.Tensor | None:
        rows_B, history, num = step.rows_B, step.history, len(step.rows_B)
        each = 1 if step.draws is None else num_draft_tokens
        logits_BkV = self._logits[: num * each].view(num, each, -1)
        lens_B, states_BE = history.lens_N[rows_B], self._states_NE[rows_B]
        for index in range(num_draft_tokens):
            if index:
                states_BE = self._pass(step, lens_B, index, states_BE)
            out_BV = logits_BkV[:, index % each]
            out_BV.copy_(self.head.draft_logits(states_BE))
            ids_B = draw_rows(out_BV, lens_B + index, step.draws, workspace=self._workspace)[0]
            put_drafts(ids_B, rows_B, history, index)
        return None if step.draws is None else logits_BkV

    def _pass(
        self, step: DraftStep, lens_B: torch.Tensor, index: int, states_BE: torch.Tensor
    ) -> torch.Tensor:
        """Over the draft token before this one, at the position before that."""
        num, tokens_NL = len(step.rows_B), step.history.tokens_NL
        inputs = first_inputs(self._inputs, num, 1)
        draft_inputs(
            step.rows_B,
            step.limits_B,
            step.history,
            step.tables_gNM,
            inputs,
            step.block_size,
            num_new=1,
            first=index - 1,
            max_positions=self._max_positions,
        )
        places_B = (lens_B + (index - 1)).clamp(max=tokens_NL.shape[1] - 1)
        layout = DecodeLayout(
            step.rows_B,
            tuple(step.tables_gNM),
            inputs.seq_lens_B,
            self._starts[: num + 1],
            tuple(inputs.slots_gB),
            step.block_size,
            1,
        )
        token_ids_B = tokens_NL[step.rows_B, places_B].long()
        return self.head.forward(
            states_BE, ForwardBatch(token_ids_B, inputs.positions_B, layout), self.kv
        )

    def take_states(
        self, tapped_nTE: torch.Tensor, batch: ForwardBatch, rows_T: torch.Tensor, history: History
    ) -> None:
        positions_T, tokens_NL = batch.positions_T, history.tokens_NL
        behind_T = tokens_NL[rows_T, (positions_T + 1).clamp(max=tokens_NL.shape[1] - 1)].long()
        states_TE = self.head.of_target(tapped_nTE)
        states_TE = self.head.forward(
            states_TE, ForwardBatch(behind_T, positions_T, batch.layout), self.kv
        )
        is_last_T = positions_T == history.lens_N[rows_T] - 2
        self._states_NE.index_copy_(0, rows_T.where(is_last_T, 0), states_TE)  # 0: nobody's

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self.kv.copy_blocks(sources, targets)

    @property
    def num_bytes(self) -> int:
        own = (self._logits, self._states_NE, self._starts)
        kept = sum(tensor.numel() * tensor.element_size() for tensor in own)
        return self.head.num_bytes + self.kv.num_bytes + kept
