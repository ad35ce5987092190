"""What does a plan mean for an engine that drafts? Rows whose length only the device knows.

A step in which every row has one new token and its drafts is captured. In any other step drafts
are left aside, which a plan allows; and as prompts need to know where each row stands, the host
then waits for the steps whose drafts it has not heard of.
Letters: B rows of a step, R rows that sample, T tokens, k drafts of a row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from ridgeline.attention.layout import ForwardBatch
from ridgeline.errors import InternalError, check
from ridgeline.executor.batch import BatchBuilder, RowMissing, SamplingRows, StepBatch
from ridgeline.executor.decode_graphs import CapturedStep, RowDraws
from ridgeline.executor.draft_graphs import DraftGraphs
from ridgeline.executor.mixed_graphs import KNOWN_TO_HOST
from ridgeline.executor.rows import PADDING_ROW, Row, Rows
from ridgeline.executor.transfer import Array, Transfer
from ridgeline.kernels.drafts import History
from ridgeline.kernels.noise import draft_keys
from ridgeline.sampling.batch import host_draws
from ridgeline.speculation.verify import RunRows, build_run, is_verified_by_odds
from ridgeline.step import Decodes, ScheduledRequest, StepPlan

_NOT_ASKED: Array = np.empty(0, np.int64)


@dataclass(slots=True)
class DraftRows:
    """What stays the same while the same rows decode. `sent_XB` is filled for each step anew, as
    far as it changes: it is copied as a step is sent."""

    kept: SamplingRows
    has_odds: bool  # some rows are checked by the odds of their drafts
    sent_XB: Array
    limits: list[int]  # that stand in it
    has_blocks: bool = False  # so do new blocks
    num_plain: int = 0  # steps without drafts that are not yet in the rows' `num_missed`
    run: RunRows | None = None
    num_draft_tokens: int = -1  # of `run`
    _draws: RowDraws | None = None

    @property
    def draws(self) -> RowDraws:
        """For captured steps that not all rows are greedy in; made when it is first asked for."""
        if self._draws is None:
            rows = [row.sampling for row in self.kept.rows]
            places, by_odds_R = host_draws(rows), np.array([is_verified_by_odds(r) for r in rows])
            draft_tokens = replace(places, keys_R=draft_keys(places.keys_R, ~by_odds_R))
            self._draws = RowDraws(places, draft_tokens, by_odds_R)
        return self._draws

    def run_of(self, num_draft_tokens: int, vocab_size: int, transfer: Transfer) -> RunRows:
        """The rows as torch samples them, with so many drafts each."""
        if self.run is None or self.num_draft_tokens != num_draft_tokens:
            rows = [row.sampling for row in self.kept.rows]
            each = [num_draft_tokens] * len(rows)
            self.run = build_run(rows, each, vocab_size, transfer.send)
            self.num_draft_tokens = num_draft_tokens
        return self.run


@dataclass(slots=True)
class DraftBatch:
    """A captured step. `limits`: how many drafts of each row count. `least_positions`: where the
    first new token of each row stands, or behind that. `missed`: tokens that a draft model has not
    seen and needs to."""

    step: CapturedStep
    rows: DraftRows
    limits: list[int]
    least_positions: Array
    missed: ForwardBatch | None


class DraftBatchBuilder(BatchBuilder):
    """`num_unsure` steps with drafts are in flight."""

    def __init__(
        self,
        rows: Rows,
        block_size: int,
        vocab_size: int,
        transfer: Transfer,
        graphs: DraftGraphs,
        *,
        needs_tokens: bool,
        max_draft_tokens: int,
    ) -> None:
        super().__init__(rows, block_size, vocab_size, transfer)
        self._graphs = graphs
        self._needs_tokens, self._max_draft_tokens = needs_tokens, max_draft_tokens
        self._draft_rows: DraftRows | None = None
        self.num_unsure = 0

    def build_step(self, plan: StepPlan) -> DraftBatch | StepBatch:
        """As `build`. Drafts that are left aside count as wrong ones."""
        if plan.decodes is not None and len(plan.decodes.starts) <= self._graphs.buckets[-1]:
            return self._plain_batch(plan, plan.decodes)
        scheduled, get, no_blocks = plan.scheduled, self._rows.get, None
        rows: list[Row] = []
        is_decode = len(scheduled) <= self._graphs.buckets[-1]
        extended: list[int] = []
        drafts: list[int] = []
        for entry in scheduled:  # kept tight, as each step with drafts runs through it
            row = get(entry.request_id)
            if row is None:
                raise RowMissing(entry.request_id)
            blocks = entry.new_block_ids
            if blocks is not no_blocks:
                if any(blocks):
                    if row.slot not in self._rows.dirty:
                        extended.append(len(rows))
                    self._rows.append_blocks(row, blocks)
                else:
                    no_blocks = blocks  # the same object for most rows
            num_tokens, num_draft = entry.num_tokens, entry.num_draft
            if num_tokens <= num_draft or entry.start + num_tokens > row.num_slots:
                _refuse(entry, row)
            if num_tokens - num_draft != 1 or not entry.samples:
                is_decode = False
            drafts.append(num_draft)
            rows.append(row)
        if is_decode:
            return self._draft_batch(scheduled, rows, extended, drafts)
        return self._other_batch(scheduled, rows)

    def _plain_batch(self, plan: StepPlan, decodes: Decodes) -> DraftBatch:
        """No row has a draft, and most steps of many rows are so: what each row is looked at for is
        that it is there."""
        get = self._rows.get
        rows = [row for row_id in decodes.row_ids if (row := get(row_id)) is not None]
        if len(rows) < len(decodes.row_ids):
            raise RowMissing(next(row_id for row_id in decodes.row_ids if get(row_id) is None))
        extended: list[int] = []
        for place in decodes.opened:
            if rows[place].slot not in self._rows.dirty:
                extended.append(place)
            self._rows.append_blocks(rows[place], plan.scheduled[place].new_block_ids)
        kept, num = self._draft_rows_of(rows), len(rows)
        if any(kept.limits):
            kept.limits = [0] * num
            kept.sent_XB[1] = 0
        if extended or kept.has_blocks:
            self._enter_blocks(kept, plan.scheduled, extended)
        kept.num_plain += 1
        least = _NOT_ASKED
        if kept.kept.batch.banned_until is not None:
            slack = self._max_draft_tokens if self.num_unsure else 0
            least = np.array(decodes.starts, np.int64) + (1 - slack)
        return DraftBatch(CapturedStep(num, kept.sent_XB), kept, kept.limits, least, None)

    # ------------------------------------------------------------------ one token, and drafts

    def _draft_batch(
        self,
        scheduled: Sequence[ScheduledRequest],
        rows: list[Row],
        extended: list[int],
        drafts: list[int],
    ) -> DraftBatch:
        num, wanted = len(rows), max(drafts)
        k = self._graphs.captured_for(num, wanted)
        kept = self._draft_rows_of(rows)
        limits = drafts if k >= wanted else [min(num_draft, k) for num_draft in drafts]
        if limits != kept.limits:
            kept.sent_XB[1, :num] = kept.limits = limits
        if extended or kept.has_blocks:
            self._enter_blocks(kept, scheduled, extended)
        slack = self._max_draft_tokens if self.num_unsure else 0
        missed = self._missed(scheduled, rows, slack, limits) if self._needs_tokens else None
        least = _NOT_ASKED
        if kept.kept.batch.banned_until is not None:
            least = np.array([entry.start + 1 - slack for entry in scheduled], np.int64)
        step = CapturedStep(num, kept.sent_XB, k)
        return DraftBatch(step, kept, limits, least, missed)

    def _enter_blocks(
        self, kept: DraftRows, scheduled: Sequence[ScheduledRequest], extended: list[int]
    ) -> None:
        """Of the rows at these places, where they are given no more than one of each group."""
        sent, rows = kept.sent_XB, kept.kept.rows
        sent[2:] = -1
        kept.has_blocks = bool(extended)
        for place in extended:
            ids, counts = scheduled[place].new_block_ids, rows[place].num_blocks
            if all(len(new) <= 1 for new in ids):  # the captured step enters them itself
                for group, new in enumerate(ids):
                    if new:
                        sent[2 + 2 * group, place] = new[0]
                        sent[3 + 2 * group, place] = counts[group] - 1
                self._rows.dirty.discard(rows[place].slot)

    def _draft_rows_of(self, rows: list[Row]) -> DraftRows:
        kept = self._draft_rows
        if kept is not None and kept.kept.rows == rows:
            return kept
        self._count_missed()
        sampling = self._sampling_of(rows)
        has_odds = any(is_verified_by_odds(row.sampling) for row in rows)
        num, num_groups = len(rows), len(self._rows.tables_NM)
        bucket = self._graphs.buckets[bisect_left(self._graphs.buckets, num)]
        sent = np.full((2 + 2 * num_groups, bucket), -1, np.int64)
        sent[0, :num], sent[0, num:], sent[1] = [row.slot for row in rows], PADDING_ROW, 0
        kept = DraftRows(sampling, has_odds, sent, [0] * num)
        self._draft_rows = kept
        return kept

    # ---------------------------------------------------------------- what a draft model missed

    def _count_missed(self) -> None:
        """Let the rows know of steps in which they were not looked at."""
        kept = self._draft_rows
        if kept is not None and kept.num_plain:
            for row in kept.kept.rows:
                row.num_missed += kept.num_plain
            kept.num_plain = 0

    def _missed(
        self, scheduled: Sequence[ScheduledRequest], rows: list[Row], slack: int, limits: list[int]
    ) -> ForwardBatch | None:
        """Tokens up to the last but one, which the drafts begin with, of rows that have drafts;
        the others go on missing them. Where the host knows only how long a row may be, some behind
        its end are among them: nobody looks at those before they are computed once more."""
        if not any(limits):
            for row in rows:
                row.num_missed += 1
            return None
        self._count_missed()
        late, num_missed = [], []
        for place, row in enumerate(rows):
            if row.num_missed and limits[place]:
                late.append(place)
                num_missed.append(row.num_missed)
                row.num_missed = 0
            elif row.num_missed:
                row.num_missed += 1  # what this step computes is behind the gap
        if not late:
            return None
        missed = np.array(num_missed, np.int64)
        ends = np.array([scheduled[place].start - 1 for place in late], np.int64)
        begins = np.maximum(ends - missed - slack, 0)
        is_there = ends > begins
        late_rows = [rows[place] for place, there in zip(late, is_there, strict=True) if there]
        if not late_rows:
            return None
        begins, lens = begins[is_there], (ends - begins)[is_there]
        zeros = np.zeros(lens.sum(), np.int64)
        step = self._mixed_step(late_rows, begins, lens, zeros, zeros + KNOWN_TO_HOST)
        batch, history = self.send(step), self._history
        row_of_T = np.repeat(np.array([row.slot for row in late_rows], np.int64), lens)
        slots_T = self._transfer.send(row_of_T)
        batch.token_ids_T = history.tokens_NL[slots_T, batch.positions_T].long()
        return batch

    # ----------------------------------------------------------------------- any other step

    def _other_batch(self, scheduled: Sequence[ScheduledRequest], rows: list[Row]) -> StepBatch:
        """Each decode where it really stands, without its drafts."""
        self._count_missed()
        history = self._history
        decodes = [
            place
            for place, (entry, row) in enumerate(zip(scheduled, rows, strict=True))
            if entry.samples and entry.start + entry.num_tokens - entry.num_draft > row.num_known
        ]
        entries = list(scheduled)
        if decodes:
            slots = self._transfer.send(np.array([rows[i].slot for i in decodes], np.int64))
            lens_D = history.lens_N[slots]
            newest_D = history.tokens_NL[slots, lens_D - 1].long()
            self._rows.last_ids_N.index_copy_(0, slots, newest_D)
            true_lens = lens_D.tolist() if self.num_unsure else None
            for at, place in enumerate(decodes):
                entry, num = scheduled[place], scheduled[place].num_tokens
                num -= entry.num_draft
                start = entry.start if true_lens is None else true_lens[at] - num
                entries[place] = structs.replace(entry, start=start, num_tokens=num, num_draft=0)
                rows[place].num_missed += 1
        return self._mixed_batch(entries, rows)

    @property
    def _history(self) -> History:
        history = self._rows.history
        if history is None:
            raise InternalError("drafts without a history")
        return history


def _refuse(entry: ScheduledRequest, row: Row) -> None:
    end = entry.start + entry.num_tokens
    about: dict[str, object] = {"request": entry.request_id, "start": entry.start, "end": end}
    check(entry.num_tokens > entry.num_draft, "nothing to compute", **about)
    check(end <= row.num_slots, "no block for these tokens", has=row.num_slots, **about)
