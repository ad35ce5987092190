"""What would a smaller model say next, or the model itself after its first layers?

Each pass makes one draft token for all rows of a step without waiting for the host: it reads the
rows' newest tokens from their history, as the pass before left them there.

A draft model is a decoder with a cache of its own in the target's blocks. Each block of the
target's tables has room for the draft's keys and values too, so that the draft needs no tables, no
pool and no prefix cache of its own; a request that finds a prompt cached finds it cached for both.
After a full acceptance the draft has not seen its own last draft token, therefore its first pass is
of each row's two newest tokens.

The first layers of the target, its final norm and its output matrix draft with the target's cache:
their keys and values go to the very places where verification writes the same numbers a moment
later, so nothing has to be kept or followed. Source of the idea: Zhang et al., "Draft & Verify:
Lossless Large Language Model Acceleration via Self-Speculative Decoding", 2023 (who leave out other
layers than the last).

Letters: B rows of a step, k draft tokens of each, n tokens of a row in one pass, g KV groups, V ids
of the target's vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ridgeline.architectures.draft_groups import draft_groups
from ridgeline.architectures.spec import ModelSpec
from ridgeline.attention.layout import DecodeLayout, ForwardBatch
from ridgeline.errors import ConfigError, check
from ridgeline.kernels.drafts import draft_inputs, first_inputs, put_drafts
from ridgeline.kernels.draw_rows import draw_rows
from ridgeline.kernels.launching import make_workspace
from ridgeline.kernels.step_inputs import StepInputs, make_step_inputs
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.speculation.contract import DraftMethod, DraftStep

DRAW_CHUNK = 4096  # logits that one program of `draw_rows` reads
UNSEEN = 2  # tokens at the end of a row that a draft model has not computed, at most


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


class DraftModel(DraftMethod):
    """A DraftMethod. `kv` is the draft's, over the target's block ids; `vocab_size` the target's,
    and that of the logits that `draft` returns: ids that the draft has not are at minus infinity.

    A block that a request filled with a fully accepted step and then ended may lack the draft's
    keys of its last token (they are then older numbers): who finds it cached gets worse drafts for
    a while, and the same tokens.
    """

    name = "draft"
    needs_tokens = True

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        *,
        vocab_size: int,
        max_draft_tokens: int,
        max_rows: int,
        max_logit_rows: int,
    ) -> None:
        """Steps of up to `max_rows` rows; with draws, of rows * drafts <= `max_logit_rows`."""
        check(
            decoder.num_token_ids >= vocab_size,
            "the draft can look up all ids of the target",
            has=decoder.num_token_ids,
            needs=vocab_size,
        )
        self.decoder, self.kv = decoder, kv
        self.max_draft_tokens = max_draft_tokens
        self._passes = ModelPasses(
            decoder,
            kv,
            vocab_size=vocab_size,
            max_rows=max_rows,
            max_logit_rows=max_logit_rows,
            longest=UNSEEN,
        )

    def draft(self, step: DraftStep, num_draft_tokens: int) -> torch.Tensor | None:
        return self._passes.draft(step, num_draft_tokens, begin=UNSEEN)

    def follow(self, batch: ForwardBatch) -> None:
        self.decoder.fill(batch, self.kv)

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self.kv.copy_blocks(sources, targets)

    @property
    def num_bytes(self) -> int:
        return self.decoder.num_bytes + self.kv.num_bytes + self._passes.num_bytes


def open_draft_model(
    decoder: Decoder,
    target: Decoder,
    target_kv: KVCache,
    *,
    max_draft_tokens: int,
    max_rows: int,
    max_logit_rows: int,
    kv_format: str = "auto",
) -> DraftModel:
    """With a cache for all blocks of the target's, in `kv_format`. ConfigError if the draft's
    layers find no block tables, or it does not reach as far as the target."""
    if decoder.max_model_len < target.max_model_len:
        raise ConfigError(
            f"the draft is made for max_model_len {decoder.max_model_len}, the model for "
            f"{target.max_model_len}; make both for the same"
        )
    kv = KVCache(
        decoder.spec,
        draft_groups(target_kv.groups, decoder.spec),
        target_kv.num_blocks,
        target_kv.block_size,
        decoder.dtype,
        decoder.device,
        kv_format=kv_format,
    )
    return DraftModel(
        decoder,
        kv,
        vocab_size=target.spec.vocab_size,
        max_draft_tokens=max_draft_tokens,
        max_rows=max_rows,
        max_logit_rows=max_logit_rows,
    )


class EarlyLayers(DraftMethod):
    """A DraftMethod over the target's own decoder and cache."""

    name = "early"

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        *,
        num_layers: int,
        max_draft_tokens: int,
        max_rows: int,
        max_logit_rows: int,
    ) -> None:
        """Steps of up to `max_rows` rows; with draws, of rows * drafts <= `max_logit_rows`.
        ConfigError if so many layers are none, or all."""
        if not 0 < num_layers < decoder.spec.num_layers:
            raise ConfigError(
                f"speculate early:{num_layers}: draft with 1 to {decoder.spec.num_layers - 1} of "
                f"the model's {decoder.spec.num_layers} layers"
            )
        self.max_draft_tokens = max_draft_tokens
        self._passes = ModelPasses(
            decoder,
            kv,
            vocab_size=decoder.spec.vocab_size,
            max_rows=max_rows,
            max_logit_rows=max_logit_rows,
            num_layers=num_layers,
        )

    def draft(self, step: DraftStep, num_draft_tokens: int) -> torch.Tensor | None:
        return self._passes.draft(step, num_draft_tokens)

    @property
    def num_bytes(self) -> int:
        return self._passes.num_bytes


