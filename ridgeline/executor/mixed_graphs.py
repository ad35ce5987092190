"""How does a step with prompts run as one launch, while it is short enough for launches to matter?

As a decode step does (see decode_graphs), but from tokens to hidden states only: how many rows
sample differs from step to step. Captured once for each bucket of tokens and of decodes among them;
or of tokens alone, where decodes are pieces of one token (`all_pieces`). Behind the last attention
it computes the tokens with logits, for which there is room of a few sizes.
Letters: T tokens of a bucket, D decodes there is room for, R tokens with logits, W work
records, E hidden, N rows there is room for, g KV groups.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from ridgeline.attention import AttentionCase, Pieces
from ridgeline.attention.layout import DecodeLayout, ForwardBatch, LogitsIndices, MixedLayout
from ridgeline.errors import InternalError
from ridgeline.executor.decode_graphs import CapturedSteps, ExecutorParts
from ridgeline.executor.rows import PADDING_ROW
from ridgeline.executor.transfer import Array
from ridgeline.formats import TOKEN_BUCKETS
from ridgeline.kernels.paged_prefill import RECORD

# Of a prompt beside others, from its first token on: such ones are cuDNN's, outside captured steps.
LONGEST_PIECE = 2048
DECODE_BUCKETS = (0, 32, 256, 512)
# Of tokens with logits. As many decodes as there is room for, and some prompts' ends.
LOGITS_BUCKETS = (16, 64, 256, 512)
KNOWN_TO_HOST = -1


@dataclass(frozen=True, slots=True)
class MixedStep:
    """What the host knows of a step: arrays over its T tokens (int64), over its B requests, and
    the same slots for each KV group. `sources_T` is the row whose last token this one is, where
    only the device knows it, else -1. `logits_indices_R` are the tokens whose hidden states are
    asked for; None: all."""

    token_ids_T: Array
    sources_T: Array
    positions_T: Array
    slots_T: Sequence[Array]
    rows_B: Array
    starts_B: Array
    num_new_B: Array
    seq_lens_B: Array
    logits_indices_R: Array | None = None


class Work(Enum):
    """What a step has beside decodes: nothing, pieces of prompts, or (without decodes) one prompt
    with nothing before it."""

    NONE = "none"
    PIECES = "pieces"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class _Size:
    """What a captured step has room for: tokens, decodes among them, tokens with logits."""

    tokens: int
    decodes: int
    logits: int


Key = tuple[_Size, Work]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where each part of the buffer begins, in int64 (token ids at 0), and its end. `width`: work
    records that there is room for in each KV group."""

    width: int
    sources: int
    positions: int
    slots: int
    logits: int
    rows: int
    seq_lens: int
    query_start: int
    work: int
    end: int


@dataclass(frozen=True, slots=True)
class _Sent:
    """Views of the buffer that a step of these sizes is sent in; int32 where kernels want it."""

    token_ids_T: torch.Tensor
    sources_T: torch.Tensor
    positions_T: torch.Tensor
    slots_gT: torch.Tensor
    logits_indices_R: torch.Tensor
    rows_D: torch.Tensor
    seq_lens_D: torch.Tensor
    query_start_D1: torch.Tensor
    work_gWR: torch.Tensor


