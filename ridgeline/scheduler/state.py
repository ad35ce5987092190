"""Which requests are there, and in what state?"""

from __future__ import annotations

from ridgeline.errors import check
from ridgeline.request import FinishReason, Request, RequestOutput
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.base import Policy
from ridgeline.scheduler.queue import RunningSet, WaitingQueue


def can_share(child: Request, parent: Request) -> bool:
    """Is there a computed prompt that `child` could take over from `parent`?"""
    return (
        not parent.is_ended
        and len(child.prompt_token_ids) > 1
        and child.prompt_token_ids == parent.prompt_token_ids
        and child.cache_salt == parent.cache_salt
        and child.sampling.prompt_logprobs is None
    )


def has_prompt(parent: Request, num_computed: int) -> bool:
    """Are all prompt tokens but the last, which each fork computes itself, among them?"""
    return num_computed >= len(parent.prompt_token_ids) - 1


class Forks:
    """Forks that have not been admitted yet. They are parked, out of everybody's way, while their
    parent lives and its prompt is not computed; then they wait in line like all others."""

    def __init__(self) -> None:
        self._parents: dict[str, Request] = {}  # by fork
        self.parked: dict[str, dict[str, Request]] = {}  # by parent, by fork
        self._woken: dict[str, None] = {}  # parents whose forks may wait in line from now on

    def __len__(self) -> int:
        return len(self._parents)

    @property
    def num_parked(self) -> int:
        return sum(len(forks) for forks in self.parked.values())

    @property
    def is_quiet(self) -> bool:
        """Nobody is parked and nobody is about to wait in line."""
        return not self.parked and not self._woken

    def add(self, fork: Request, parent: Request) -> None:
        self._parents[fork.request_id] = parent

    def park(self, fork: Request) -> None:
        parent = self._parents[fork.request_id].request_id
        self.parked.setdefault(parent, {})[fork.request_id] = fork

    def parent_of(self, fork: Request) -> Request | None:
        """The parent of a fork that has not been admitted, while it lives."""
        parent = self._parents.get(fork.request_id)
        return None if parent is None or parent.is_ended else parent

    def is_parked(self, fork: Request) -> bool:
        parent = self._parents.get(fork.request_id)
        if parent is None:
            return False
        return self.parked.get(parent.request_id, {}).get(fork.request_id) is fork

    def wake(self, parent: Request) -> None:
        """The parent has its prompt, or is gone: nothing to wait for any more."""
        if parent.request_id in self.parked:
            self._woken[parent.request_id] = None

    def take_woken(self) -> list[Request]:
        if not self._woken:
            return []
        forks = [f for p in self._woken for f in self.parked.pop(p, {}).values()]
        self._woken.clear()
        return forks

    def discard(self, fork: Request) -> None:
        """It was admitted or has ended; safe for one that is no fork."""
        if (parent := self._parents.pop(fork.request_id, None)) is None:
            return
        siblings = self.parked.get(parent.request_id, {})
        siblings.pop(fork.request_id, None)
        if not siblings:
            self.parked.pop(parent.request_id, None)


class SchedulerState:
    """Every live request is running, waiting or parked (a fork that waits for its parent)."""

    def __init__(
        self,
        blocks: BlockManager,
        policy: Policy,
        max_num_seqs: int,
        starvation_limit: int,
        max_preemptions: int,
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_preemptions = max_preemptions
        self.requests: dict[str, Request] = {}
        self.running = RunningSet(policy)
        self.waiting = WaitingQueue(policy, starvation_limit)
        self.forks = Forks()
        self.preempted: list[str] = []  # whose rows were closed since the last plan that was sent
        self.finished: list[str] = []
        self.num_preemptions = 0
        self.num_exempt = (
            0  # from preemption: live requests that were preempted max_preemptions times
        )
        self.num_changes = 0  # of the set of running requests
        self.last_planned = 0
        self.last_completed = 0
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
        """From nowhere to running, with the blocks of `ended`, which ended with this very result.
        To the front of the line, where that has no blocks any more, there is no slot, or a request
        is exempt from preemption, for which blocks are kept."""
        self.enter(request)
        request.block_hashes = list(ended.block_hashes)
        request.has_output = True
        prefix = None
        if ended.block_ids and len(self.running) < self.max_num_seqs and not self.num_exempt:
            request.pool = ended.pool
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
        self.num_exempt += request.num_preemptions == self.max_preemptions
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
        self.num_exempt -= request.num_preemptions >= self.max_preemptions
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

    def complete(self, step_id: int) -> None:
        """Step `step_id` and all before it are over."""
        self.last_completed = step_id
        self.blocks.complete(step_id)

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
        check(self.forks.num_parked == self.num_exempt == 0, "no state is left when idle")
        if self.last_planned == self.last_completed:
            num_free = self.blocks.num_free_blocks
            check(num_free == self.blocks.num_blocks, "all is free when idle", free=num_free)
