"""A plan names requests and counts; which tokens, positions and cache slots are these?

Letters: T packed tokens of the step, B requests, R rows that sample, M blocks per table row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ridgeline.attention.layout import AttentionLayout, ForwardBatch, LogitsIndices
from ridgeline.errors import check
from ridgeline.executor.decode_graphs import CapturedStep
from ridgeline.executor.mixed_graphs import KNOWN_TO_HOST, MixedStep
from ridgeline.executor.rows import PADDING_ROW, Row, Rows
from ridgeline.executor.transfer import Array, Transfer
from ridgeline.sampling.batch import HostDraws, SamplingBatch, build_batch, host_draws
from ridgeline.sampling.controls import RowControls, row_controls
from ridgeline.sampling.row import Needs
from ridgeline.step import ScheduledRequest


@dataclass(slots=True)
class SamplingRows:
    """What stays the same while the same rows sample. `counts_` name those with penalties, by
    row of the batch and by row of the counts."""

    rows: list[Row]
    request_ids: list[str]
    batch: SamplingBatch
    slots_R: torch.Tensor
    counts_rows_C: torch.Tensor | None
    counts_slots_C: torch.Tensor | None
    vocab_size: int
    _controls: RowControls | None = None
    _draws: HostDraws | None = None

    @property
    def draws(self) -> HostDraws | None:
        """For captured steps: how rows are drawn at their temperatures; None: all are greedy."""
        if self._draws is None and self.batch.filters is not None:
            self._draws = host_draws([row.sampling for row in self.rows])
        return self._draws

    @property
    def is_controlled(self) -> bool:
        """`controls` say all that the rows ask of sampling, and there is room for them."""
        return not self.batch.needs & Needs.GRAMMAR and not self.controls.is_too_long

    @property
    def controls(self) -> RowControls:
        """The same for the sampling of a captured step; made when it is first asked for."""
        if self._controls is None:
            rows = [row.sampling for row in self.rows]
            self._controls = row_controls(rows, self.vocab_size)
        return self._controls


@dataclass(slots=True)
class SamplingStep:
    """The rows that sample in this step. `places_R` are their rows of the hidden states that the
    step computes, None when that is every row in order. `positions_R` is where the new tokens will
    stand."""

    kept: SamplingRows
    places_R: torch.Tensor | None
    positions_R: torch.Tensor
    host_positions: Array


@dataclass(slots=True)
class StepBatch:
    """`rows` per scheduled request, in the plan's order. `has_prompts`: not only decodes; then
    `sampling` is left to `BatchBuilder.sampling`, of the entries `due`."""

    forward: ForwardBatch | MixedStep
    rows: list[Row]
    scheduled: Sequence[ScheduledRequest]
    sampling: SamplingStep | None
    has_prompts: bool
    due: Sequence[int] = ()


@dataclass(slots=True)
class CapturedBatch:
    """A decode step that a graph runs; `host_positions` is where the new tokens will stand."""

    step: CapturedStep
    kept: SamplingRows
    host_positions: Array


class RowMissing(Exception):
    """Its argument is the request that is scheduled without a row."""


@dataclass(slots=True)
class _Decode:
    """What stays the same while the same rows decode one token each."""

    rows: list[Row]
    slots: Array
    firsts: Array  # 0 .. B - 1
    lens: list[int]
    query_start: list[int]
    version: int = -1
    width: int = 0
    tables: tuple[Array, ...] = ()
    tables_BM: tuple[torch.Tensor, ...] = ()


class BatchBuilder:
    """`buckets` are the sizes of captured decode steps, rising; none: there are no such steps."""

    def __init__(
        self,
        rows: Rows,
        block_size: int,
        vocab_size: int,
        transfer: Transfer,
        buckets: Sequence[int] = (),
    ) -> None:
        self._buckets = buckets
        self._rows = rows
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._transfer = transfer
        self._offsets = np.arange(block_size)  # in a block
        self._sampling: SamplingRows | None = None
        self._decode: _Decode | None = None

    def build(self, scheduled: Sequence[ScheduledRequest]) -> StepBatch | CapturedBatch:
        """Everything the step needs, sent to the device in one go. Appends the entries' blocks to
        their rows and counts the tokens that will be sampled.

        RowMissing for a request without a row, InternalError for what no row can do.
        """
        rows: list[Row] = []
        starts: list[int] = []
        extended: list[int] = []  # places of rows that got blocks, and had no other change
        is_decode = True
        for entry in scheduled:  # the one loop of a decode step: kept tight
            row = self._rows.get(entry.request_id)
            if row is None:
                raise RowMissing(entry.request_id)
            if any(entry.new_block_ids):
                if row.slot not in self._rows.dirty:
                    extended.append(len(rows))
                self._rows.append_blocks(row, entry.new_block_ids)
            start = entry.start
            end = start + entry.num_tokens
            samples = entry.samples
            if (
                end <= start
                or entry.num_draft
                or samples is not (end == row.num_tokens)
                or end > row.num_tokens
                or end > row.num_slots
            ):
                _refuse(entry, row)
            if samples:
                row.num_tokens = end + 1
            if start < row.num_known or end - start > 1 or not samples:
                is_decode = False
            rows.append(row)
            starts.append(start)
        if is_decode and self._buckets and len(rows) <= self._buckets[-1]:
            return self._captured_batch(scheduled, rows, starts, extended)
        if is_decode:
            return self._decode_batch(scheduled, rows, starts)
        return self._mixed_batch(scheduled, rows)

    # ------------------------------------------------------------ one token for each request

    def _captured_batch(
        self,
        scheduled: Sequence[ScheduledRequest],
        rows: list[Row],
        starts: list[int],
        extended: list[int],
    ) -> CapturedBatch:
        """Nothing is sent here: all that the host knows fits one small array."""
        same = self._decode
        if same is None or same.rows != rows:
            same = self._decode = self._new_decode(rows)
        num, num_groups = len(rows), len(self._rows.tables_NM)
        bucket = self._buckets[bisect_left(self._buckets, num)]
        sent = np.empty((2 + num_groups, bucket), np.int64)
        sent[0, :num], sent[0, num:] = same.slots, PADDING_ROW
        sent[1, :num], sent[1, num:] = starts, 0
        sent[2:] = -1
        for place in extended:
            row, ids = rows[place], scheduled[place].new_block_ids
            begun = starts[place] // self._block_size
            if all(
                not new or (len(new) == 1 and count == begun + 1)
                for new, count in zip(ids, row.num_blocks, strict=True)
            ):  # the captured step enters them itself
                for group, new in enumerate(ids):
                    sent[2 + group, place] = new[0] if new else -1
                self._rows.dirty.discard(row.slot)
        return CapturedBatch(CapturedStep(num, sent), self._sampling_of(rows), sent[1, :num] + 1)

    def _decode_batch(
        self, scheduled: Sequence[ScheduledRequest], rows: list[Row], starts: list[int]
    ) -> StepBatch:
        same = self._decode
        if same is None or same.rows != rows:
            same = self._decode = self._new_decode(rows)
        self._gather_tables(same, max(starts) // self._block_size + 1)
        positions = np.array(starts, np.int64)
        next_positions = positions + 1
        blocks, offsets = np.divmod(positions, self._block_size)
        slots = [self._cache_slots(table[same.firsts, blocks], offsets) for table in same.tables]
        positions_T, next_T, *slots_T = self._transfer.send_all([positions, next_positions, *slots])
        layout = AttentionLayout(
            same.lens,
            next_positions.tolist(),
            same.query_start,
            same.tables_BM,
            tuple(slots_T),
            self._block_size,
        )
        kept = self._sampling_of(rows)
        token_ids_T = self._rows.last_ids_N.index_select(0, kept.slots_R)
        forward = ForwardBatch(token_ids_T, positions_T, layout)
        step = SamplingStep(kept, None, next_T, next_positions)
        return StepBatch(forward, rows, scheduled, step, has_prompts=False)

    def _new_decode(self, rows: list[Row]) -> _Decode:
        num = len(rows)
        firsts = np.arange(num)
        return _Decode(
            rows,
            np.array([row.slot for row in rows], np.int64),
            firsts,
            [1] * num,
            list(range(num + 1)),
        )

    def _gather_tables(self, same: _Decode, width: int) -> None:
        """The rows' tables side by side, no wider than the longest request needs."""
        if same.version == self._rows.version and same.width == width:
            return
        same.version, same.width = self._rows.version, width
        same.tables = tuple(table[same.slots, :width] for table in self._rows.tables_NM)
        same.tables_BM = tuple(self._transfer.send_all(same.tables))

    # ------------------------------------------------------------------- prompts among them

    def _mixed_batch(self, scheduled: Sequence[ScheduledRequest], rows: list[Row]) -> StepBatch:
        if len(rows) == 1:
            return self._single_batch(scheduled, rows)
        starts = np.array([entry.start for entry in scheduled], np.int64)
        lens = np.array([entry.num_tokens for entry in scheduled], np.int64)
        known = self._known_tokens(scheduled, rows)
        due = [place for place, entry in enumerate(scheduled) if entry.samples]
        logits_indices_R = None
        if len(due) < len(known[0]) and not any(map(wants_prompt, scheduled, rows)):
            logits_indices_R = lens.cumsum()[due] - 1
        mixed = self._mixed_step(rows, starts, lens, *known, logits_indices_R)
        return StepBatch(mixed, rows, scheduled, None, has_prompts=True, due=due)

    def _single_batch(self, scheduled: Sequence[ScheduledRequest], rows: list[Row]) -> StepBatch:
        """The same of one row, in few calls: a prompt alone waits for them."""
        entry, row, size = scheduled[0], rows[0], self._block_size
        start, num = entry.start, entry.num_tokens
        end, first, last = start + num, start // size, (start + num - 1) // size + 1
        begin = start - first * size
        slots = []
        for table in self._rows.tables_NM:
            places = table[row.slot, first:last, None] * np.int64(size) + self._offsets
            slots.append(places.reshape(-1)[begin : begin + num])
        known = self._known_tokens(scheduled, rows)
        logits_indices_R = None
        if entry.samples and num > 1 and not wants_prompt(entry, row):
            logits_indices_R = np.array([num - 1], np.int64)
        row_1, start_1, num_1, end_1 = np.array([[row.slot], [0], [num], [end]], np.int64)
        positions = np.arange(start, end)
        mixed = MixedStep(*known, positions, slots, row_1, start_1, num_1, end_1, logits_indices_R)
        due = [0] if entry.samples else []
        return StepBatch(mixed, rows, scheduled, None, has_prompts=True, due=due)

    def sampling(self, step: StepBatch) -> SamplingStep | None:
        """What the rows that sample need; None: there are none. Best asked for with the forward
        pass on its way, as a prompt's first kernel need not wait for it."""
        if isinstance(mixed := step.forward, ForwardBatch):
            return step.sampling
        if not (due := step.due):
            return None
        next_positions = mixed.seq_lens_B[due]
        places_R = None
        if mixed.logits_indices_R is None:
            places = mixed.starts_B[due] + mixed.num_new_B[due] - 1
            places_R, next_R = self._transfer.send_all([places, next_positions])
        else:
            next_R = self._transfer.send(next_positions)
        kept = self._sampling_of([step.rows[place] for place in due])
        return SamplingStep(kept, places_R, next_R, next_positions)

    def _mixed_step(
        self,
        rows: list[Row],
        starts: Array,
        lens: Array,
        token_ids: Array,
        sources: Array,
        logits_indices_R: Array | None = None,
    ) -> MixedStep:
        """`lens` tokens of each row, from position `starts` on."""
        query_start = lens.cumsum() - lens
        slots = np.array([row.slot for row in rows], np.int64)
        positions = np.arange(len(token_ids)) + (starts - query_start).repeat(lens)
        row_of_T, blocks = slots.repeat(lens), positions // self._block_size
        offsets = positions - blocks * self._block_size  # twice as fast as %
        cache_slots = [
            self._cache_slots(table[row_of_T, blocks], offsets) for table in self._rows.tables_NM
        ]
        ends = starts + lens
        about = slots, query_start, lens, ends, logits_indices_R
        return MixedStep(token_ids, sources, positions, cache_slots, *about)

    def send(self, step: MixedStep) -> ForwardBatch:
        """On the device, as it is."""
        ends, starts = step.seq_lens_B, step.starts_B
        width = int(ends.max() - 1) // self._block_size + 1
        tables = [table[step.rows_B, :width] for table in self._rows.tables_NM]
        places = np.flatnonzero(step.sources_T >= 0)
        unknown = np.stack([places, step.sources_T[places]])
        query_start = np.append(starts, len(step.token_ids_T)).astype(np.int32)
        decode_lens = np.where(step.num_new_B == 1, ends, 0).astype(np.int32)
        num_groups = len(tables)
        sent = self._transfer.send_all(
            [
                step.token_ids_T,
                step.positions_T,
                unknown,
                query_start,
                decode_lens,
                step.logits_indices_R if step.logits_indices_R is not None else unknown[0],
                *step.slots_T,
                *tables,
            ]
        )
        token_ids_T = sent[0]
        if len(places):
            token_ids_T[sent[2][0]] = self._rows.last_ids_N[sent[2][1]]
        layout = AttentionLayout(
            step.num_new_B.tolist(),
            ends.tolist(),
            query_start.tolist(),
            tuple(sent[6 + num_groups :]),
            tuple(sent[6 : 6 + num_groups]),
            self._block_size,
            query_start_B1=sent[3],
            decode_lens_B=sent[4],
        )
        logits_indices = None
        if step.logits_indices_R is not None:
            logits_indices = LogitsIndices(
                sent[5], is_last=len(step.logits_indices_R) == len(starts) == 1
            )
        return ForwardBatch(token_ids_T, sent[1], layout, logits_indices)

    def _known_tokens(
        self, scheduled: Sequence[ScheduledRequest], rows: list[Row]
    ) -> tuple[Array, Array]:
        """Token ids that the host knows, and the rows of those that only the device has."""
        num_tokens, first = sum([entry.num_tokens for entry in scheduled]), 0
        token_ids, sources = np.zeros((2, num_tokens), np.int64)
        sources.fill(KNOWN_TO_HOST)
        for entry, row in zip(scheduled, rows, strict=True):
            known = row.known_ids[entry.start : entry.start + entry.num_tokens]
            token_ids[first : first + len(known)] = known
            if len(known) < entry.num_tokens:
                is_last = entry.samples and len(known) == entry.num_tokens - 1
                check(is_last, "only the newest token may be unknown", request=entry.request_id)
                sources[first + len(known)] = row.slot
            first += entry.num_tokens
        return token_ids, sources

    def _cache_slots(self, blocks: Array, offsets: Array) -> Array:
        slots: Array = np.multiply(blocks, self._block_size, dtype=np.int64)
        slots += offsets
        return slots

    # ------------------------------------------------------------------------------ sampling

    def _sampling_of(self, rows: list[Row]) -> SamplingRows:
        kept = self._sampling
        if kept is not None and kept.rows == rows:
            return kept
        send = self._transfer.send
        counted = [
            (i, row.sampling.counts_slot)
            for i, row in enumerate(rows)
            if row.sampling.needs & Needs.PENALTIES
        ]
        where = send(np.array(counted, np.int64).reshape(-1, 2).T.copy()) if counted else None
        kept = self._sampling = SamplingRows(
            rows,
            [row.request_id for row in rows],
            build_batch([row.sampling for row in rows], self._vocab_size, send),
            send(np.array([row.slot for row in rows], np.int64)),
            None if where is None else where[0],
            None if where is None else where[1],
            self._vocab_size,
        )
        return kept


def wants_prompt(entry: ScheduledRequest, row: Row) -> bool:
    """Log-probabilities of tokens of its prompt come out of this step."""
    return row.top_prompt_logprobs is not None and entry.start < row.num_prompt_tokens - 1


def _refuse(entry: ScheduledRequest, row: Row) -> None:
    end = entry.start + entry.num_tokens
    about: dict[str, object] = {"request": entry.request_id, "start": entry.start, "end": end}
    check(entry.num_draft == 0, "this executor verifies no drafts", **about)
    check(entry.num_tokens > 0, "nothing to compute", **about)
    check(end <= row.num_tokens, "tokens beyond the row", has=row.num_tokens, **about)
    check(entry.samples == (end == row.num_tokens), "samples at the wrong token", **about)
    check(end <= row.num_slots, "no block for these tokens", has=row.num_slots, **about)
