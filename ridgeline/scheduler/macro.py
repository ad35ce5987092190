"""How many steps will be plain decodes of the same rows, and what is the state after them?

A step is quiet when every running row computes its one pending token and nothing else happens:
nobody is admitted, preempted or ended, no prompt is computed, no draft verified. A run of quiet
steps is known in advance, so it need not be planned step by step: only those steps touch the block
manager that open a block, fill one or let one leave a window. These are done here in order, by the
block manager's own functions; everything between them is counting. The state that `advance` leaves
behind, tables, hashes and order of free blocks included, is that of the same steps one by one.

With steps in flight, each quiet step that is planned goes with the result of an older one that is
taken in. The oldest may have computed prompts, as long as it sampled for every row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ridgeline.errors import check
from ridgeline.request import UNKNOWN_TOKEN, Request
from ridgeline.scheduler.policies.base import InFlight, Policy
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.step import BlockTables, Decodes, ScheduledRequest, StepPlan

Opened = Mapping[int, Mapping[int, BlockTables]]  # by step (from 0), by row: blocks it was given


class QuietRun(msgspec.Struct, frozen=True):
    """`num_steps` steps in which each row computes its token at `starts`, then the next, and so on.

    Plans are made on demand; they equal those that `Scheduler.schedule` would have made.
    """

    first_step_id: int
    num_steps: int
    row_ids: tuple[str, ...]
    starts: tuple[int, ...]
    opened: Opened
    no_blocks: BlockTables
    begun: tuple[int, ...]  # rows that the first result gives their first token
    preempted: tuple[str, ...]  # rows that the first of the plans closes
    finished: tuple[str, ...]

    def plan(self, index: int) -> StepPlan:
        blocks = [self.no_blocks] * len(self.row_ids)
        for n, table in self.opened.get(index, {}).items():
            blocks[n] = table
        starts = tuple([start + index for start in self.starts])
        rows = zip(self.row_ids, starts, blocks, strict=True)
        return StepPlan(
            self.first_step_id + index,
            tuple([ScheduledRequest(row, start, 1, new, True) for row, start, new in rows]),
            preempted=() if index else self.preempted,
            finished=() if index else self.finished,
        ).knowing(Decodes(self.row_ids, starts, tuple(sorted(self.opened.get(index, ())))))

    def plans(self) -> Iterator[StepPlan]:
        return map(self.plan, range(self.num_steps))


class QuietSteps:
    """The look ahead of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        policy = type(scheduler.policy)
        self._can_be_quiet = (
            scheduler.policy.rank_is_fixed
            and policy.token_budget is Policy.token_budget
            and policy.on_plan is Policy.on_plan
            and not scheduler.num_drafts
            and scheduler.stages == 1
        )

    def rows(self) -> list[Request]:
        """The rows of the next steps when these are quiet; [] when the next one may not be."""
        scheduler = self.scheduler
        state = scheduler.state
        if not self._can_be_quiet or not state.forks.is_quiet:
            return []
        size = len(state.running)
        if not size or size > scheduler.max_num_batched_tokens:
            return []
        if size < scheduler.max_num_batched_tokens and scheduler.may_admit():
            return []
        rows = []
        for _, _, row in state.running.in_order(0.0):
            if len(row.token_ids) - row.num_computed_tokens != 1:
                return []  # it has a prompt to compute
            rows.append(row)
        in_flight = [flown for _, flown in scheduler.in_flight.values()]
        if in_flight and not _samples(rows, in_flight[0]):
            return []
        if not all(_decodes(rows, flown) for flown in in_flight[1:]):
            return []
        return rows

    def most(self, rows: Sequence[Request]) -> int:
        """So many steps are quiet for sure, as far as lengths and memory tell."""
        last = 0 if self.scheduler.in_flight else 1  # its result ends the request at once
        most = min([row.num_computable_tokens - row.num_computed_tokens for row in rows]) - last
        free = self.scheduler.blocks.num_free_blocks
        if most <= 0 or self._num_to_take(rows, most) <= free:
            return max(0, most)
        low, high = 0, most
        while low < high - 1:
            middle = (low + high) // 2
            if self._num_to_take(rows, middle) <= free:
                low = middle
            else:
                high = middle
        return low

    def advance(
        self, rows: Sequence[Request], token_ids: Sequence[Sequence[int]], num_steps: int
    ) -> QuietRun:
        """Plan `num_steps` quiet steps and take in as many results, the oldest first.

        `rows` as `rows` gave them, `num_steps` at most what `most` said; `token_ids` are the next
        `num_steps` tokens of each row, none of them a stop token. As many steps are in flight
        afterwards as were before.
        """
        state = self.scheduler.state
        first_step_id = state.last_planned + 1
        begun = tuple(n for n, row in enumerate(rows) if not row.has_output)
        starts = tuple(row.num_computed_tokens for row in rows)
        self._append(rows, token_ids, num_steps)
        opened = self._touch_blocks(rows, num_steps)
        run = QuietRun(
            first_step_id,
            num_steps,
            tuple(row.request_id for row in rows),
            starts,
            opened,
            ((),) * len(self.scheduler.blocks.windows),
            begun,
            tuple(state.preempted),
            tuple(state.finished),
        )
        state.preempted, state.finished = [], []
        self._replace_in_flight(run, rows)
        return run

    # ------------------------------------------------------------------ what is quiet

    def _num_to_take(self, rows: Sequence[Request], num_steps: int) -> int:
        """Blocks that so many steps open."""
        size = self.scheduler.blocks.block_size
        total = 0
        for row in rows:
            need = -(-(row.num_computed_tokens + num_steps) // size) - len(row.block_ids[0])
            total += need if need > 0 else 0
        return total * len(self.scheduler.blocks.windows)

    # ------------------------------------------------------------------ what is done

    def _append(
        self, rows: Sequence[Request], token_ids: Sequence[Sequence[int]], num_steps: int
    ) -> None:
        unknown = [UNKNOWN_TOKEN] * len(self.scheduler.in_flight)
        for row, new in zip(rows, token_ids, strict=True):
            stops = row.sampling.stop_token_ids
            if len(new) != num_steps or (stops and not frozenset(stops).isdisjoint(new)):
                check(False, "a token for each step, and none that stops", id=row.request_id)
            tokens = row.token_ids
            tokens[len(tokens) - len(unknown) :] = new
            tokens += unknown
            row.has_output = True

    def _touch_blocks(self, rows: Sequence[Request], num_steps: int) -> Opened:
        """Block by block what the steps take and fill, in order; the rest is counting."""
        state, blocks = self.scheduler.state, self.scheduler.blocks
        planned, completed = state.last_planned, state.last_completed
        done = [
            row.num_done_tokens - 1 + n for row, n in zip(rows, self._oldest(rows), strict=True)
        ]
        has_windows, names = blocks.has_windows, blocks.prefix_caching
        opened: dict[int, dict[int, BlockTables]] = defaultdict(dict)
        events = self._events(rows, done, num_steps, publishes=names or has_windows)
        for i, has_result, n in events:
            row = rows[n]
            if has_windows or blocks.num_deferred_blocks:
                blocks.complete(completed + i - 1)
            if has_result:
                row.num_done_tokens = done[n] + i
                blocks.publish(row, planned + i)
            else:
                opened[i - 1][n] = blocks.extend_by_one(row)
        for row, num_done in zip(rows, done, strict=True):
            row.num_computed_tokens += num_steps
            row.num_done_tokens = num_done + num_steps
            if not names:
                row.num_published_blocks = row.num_done_tokens // blocks.block_size
        state.last_planned += num_steps
        state.complete(completed + num_steps)
        return opened

    def _oldest(self, rows: Sequence[Request]) -> list[int]:
        """How many tokens of each row the first result is for."""
        for _, flown in self.scheduler.in_flight.values():
            return [entry.num_tokens for entry, _, _ in flown]
        return [1] * len(rows)

    def _events(
        self, rows: Sequence[Request], done: Sequence[int], num_steps: int, *, publishes: bool
    ) -> list[tuple[int, bool, int]]:
        """(step, from 1; False: a row opens a block, True: it fills one or lets one leave a window;
        the row), in the order in which the block manager is told. Without `publishes` it need not
        know which blocks are full."""
        blocks = self.scheduler.blocks
        size, end = blocks.block_size, num_steps + 1
        offsets = {(window - 1) % size for window in blocks.windows if window is not None} | {0}
        events: list[tuple[int, bool, int]] = []
        for n, row in enumerate(rows):
            first = len(row.block_ids[0]) * size - row.num_computed_tokens + 1
            events += [(i, False, n) for i in range(first, end, size)]
            if not publishes:
                continue
            for offset in offsets:
                first = (offset - done[n] - 1) % size + 1
                events += [(i, True, n) for i in range(first, end, size)]
            if done[n] > row.num_done_tokens:
                events.append((1, True, n))  # the first result is that of a prompt
        events.sort()
        return events

    def _replace_in_flight(self, run: QuietRun, rows: Sequence[Request]) -> None:
        """The steps that are in flight now; those before them are over."""
        in_flight = self.scheduler.in_flight
        num_in_flight = len(in_flight)
        for step_id in list(in_flight)[: run.num_steps]:
            del in_flight[step_id]
        for index in range(max(0, run.num_steps - num_in_flight), run.num_steps):
            plan = run.plan(index)
            entries = zip(plan.scheduled, rows, strict=True)
            in_flight[plan.step_id] = (plan, [(entry, row, row.epoch) for entry, row in entries])


def _samples(rows: Sequence[Request], in_flight: Sequence[InFlight]) -> bool:
    """Does a step in flight sample for each of these rows, in this order?"""
    if len(in_flight) != len(rows):
        return False
    for row, (entry, flown, epoch) in zip(rows, in_flight, strict=True):
        if flown is not row or epoch != row.epoch or not entry.samples:
            return False
    return True


def _decodes(rows: Sequence[Request], in_flight: Sequence[InFlight]) -> bool:
    """Does it compute one token of each of them and nothing more?"""
    return _samples(rows, in_flight) and all(entry.num_tokens == 1 for entry, _, _ in in_flight)