class MixedGraphs(CapturedSteps[Key]):
    def __init__(self, shared: ExecutorParts, *, max_tokens: int, all_pieces: bool = False) -> None:
        super().__init__(shared)
        decoder = self._decoder
        if not decoder.backend.captures_mixed:
            raise InternalError("mixed steps of a backend that cannot be captured")
        self._backend = decoder.backend
        self._all_pieces = all_pieces
        self.buckets = [b for b in TOKEN_BUCKETS if b <= max_tokens] or [max_tokens]
        spec = decoder.layers[0].attention.spec
        self._case = AttentionCase(spec, decoder.dtype, decoder.device)
        self._layouts: dict[_Size, _Layout] = {}
        most = self.buckets[-1]
        size = self._layout(_Size(most, DECODE_BUCKETS[-1], most)).end
        self._buffer = torch.zeros(size, dtype=torch.int64, device=decoder.device)
        shape = (most, decoder.spec.hidden_size)
        self._hidden = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        backend, windows = decoder.backend, {group.window for group in self._kv.groups}
        self._whole = {
            bucket
            for bucket in self.buckets
            if all(backend.takes_whole(self._case, bucket, window) for window in windows)
        }

    def run(self, step: MixedStep) -> torch.Tensor | None:
        """Hidden states of the step's tokens, [T, E], or of those at its logits indices, [R, E];
        overwritten by the next. None: this step is too long, or in too many pieces, or faster by
        itself."""
        num_tokens = len(step.token_ids_T)
        if num_tokens > self.buckets[-1]:
            return None
        bucket = self.buckets[bisect_left(self.buckets, num_tokens)]
        is_decode = (step.num_new_B == 1) & (not self._all_pieces)
        num_decodes = int(np.count_nonzero(is_decode))
        if num_decodes > DECODE_BUCKETS[-1]:
            return None
        room = DECODE_BUCKETS[bisect_left(DECODE_BUCKETS, num_decodes)]
        work = Work.NONE if num_decodes == len(is_decode) else Work.PIECES
        if bucket in self._whole and _is_whole(step):
            work = Work.WHOLE
        elif num_tokens > LONGEST_PIECE and _has_long(step):
            return None
        num_logits = num_tokens if step.logits_indices_R is None else len(step.logits_indices_R)
        size = _Size(bucket, room, _room_of_logits(bucket, max(room, num_logits)))
        sent = self._fill(step, size, is_decode, work)
        if sent is None:
            return None
        replay = self._captured((size, work))
        self._transfer.send_into(sent, self._buffer[: sent.size])
        replay()
        self.num_steps += 1
        return self._hidden[:num_logits]

    def bucket_of(self, num_tokens: int) -> int:
        """The smallest that has room for them, else the largest there is."""
        return self.buckets[min(bisect_left(self.buckets, num_tokens), len(self.buckets) - 1)]

    def prepare(self, bucket: int, room: int) -> bool:
        """Capture the steps of this size with prompts and so many decodes before one is asked for.
        False: they are, or there are no such steps. Nothing may be in flight."""
        if room and self._all_pieces:
            return False
        works = [Work.PIECES] if room or bucket not in self._whole else [Work.PIECES, Work.WHOLE]
        size = _Size(bucket, room, _room_of_logits(bucket, room))
        captured = [self._prepare((size, work)) for work in works]
        return any(captured)

    # ---------------------------------------------------------------------- what is sent

    def _layout(self, size: _Size) -> _Layout:
        """Of a step of this size; made once."""
        if (made := self._layouts.get(size)) is None:
            made = self._layouts[size] = self._make_layout(size)
        return made

    def _make_layout(self, size: _Size) -> _Layout:
        groups, bucket, room = len(self._kv.groups), size.tokens, size.decodes
        width = self._backend.work_width(self._case, bucket)
        wholes = [bucket, bucket, bucket, groups * bucket, size.logits, room]
        halves = [room, room + 1, groups * width * RECORD]
        return _Layout(width, *accumulate([*wholes, *(-(-n // 2) for n in halves)]))

    def _fill(self, step: MixedStep, size: _Size, is_decode: Array, work: Work) -> Array | None:
        """None when the pieces need more records than there is room for."""
        at, bucket = self._layout(size), size.tokens
        num = len(step.token_ids_T)
        sent = np.zeros(at.end, np.int64)
        sent[:num] = step.token_ids_T
        sent[at.sources : at.sources + num] = step.sources_T
        sent[at.sources + num : at.positions] = KNOWN_TO_HOST
        sent[at.positions : at.positions + num] = step.positions_T
        for slots_T, begin in zip(step.slots_T, range(at.slots, at.logits, bucket), strict=True):
            sent[begin : begin + num] = slots_T
        indices = np.arange(num) if step.logits_indices_R is None else step.logits_indices_R
        sent[at.logits : at.logits + len(indices)] = indices
        which: Array | slice = slice(None)
        if size.decodes:
            self._fill_decodes(sent, at, step, bucket, is_decode)
            which = ~is_decode
        if work is not Work.PIECES:
            return sent
        pieces = Pieces(
            step.rows_B[which], step.starts_B[which], step.num_new_B[which], step.seq_lens_B[which]
        )
        all_records = sent[at.work :].view(np.int32)
        for index, group in enumerate(self._kv.groups):
            records = self._backend.prefill_work(pieces, bucket, group.window, self._case)
            if len(records) > at.width:
                return None
            begin = index * at.width * RECORD
            all_records[begin : begin + records.size] = records.ravel()
        return sent

    def _fill_decodes(
        self, sent: Array, at: _Layout, step: MixedStep, bucket: int, is_decode: Array
    ) -> None:
        """Requests, as the decode kernel sees them, in the order of their tokens. What is between
        two decodes belongs to the first of them by `query_start`, and is answered afterwards."""
        num = np.count_nonzero(is_decode)
        rows, lens, start = (
            sent[at.rows : at.seq_lens],
            sent[at.seq_lens : at.query_start].view(np.int32),
            sent[at.query_start : at.work].view(np.int32),
        )
        rows[:num], rows[num:] = step.rows_B[is_decode], PADDING_ROW
        lens[:num] = step.seq_lens_B[is_decode]
        start[:num], start[num:] = step.starts_B[is_decode], bucket

    def _views(self, size: _Size) -> _Sent:
        at, buffer = self._layout(size), self._buffer
        groups, bucket, room = len(self._kv.groups), size.tokens, size.decodes
        work = buffer[at.work : at.end].view(torch.int32)[: groups * at.width * RECORD]
        return _Sent(
            buffer[: at.sources],
            buffer[at.sources : at.positions],
            buffer[at.positions : at.slots],
            buffer[at.slots : at.logits].view(groups, bucket),
            buffer[at.logits : at.rows],
            buffer[at.rows : at.seq_lens],
            buffer[at.seq_lens : at.query_start].view(torch.int32)[:room],
            buffer[at.query_start : at.work].view(torch.int32)[: room + 1],
            work.view(groups, at.width, RECORD),
        )

    # -------------------------------------------------------------------------- capture

    def _capture(self, key: Key) -> Callable[[], None]:
        size, work = key
        sent = self._views(size)
        self._buffer.zero_()
        sent.sources_T.fill_(KNOWN_TO_HOST)
        sent.query_start_D1.fill_(size.tokens)
        return self._device.capture(partial(self._launch, sent, size.decodes, work))

    def _launch(self, sent: _Sent, room: int, work: Work) -> None:
        tables = tuple(self._tables.tables_gNM)
        slots, size = tuple(sent.slots_gT), self._kv.block_size
        decodes = None
        if room:
            decodes = DecodeLayout(
                sent.rows_D, tables, sent.seq_lens_D, sent.query_start_D1, slots, size
            )
        layout = MixedLayout(
            decodes,
            tuple(sent.work_gWR) if work is Work.PIECES else None,
            tables,
            slots,
            len(sent.token_ids_T),
            size,
            is_whole=work is Work.WHOLE,
        )
        known = sent.sources_T < 0
        last_ids_T = self._rows.last_ids_N.index_select(0, sent.sources_T.clamp(min=0))
        token_ids_T = sent.token_ids_T.where(known, last_ids_T)
        batch = ForwardBatch(
            token_ids_T, sent.positions_T, layout, LogitsIndices(sent.logits_indices_R)
        )
        hidden_RE = self._decoder.forward(batch, self._kv)
        self._hidden[: len(hidden_RE)].copy_(hidden_RE)


def _room_of_logits(bucket: int, num: int) -> int:
    """For `num` tokens of a step of `bucket`: few of them, or all."""
    index = bisect_left(LOGITS_BUCKETS, num)
    return min(LOGITS_BUCKETS[index], bucket) if index < len(LOGITS_BUCKETS) else bucket


def _is_whole(step: MixedStep) -> bool:
    """It is one prompt from its first token on."""
    return len(step.rows_B) == 1 and bool(step.num_new_B[0] == step.seq_lens_B[0])


def _has_long(step: MixedStep) -> bool:
    return bool(((step.num_new_B > LONGEST_PIECE) & (step.num_new_B == step.seq_lens_B)).any())