# ---------------------------------------------------------------------- can it draft?


class Vocabulary(Protocol):
    """What `ridgeline.text.tokenizer.Tokenizer` has: pieces of 0 .. vocab_size - 1."""

    vocab_size: int

    def id_to_piece(self, token_id: int) -> str | None: ...


def check_pair(
    target: ModelSpec,
    draft: ModelSpec,
    *,
    max_model_len: int,
    draft_context: int | None = None,
    tokenizers: tuple[Vocabulary | None, Vocabulary | None],
) -> None:
    """ConfigError that says what differs. `tokenizers` are the target's and the draft's;
    `draft_context` is what the draft's positions were made for, scaling included, unless given its
    `max_position_embeddings`.

    A matrix of the vocabulary may be filled up to a round number of rows, each model's to another
    one: that is seen by tokenizers that agree on every id which both have a piece for.
    """
    longest = draft_context or draft.max_position_embeddings
    if longest < max_model_len:
        raise ConfigError(
            f"the draft reads {longest} tokens at most and max_model_len is {max_model_len}; set "
            f"max_model_len to {longest} or less, or choose another draft"
        )
    ours, theirs = tokenizers
    if ours is None or theirs is None:
        if target.vocab_size != draft.vocab_size:
            raise ConfigError(
                f"{_sizes(target, draft)}, and without a tokenizer of both it cannot be seen "
                "whether they mean the same; give both their tokenizers, or choose another draft"
            )
        return
    _check_pieces(ours, theirs)
    known = max(ours.vocab_size, theirs.vocab_size)
    if target.vocab_size != draft.vocab_size and known > min(target.vocab_size, draft.vocab_size):
        raise ConfigError(
            f"{_sizes(target, draft)}, which is more than rows nobody uses: the tokenizer has "
            f"{known}; {_OTHER}"
        )


_OTHER = "a draft must share the model's vocabulary: choose one of the same family"


def _check_pieces(ours: Vocabulary, theirs: Vocabulary) -> None:
    for token_id in range(min(ours.vocab_size, theirs.vocab_size)):
        mine, other = ours.id_to_piece(token_id), theirs.id_to_piece(token_id)
        if mine != other and mine is not None and other is not None:
            raise ConfigError(
                f"the draft has another vocabulary than the model: token {token_id} is {mine!r} in "
                f"the model's and {other!r} in the draft's; {_OTHER}"
            )


def _sizes(target: ModelSpec, draft: ModelSpec) -> str:
    return f"the model has {target.vocab_size} token ids and the draft {draft.vocab_size}"
