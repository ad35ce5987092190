"""Which requests are there, in what state, and which rows of the executor serve them?"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.errors import check
from ridgeline.request import FinishReason, Request, RequestOutput
from ridgeline.scheduler.beam_group import BeamGroup
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.forks import Forks
from ridgeline.scheduler.policies.base import Policy
from ridgeline.scheduler.queue import WaitingQueue
from ridgeline.scheduler.running import RunningSet


class Ledger:
    """Every live request is running, waiting or parked (a fork that waits for its parent).

    A row is what the executor keeps for one sequence: a request, or one beam of a beam search.
    """

    def __init__(
        self, blocks: BlockManager, policy: Policy, max_bypasses: int, max_preemptions: int
    ) -> None:
        self.blocks = blocks
        self.max_preemptions = max_preemptions
        self.requests: dict[str, Request] = {}
        self.running = RunningSet(policy)
        self.waiting = WaitingQueue(policy, max_bypasses)
        self.forks = Forks()
        self.groups: dict[str, BeamGroup] = {}  # by request, and by each of its rows
        self.preempted: list[str] = []  # rows closed since the last plan that was sent
        self.finished: list[str] = []
        self.num_preemptions = 0
        self.num_veterans = 0  # live requests that were preempted max_preemptions times
        self.num_changes = 0  # of the set of running requests
        self.last_planned = 0
        self.last_retired = 0

    # ------------------------------------------------------------------ rows

    def group_of(self, row: Request) -> BeamGroup | None:
        return self.groups.get(row.request_id) if self.groups else None

    def rows(self, request: Request) -> Sequence[Request]:
        group = self.group_of(request)
        return (request,) if group is None else group.rows

    def first_row(self, request: Request) -> Request:
        """The one that is admitted; the others of a beam search follow it."""
        return self.rows(request)[0]

    def request_of(self, row: Request) -> Request:
        group = self.group_of(row)
        return row if group is None else group.request

    def close(self, row: Request, names: list[str]) -> None:
        """Its blocks go, and so does the executor's row, whose name is added to `names`."""
        self.blocks.free(row, self.last_planned)
        row.epoch += 1
        row.has_drafts = False
        row.draft_token_ids = ()
        if row.has_row:
            row.has_row = False
            names.append(row.request_id)

    def regroup(self, group: BeamGroup) -> None:
        """Its reports are complete: let it choose, close what it drops, and open anew what goes on,
        as the tokens of beams are chosen on the host."""
        for row in group.advance(self.blocks):
            self.close(row, self.finished)
            if row is not group.request:
                del self.groups[row.request_id]
        for row in group.rows:
            self.groups[row.request_id] = group
            if row.has_row:
                row.has_row = False
                self.finished.append(row.request_id)

    # ------------------------------------------------------------------ life of a request

    def start(self, request: Request) -> None:
        """From waiting to running."""
        self.waiting.take(request)
        self.forks.discard(request)
        self.running.add(request)
        self.num_changes += 1

    def preempt(self, request: Request, now: float) -> None:
        """From running back to waiting, to be computed anew."""
        for row in self.rows(request):
            self.close(row, self.preempted)
        if (group := self.group_of(request)) is not None:
            group.forget_reports()
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.num_veterans += request.num_preemptions == self.max_preemptions
        self.running.discard(request)
        self.num_changes += 1
        self.waiting.put_back(request, now)

    def end(self, request: Request) -> None:
        """From wherever it is to nowhere."""
        for row in self.rows(request):
            self.close(row, self.finished)
            row.is_ended = True
            self.groups.pop(row.request_id, None)
        request.is_ended = True
        self.groups.pop(request.request_id, None)
        del self.requests[request.request_id]
        self.waiting.discard(request)
        self.running.discard(request)
        self.running.policy.on_end(request)
        self.forks.wake(request)
        self.forks.discard(request)
        self.num_veterans -= request.num_preemptions >= self.max_preemptions
        self.num_changes += 1

    def end_with_error(self, request: Request, reason: str) -> RequestOutput:
        self.end(request)
        return RequestOutput(request.request_id, (), FinishReason.ERROR, error=reason)

    def retire(self, step_id: int) -> None:
        """Step `step_id` and all before it are over."""
        self.last_retired = step_id
        self.blocks.retire(step_id)

    # ------------------------------------------------------------------ invariants

    def check_invariants(self) -> None:
        """Everything that must hold between two steps, for tests and for idle time."""
        rows = [row for request in self.requests.values() for row in self.rows(request)]
        self.blocks.check_invariants(rows)
        num_queued = len(self.running) + len(self.waiting) + self.forks.num_parked
        check(num_queued == len(self.requests), "each request is in one queue", num=num_queued)
        for request in self.requests.values():
            queues = (request in self.running, request in self.waiting)
            num_queues = sum(queues) + self.forks.is_parked(request)
            check(num_queues == 1, "each request is in one queue", id=request.request_id)
            check(not request.is_ended, "what has ended is gone", id=request.request_id)
        for row in rows:
            is_running = self.request_of(row) in self.running
            check(is_running or not row.block_ids, "only running requests hold blocks")
            check(row.num_computed_tokens <= row.num_computable_tokens, "the last is not computed")
            check(row.num_computed_tokens <= len(row.token_ids), "only tokens there are")
        seats = sum(request.sampling.beam_width for request in self.running)
        check(seats == self.running.num_seats, "seats are counted", seats=seats)
        if not self.requests:
            self._check_empty()

    def _check_empty(self) -> None:
        check(not self.groups and not self.forks, "no state is left when idle")
        check(self.forks.num_parked == self.num_veterans == 0, "no state is left when idle")
        if self.last_planned == self.last_retired:
            num_free = self.blocks.num_free_blocks
            check(num_free == self.blocks.num_blocks, "all is free when idle", free=num_free)
