"""Which requests are there, and in what state?"""

from __future__ import annotations

from ridgeline.errors import check
from ridgeline.request import FinishReason, Request, RequestOutput
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.forks import Forks
from ridgeline.scheduler.policies.base import Policy
from ridgeline.scheduler.queue import WaitingQueue
from ridgeline.scheduler.running import RunningSet


class Ledger:
    """Every live request is running, waiting or parked (a fork that waits for its parent)."""

    def __init__(
        self,
        blocks: BlockManager,
        policy: Policy,
        max_num_seqs: int,
        max_bypasses: int,
        max_preemptions: int,
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_preemptions = max_preemptions
        self.requests: dict[str, Request] = {}
        self.running = RunningSet(policy)
        self.waiting = WaitingQueue(policy, max_bypasses)
        self.forks = Forks()
        self.preempted: list[str] = []  # whose rows were closed since the last plan that was sent
        self.finished: list[str] = []
        self.num_preemptions = 0
        self.num_veterans = 0  # live requests that were preempted max_preemptions times
        self.num_changes = 0  # of the set of running requests
        self.last_planned = 0
        self.last_retired = 0
        self._num_added = 0
        self._ended: list[Request] = []  # that still have their blocks

    # ------------------------------------------------------------------ life of a request

    def enter(self, request: Request) -> None:
        """From nowhere; who calls this puts it in a queue."""
        self._num_added += 1
        request.order = self._num_added
        request.num_computable_tokens = request.max_num_tokens - 1
        self.requests[request.request_id] = request

    def start(self, request: Request) -> None:
        """From waiting to running."""
        self.waiting.take(request)
        self.forks.discard(request)
        self.running.add(request)
        self.num_changes += 1

    def go_on(self, request: Request, ended: Request, now: float) -> None:
        """From nowhere to running, with the blocks of one that `has_blocks` and has ended with this
        very result. Where that has none, or there is no slot, or blocks are kept for one that may
        not be preempted any more: to the front of the line."""
        self.enter(request)
        request.block_hashes = list(ended.block_hashes)
        request.has_output = True
        prefix = None
        if ended.block_ids and len(self.running) < self.max_num_seqs and not self.num_veterans:
            prefix = self.blocks.share(ended, ended.num_computed_tokens)
        if prefix is None:
            self.waiting.put_back(request, now)
            return
        self.blocks.admit(request, prefix)
        self.running.add(request)
        self.num_changes += 1

    def preempt(self, request: Request, now: float) -> None:
        """From running back to waiting, to be computed anew."""
        self._free(request)
        self._close_row(request, self.preempted)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.num_veterans += request.num_preemptions == self.max_preemptions
        self.running.discard(request)
        self.num_changes += 1
        self.waiting.put_back(request, now)

    def end(self, request: Request, *, has_blocks: bool = False) -> None:
        """From wherever it is to nowhere. `has_blocks`: until `free_ended`."""
        if has_blocks:
            self._ended.append(request)
        else:
            self._free(request)
        self._close_row(request, self.finished)
        request.is_ended = True
        del self.requests[request.request_id]
        self.waiting.discard(request)
        self.running.discard(request)
        if request.sampling.beam_width == 1:  # a search ends as one
            self.running.policy.on_end(request)
        self.forks.wake(request)
        self.forks.discard(request)
        self.num_veterans -= request.num_preemptions >= self.max_preemptions
        self.num_changes += 1

    def free_ended(self) -> None:
        for request in self._ended:
            self._free(request)
        self._ended.clear()

    def _free(self, request: Request) -> None:
        self.blocks.free(request, self.last_planned)
        request.epoch += 1

    def _close_row(self, request: Request, names: list[str]) -> None:
        """The executor's row goes; its name is added to `names`."""
        request.has_drafts = False
        request.draft_token_ids = ()
        if request.has_row:
            request.has_row = False
            names.append(request.request_id)

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
        self.blocks.check_invariants(self.requests.values())
        num_queued = len(self.running) + len(self.waiting) + self.forks.num_parked
        check(num_queued == len(self.requests), "each request is in one queue", num=num_queued)
        for request in self.requests.values():
            queues = (request in self.running, request in self.waiting)
            num_queues = sum(queues) + self.forks.is_parked(request)
            check(num_queues == 1, "each request is in one queue", id=request.request_id)
            check(not request.is_ended, "what has ended is gone", id=request.request_id)
            check(request in self.running or not request.block_ids, "only running ones hold blocks")
            num_computed = request.num_computed_tokens
            check(num_computed <= request.num_computable_tokens, "the last is not computed")
            check(num_computed <= len(request.token_ids), "only tokens there are")
        check(not self._ended, "who has ended holds nothing")
        if not self.requests:
            self._check_empty()

    def _check_empty(self) -> None:
        check(not self.forks, "no state is left when idle")
        check(self.forks.num_parked == self.num_veterans == 0, "no state is left when idle")
        if self.last_planned == self.last_retired:
            num_free = self.blocks.num_free_blocks
            check(num_free == self.blocks.num_blocks, "all is free when idle", free=num_free)
