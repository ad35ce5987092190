"""How does a model draft token after token for all rows of a step, without waiting for the host?

Each pass reads the rows' newest tokens from their history, as the pass before left them there.
Letters: B rows of a step, k drafts of each, n tokens of a row in one pass, g KV groups, V ids of
the target's vocabulary.
"""

from __future__ import annotations

import torch

from ridgeline.attention.layout import DecodeLayout, ForwardBatch
from ridgeline.errors import check
from ridgeline.kernels.drafts import draft_inputs, first_inputs, put_drafts
from ridgeline.kernels.draw_rows import draw_rows
from ridgeline.kernels.launching import make_workspace
from ridgeline.kernels.step_inputs import StepInputs, make_step_inputs
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.speculation.contract import DraftStep

DRAW_CHUNK = 4096  # logits that one program of `draw_rows` reads


class ModelPasses:
    """`max_rows` rows of a step, and `max_logit_rows` rows of logits that are kept until it has
    ended. `num_layers`: the model's first layers alone."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        *,
        vocab_size: int,
        max_rows: int,
        max_logit_rows: int,
        num_layers: int | None = None,
        longest: int = 1,
    ) -> None:
        """`longest`: tokens of a row in the longest pass."""
        self._decoder, self._kv, self._num_layers = decoder, kv, num_layers
        where, groups = decoder.device, len(kv.groups)
        self._inputs = make_step_inputs(groups, max_rows * longest, where)
        self._newest = make_step_inputs(groups, max_rows if longest > 1 else 0, where)
        self._starts = tuple(
            torch.arange(0, max_rows * n + 1, n, dtype=torch.int32, device=where)
            for n in range(1, longest + 1)
        )
        # Ids that the model has not are never its drafts: their odds stay at zero.
        rows = max(max_rows, max_logit_rows)
        self._logits = torch.full((rows, vocab_size), -torch.inf, device=where)
        self._columns = min(vocab_size, decoder.spec.vocab_size)
        programs = max_rows * (self._columns // DRAW_CHUNK + 1)
        self._workspace = make_workspace(where, 3 * programs, max_rows)

    @property
    def num_bytes(self) -> int:
        room = self._workspace
        inputs = (t for one in (self._inputs, self._newest) for t in _tensors(one))
        held = (self._logits, room.partial_P, room.arrivals_A, *self._starts, *inputs)
        return sum(t.numel() * t.element_size() for t in held)

    def draft(
        self, step: DraftStep, num_draft_tokens: int, *, begin: int = 1
    ) -> torch.Tensor | None:
        """As `DraftMethod.draft`; the first pass is of the newest `begin` tokens of each row."""
        num, each = len(step.rows_B), 1 if step.draws is None else num_draft_tokens
        check(num * each <= len(self._logits), "there is room for the logits", rows=num * each)
        logits_BkV = self._logits[: num * each].view(num, each, -1)
        for index in range(num_draft_tokens):
            out_BV = logits_BkV[:, index % each, : self._columns]
            ids_B = self._pass(step, index, begin if index == 0 else 1, out_BV)
            put_drafts(ids_B, step.rows_B, step.history, index)
        return None if step.draws is None else logits_BkV

    def _pass(
        self, step: DraftStep, index: int, num_new: int, out_BV: torch.Tensor
    ) -> torch.Tensor:
        inputs = self._read(self._inputs, step, num_new, index + 1 - num_new)
        layout = DecodeLayout(
            step.rows_B,
            tuple(step.tables_gNM),
            inputs.seq_lens_B,
            self._starts[num_new - 1][: len(step.rows_B) + 1],
            tuple(inputs.slots_gB),
            step.block_size,
            num_new,
        )
        batch = ForwardBatch(inputs.token_ids_B, inputs.positions_B, layout)
        logits_BV = self._decoder.forward_logits(
            batch, self._kv, out_BV, num_layers=self._num_layers, last_of=num_new
        )
        if num_new > 1 and step.draws is not None:  # noise wants positions of one token a row
            inputs = self._read(self._newest, step, 1, index)
        positions_B = inputs.next_positions_B[: len(step.rows_B)]
        return draw_rows(logits_BV, positions_B, step.draws, workspace=self._workspace)[0]

    def _read(self, into: StepInputs, step: DraftStep, num_new: int, first: int) -> StepInputs:
        inputs = first_inputs(into, len(step.rows_B), num_new)
        draft_inputs(
            step.rows_B,
            step.limits_B,
            step.history,
            step.tables_gNM,
            inputs,
            step.block_size,
            num_new=num_new,
            first=first,
            max_positions=self._decoder.max_model_len,
        )
        return inputs


def _tensors(inputs: StepInputs) -> tuple[torch.Tensor, ...]:
    return (
        inputs.token_ids_B,
        inputs.positions_B,
        inputs.next_positions_B,
        inputs.seq_lens_B,
        inputs.slots_gB,
    )
