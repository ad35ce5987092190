"""Which tokens of which requests run next? No tensors, no clock, no randomness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import gt

import msgspec

from ridgeline.errors import RequestFault, check
from ridgeline.request import UNKNOWN_TOKEN, Request, RequestOutput
from ridgeline.scheduler.admission import Capacity
from ridgeline.scheduler.beams import BeamSearches, Search
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.base import InFlight, Overloaded, Policy, Refuse
from ridgeline.scheduler.prefix_cache import Prefix
from ridgeline.scheduler.queue import STARVATION_LIMIT, Line
from ridgeline.scheduler.results import ResultTaker, verified_of_running
from ridgeline.scheduler.state import SchedulerState, can_share, has_prompt
from ridgeline.step import (
    BlockCopy,
    BlockTables,
    Decodes,
    NewRequest,
    ScheduledRequest,
    StepPlan,
    StepResult,
    StepShape,
)

MAX_PREEMPTIONS = 8
SHORT_LINE = 4  # prompts that may wait before steps grow for their sake


class DraftLengths:
    """So many draft tokens of each row are verified in every step. A subclass may choose another
    number for each step, and learn: `speculation.controller.DraftLengthController` does."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    def plan(self, decoding: Sequence[Request], now: float) -> int:
        """Draft tokens of each of these rows in the step that is being planned, if there are so
        many: all rows of a captured step verify the same number."""
        return self.num_draft_tokens

    def observe(self, verified: Mapping[str, tuple[int, int]]) -> None:
        """Of the rows of one step: draft tokens that were verified, and those accepted."""

    def forget(self, request_id: str) -> None:
        """The request has ended."""


Room = tuple[BlockTables, tuple[BlockCopy, ...]]


class _Step(msgspec.Struct):
    """A plan in the making."""

    step_id: int
    now: float
    whole_budget: int
    budget: int  # what is left of it
    scheduled: list[ScheduledRequest] = msgspec.field(default_factory=list)
    new: list[NewRequest] = msgspec.field(default_factory=list)
    copies: list[BlockCopy] = msgspec.field(default_factory=list)
    in_flight: list[InFlight] = msgspec.field(default_factory=list)
    opened: list[int] = msgspec.field(default_factory=list)  # places of rows that were given blocks
    only_decodes: bool = True
    num_draft_tokens: int = 0
    memory_is_short: bool = False
    _num_planned: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def num_planned(self) -> dict[str, int]:
        """Tokens, by row."""
        known = self._num_planned
        for entry in self.scheduled[len(known) :]:
            known[entry.request_id] = entry.num_tokens
        return known

    @property
    def decodes(self) -> Decodes | None:
        if not self.only_decodes:
            return None
        names = tuple([s.request_id for s in self.scheduled])
        return Decodes(names, tuple([s.start for s in self.scheduled]), tuple(self.opened))

    @property
    def shape(self) -> StepShape:
        return tuple((s.num_tokens, s.start) for s in self.scheduled)


class Scheduler:
    """Plans steps and takes in their results.

    `num_drafts` is how many drafts the executor's draft method has for each row at most (0: none),
    and `draft_lengths`, if given, says how many of them are worth verifying. Results say how many
    a row has if they are to be found (`finds_drafts`); else there are as many as are wanted.
    After `starvation_limit` younger requests went first, the oldest that waits is next; after
    `max_preemptions` a request runs again only when nobody need be preempted any more.
    Without `chunked_prefill` a prompt waits until one step can compute all of it. With
    `max_num_mixed_tokens` a step that also decodes computes at most so many tokens, since everybody
    who is being answered waits for its end; but a fourth of them are for prompts, and where more
    than SHORT_LINE prompts wait, there are as many times more as there are such lines: then most of
    those who wait wait for prompts.

    With several `stages` the executor is a pipeline: a token that the last stage samples reaches
    the first in time for the step that comes so many steps later, and not before. Decodes are
    divided evenly among as many steps as there are stages. Chunks of a prompt may follow each
    other: each stage runs its part of all steps in order, so what holds for a device's keys and
    values holds for those of a stage.

    Where `blocks` are several pools (data-parallel attention), each request is served out of one:
    only those of its pool make room for it.
    """

    def __init__(
        self,
        blocks: BlockManager,
        policy: Policy,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        *,
        num_drafts: int = 0,
        draft_lengths: DraftLengths | None = None,
        finds_drafts: bool = True,
        starvation_limit: int = STARVATION_LIMIT,
        max_preemptions: int = MAX_PREEMPTIONS,
        chunked_prefill: bool = True,
        max_num_mixed_tokens: int | None = None,
        stages: int = 1,
    ) -> None:
        check(max_num_batched_tokens > 0 and max_num_seqs > 0, "a step has room for a token")
        mixed = max_num_mixed_tokens
        check(mixed is None or mixed > 0, "a step has room for a token", got=mixed)
        check(mixed is None or chunked_prefill, "only prompts in chunks are bounded")
        check(stages == 1 or (stages > 1 and not num_drafts), "no drafts over stages", got=stages)
        self.blocks = blocks
        self.policy = policy
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.num_drafts = num_drafts
        self.draft_lengths = draft_lengths
        self.finds_drafts = finds_drafts
        self.chunked_prefill = chunked_prefill
        self.max_num_mixed_tokens = mixed
        self.stages = stages
        self.capacity = Capacity(
            blocks.pools[0], max_num_batched_tokens, max_num_seqs, chunked_prefill=chunked_prefill
        )
        self.state = SchedulerState(blocks, policy, max_num_seqs, starvation_limit, max_preemptions)
        self.beams = BeamSearches(self.state)
        self.requests = self.state.requests
        self.running, self.waiting = self.state.running, self.state.waiting
        self._has_lanes = type(policy).lane is not Policy.lane
        self._policy_limits_drafts = type(policy).num_drafts is not Policy.num_drafts
        self.results = ResultTaker(self.state, may_draft=num_drafts > 0)
        self._in_flight: dict[int, tuple[StepPlan, list[InFlight]]] = {}  # by step, oldest first
        self._now = 0.0  # of the last plan
        self._planned_at_end = 0  # the last step that was, when a request ended
        self._all_decode_at = -1  # change of the set of running requests
        self._no_room: tuple[Request, int, tuple[int, ...]] | None = None  # at what change, blocks

    # ------------------------------------------------------------------ for the engine

    @property
    def max_servable_tokens(self) -> int:
        """Longest request, prompt and answer, that the pool can serve."""
        return self.capacity.max_servable_tokens

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - len(self.running)

    @property
    def num_preemptions(self) -> int:
        return self.state.num_preemptions

    @property
    def num_late_results(self) -> int:
        return self.results.num_late

    @property
    def in_flight(self) -> dict[int, tuple[StepPlan, list[InFlight]]]:
        """Steps that were planned and whose results are still to come, the oldest first."""
        return self._in_flight

    def add(self, request: Request, now: float) -> None:
        """Take a request in. Raises RequestFault for what can never be served, for an id that is
        in use, and (Overloaded) when the policy turns it away."""
        if request.request_id in self.requests or request.request_id in self.beams:
            raise RequestFault("a request with this id is being served", param="request_id")
        check(request.order == 0, "a request is added once", id=request.request_id)
        if self.stages > 1 and request.sampling.prompt_logprobs is not None:
            raise RequestFault(
                "prompt_logprobs need all layers of the model on one rank; serve it with pp 1",
                param="prompt_logprobs",
            )
        self.capacity.check(request)
        search = Search(request) if request.sampling.beam_width > 1 else None
        entering = request if search is None else search.first
        if isinstance(answer := self.policy.admit(entering, now), Refuse):
            raise Overloaded(answer)
        if search is not None:
            self.beams.open(search)
        parent = self.requests.get(request.fork_of) if request.fork_of is not None else None
        self.state.enter(entering)
        request.order = entering.order
        entering.stop_token_ids = frozenset(entering.sampling.stop_token_ids)
        if search is None and parent is not None and can_share(request, parent):
            self.state.forks.add(request, parent)
            if not has_prompt(parent, parent.num_computed_tokens):
                self.state.forks.park(request)
                return
        self.waiting.add(entering, now)

    def schedule(self, now: float) -> StepPlan:
        """Plan one step and account for it at once, so that the next can be planned
        before this one has run. A plan that schedules nothing is not to be sent."""
        self._now = now
        budget = self._budget(now)
        step = _Step(self.state.last_planned + 1, now, budget, budget)
        for fork in self.state.forks.take_woken():
            self.waiting.add(fork, now)
        if self._has_lanes:
            self._make_way(now)
        step.num_draft_tokens = self._num_draft_tokens(now)
        prompts = self._decode_running(step)
        self._read_running(prompts, step)
        self._admit_waiting(step)
        return self._plan_of(step)

    def _plan_of(self, step: _Step) -> StepPlan:
        state = self.state
        if not step.scheduled:
            return StepPlan(state.last_planned, ())
        plan = StepPlan(
            step.step_id,
            tuple(step.scheduled),
            tuple(step.new),
            tuple(step.copies),
            tuple(state.preempted),
            tuple(state.finished),
        ).knowing(step.decodes)
        state.preempted, state.finished = [], []
        state.last_planned = step.step_id
        if self.stages > 1:
            for entry, row, _ in step.in_flight:
                if entry.samples:
                    row.sampling_step = step.step_id
        self._in_flight[step.step_id] = (plan, step.in_flight)
        self.policy.on_plan(step.in_flight)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take in what a step has sampled. Steps complete in the order they were planned."""
        in_order = plan.step_id == self.state.last_completed + 1
        check(
            in_order and plan.step_id in self._in_flight, "steps complete in order", id=plan.step_id
        )
        _, in_flight = self._in_flight.pop(plan.step_id)
        for row_id in result.faults:
            self.blocks.withdraw_early(row_id)
        self.state.complete(plan.step_id)
        num_changes = self.state.num_changes
        outputs = self.results.take_all(in_flight, result)
        if self.draft_lengths is not None:
            ended = []
            if self.state.num_changes != num_changes:
                ended = [o.request_id for o in outputs if o.finish_reason is not None]
            verified: Mapping[str, tuple[int, int]] = result.verified
            if ended or plan.step_id <= self._planned_at_end:
                verified = verified_of_running(verified, outputs)
            self.draft_lengths.observe(verified)
            for request_id in ended:
                self._forget(request_id)
        return self.beams.lead(outputs, self._now) if self.beams else outputs

    def _forget(self, request_id: str) -> None:
        """It has ended: steps that are under way may still have drafts for it."""
        if self.draft_lengths is not None:
            self.draft_lengths.forget(request_id)
            self._planned_at_end = self.state.last_planned

    def finish(self, request_id: str) -> bool:
        """End a request, in whatever state it is. False for an unknown id."""
        if self.beams.finish(request_id):
            return True
        if (request := self.requests.get(request_id)) is None:
            return False
        self._forget(request_id)
        self.state.end(request)
        return True

    def fail_in_flight(self, reason: str) -> list[RequestOutput]:
        """No step in flight will give a result: end every request that had tokens in one.

        To be called when the executor is done with all of them. Rows that those plans were to
        close are named again, since nobody knows how far they got.
        """
        state, outputs = self.state, []
        self.blocks.withdraw_early()
        for plan, in_flight in self._in_flight.values():
            state.finished += (*plan.preempted, *plan.finished)
            for _, row, _ in in_flight:
                if not row.is_ended:
                    outputs.append(state.end_with_error(row, reason))
        self._in_flight.clear()
        state.complete(state.last_planned)
        return self.beams.lead(outputs, self._now)

    def check_invariants(self) -> None:
        """Everything that must hold between two steps, for tests and for idle time."""
        self.state.check_invariants()
        check(len(self.running) <= self.max_num_seqs, "slots are limited")
        check(
            len(self._in_flight) == self.state.last_planned - self.state.last_completed, "in flight"
        )

    # ------------------------------------------------------------------ running requests

    def _budget(self, now: float) -> int:
        wanted = self.policy.token_budget(self.running.requests, now)
        most = self.max_num_batched_tokens
        return most if wanted is None else max(1, min(wanted, most))

    def _decode_running(self, step: _Step) -> list[Request]:
        """Decodes go first, as each costs few tokens of the budget: one of each row, and drafts
        behind it. Returns the rows that have more to compute.

        Most rows of most steps write to blocks of their own, or open the next ones. That is done
        here, without a call for each; `_continue` does the same for all others.
        """
        others: list[Request] = []
        scheduled, in_flight, blocks = step.scheduled, step.in_flight, self.blocks
        no_blocks, may_draft = blocks.no_blocks, self.num_drafts > 0
        drafts, budget = step.num_draft_tokens > 0, step.budget
        line = self.running.in_order(step.now)
        for _, _, row in line if self.stages == 1 else self._lane(line, step):
            if budget <= 0:
                break
            start, tokens = row.num_computed_tokens, row.token_ids
            if len(tokens) != start + 1:
                others.append(row)
                continue
            num_draft, new_block_ids = 0, no_blocks
            if drafts and row.has_drafts:
                num_draft = self._num_wanted(row, step)
            end = start + num_draft + 1
            is_full = end > row.num_tokens_with_slots
            if num_draft >= budget or (is_full and not blocks.can_extend_by_one(row, end)):
                step.budget = budget
                self._continue(row, step, num_draft)
                budget = step.budget
                continue
            if is_full:
                new_block_ids = blocks.extend_by_one(row)
                step.opened.append(len(scheduled))
            if num_draft:
                tokens += [UNKNOWN_TOKEN] * num_draft
                step.only_decodes = False
            tokens.append(UNKNOWN_TOKEN)
            entry = ScheduledRequest(
                row.request_id, start, num_draft + 1, new_block_ids, True, num_draft
            )
            row.num_computed_tokens = end
            if may_draft:
                row.has_drafts = True
            scheduled.append(entry)
            in_flight.append((entry, row, row.epoch))
            budget -= num_draft + 1
        step.budget = budget
        return others

    def _lane(self, line: Line, step: _Step) -> Line:
        """Of running rows those that this step of a pipeline may compute: all with prompts, and
        this step's part of the decodes whose newest tokens are known or have come back."""
        left, found = -(-len(line) // self.stages), []
        for entry in line:
            row = entry[-1]
            if row.num_pending_tokens == 1:
                is_back = step.step_id - row.sampling_step >= self.stages
                if not left or (row.token_ids[-1] == UNKNOWN_TOKEN and not is_back):
                    continue
                left -= 1
            found.append(entry)
        return found

    def _read_running(self, rows: Sequence[Request], step: _Step) -> None:
        """Chunks of the prompts of these rows, as long as there is a budget."""
        if step.scheduled:
            num_decoded = step.whole_budget - step.budget
            step.budget = self._budget_beside(num_decoded, len(rows), step.budget)
        for row in rows:
            if self._has_lanes:  # who waits may be before it
                self._admit_waiting(step, before=self.policy.lane(row))
            if step.budget <= 0:
                return
            self._continue(row, step)

    def _num_draft_tokens(self, now: float) -> int:
        """Of each row of this step, at most. A step that reads prompts checks none: its rows wait
        for the prompts anyway."""
        if not self.num_drafts:
            return 0
        if self.draft_lengths is None:
            return self.num_drafts
        decoding = list(self.running)
        if self._all_decode_at != self.state.num_changes:
            if any(len(r.token_ids) > r.num_computed_tokens + 1 for r in decoding):
                return 0
            self._all_decode_at = self.state.num_changes  # and they go on so until one comes
        return min(self.num_drafts, self.draft_lengths.plan(decoding, now))

    def _budget_beside(self, num_decoded: int, num_chunks: int, budget: int) -> int:
        """Of prompts, in a step that decodes so many tokens; see `max_num_mixed_tokens`."""
        if self.max_num_mixed_tokens is None:
            return budget
        line = num_chunks + len(self.waiting)
        most = self.max_num_mixed_tokens * max(line, SHORT_LINE) // SHORT_LINE
        return min(budget, max(most - num_decoded, most // 4, 1))

    def _continue(self, row: Request, step: _Step, num_wanted: int = 0) -> None:
        """As many of its tokens, and of the drafts that are wanted, as there is room for."""
        if not row.block_ids:
            return  # preempted by this very step
        start, pending = row.num_computed_tokens, row.num_pending_tokens
        room = min(step.budget, row.num_computable_tokens - start)
        num_draft = max(0, min(num_wanted, room - 1))
        num_tokens = min(pending + num_draft, room)
        if num_tokens > 0 and not self._compute(row, num_tokens, num_draft, step):
            step.memory_is_short = True

    def _num_wanted(self, row: Request, step: _Step) -> int:
        """Drafts of this row that are worth a check, as far as there are any."""
        most = step.num_draft_tokens
        if self.finds_drafts and row.token_ids[-1] != UNKNOWN_TOKEN:
            most = min(most, len(row.draft_token_ids))
        if self._policy_limits_drafts:
            wanted = self.policy.num_drafts(row, step.shape)
            most = most if wanted is None else max(0, min(most, wanted))
        return most

    def _compute(self, row: Request, num_tokens: int, num_draft: int, step: _Step) -> bool:
        """Find room and plan it. False: there is none this time."""
        tables = None if row.has_row else tuple(tuple(table) for table in row.block_ids)
        room = self.blocks.extend(row, num_tokens, step.step_id)
        if room is None:
            missing = self.blocks.missing(row, num_tokens)
            if not self._make_room(row, missing, step):
                return False
            room = self.blocks.extend(row, num_tokens, step.step_id)
        self._commit(row, num_tokens, num_draft, room, tables, step)
        return True

    def _make_room(self, request: Request, missing: int, step: _Step) -> bool:
        """Preempt those ranked behind `request`, the last first, until `missing` more blocks are
        free. False: wait; either enough is coming back, or nobody may be preempted."""
        blocks, pool = self.blocks.pools[request.pool], request.pool
        target = blocks.num_free_blocks + missing
        behind = reversed(self.running.in_order(step.now))
        while blocks.num_free_blocks < target:
            coming = blocks.num_deferred_blocks + self._num_leaving(pool)
            if blocks.num_free_blocks + coming >= target:
                return False
            here = (v for _, _, v in behind if v.pool == pool)
            victim = next((v for v in here if v is request or self._may_preempt(v, step)), request)
            if victim is request:
                return False
            self.state.preempt(victim, step.now)
        return True

    def _num_leaving(self, pool: int) -> int:
        """Blocks of it that leave somebody's window when the steps in flight are over."""
        if not self.blocks.has_windows:
            return 0
        return sum(self.blocks.num_leaving(row) for row in self.running if row.pool == pool)

    def _may_preempt(self, request: Request, step: _Step) -> bool:
        return request in self.running and request.request_id not in step.num_planned

    def _commit(
        self,
        row: Request,
        num_tokens: int,
        num_draft: int,
        room: Room | None,
        tables: BlockTables | None,
        step: _Step,
    ) -> None:
        if room is None:
            check(False, "room was made before", id=row.request_id)
            return
        new_block_ids, copies = room
        start = row.num_computed_tokens
        samples = start + num_tokens - num_draft == len(row.token_ids)
        entry = ScheduledRequest(
            row.request_id, start, num_tokens, new_block_ids, samples, num_draft
        )
        if tables is not None:
            step.new.append(self._new_row(row, tables))
        if num_tokens != 1 or not samples or tables is not None or copies:
            step.only_decodes = False
        elif new_block_ids is not self.blocks.no_blocks:
            step.opened.append(len(step.scheduled))
        row.num_computed_tokens = start + num_tokens
        if num_tokens > 1 and not num_draft:
            self.blocks.publish_early(row, step.step_id)
        state = self.state
        if samples:
            row.token_ids += [UNKNOWN_TOKEN] * (num_draft + 1)
            row.has_drafts = self.num_drafts > 0
        step.scheduled.append(entry)
        if copies:
            step.copies += copies
        step.in_flight.append((entry, row, row.epoch))
        step.budget -= num_tokens
        if state.forks.parked and has_prompt(row, row.num_computed_tokens):
            state.forks.wake(row)

    def _new_row(self, row: Request, tables: BlockTables) -> NewRequest:
        row.has_row = True
        ids, num_prompt = row.prompt_token_ids, len(row.prompt_token_ids)
        if len(row.token_ids) > num_prompt:
            ids = tuple(row.token_ids)
        return NewRequest(row.request_id, ids, num_prompt, row.sampling, tables, row.pool)

    # ------------------------------------------------------------------ waiting requests

    def _make_way(self, now: float) -> None:
        """Who waits first finds no room: where the policy says so, the newest of another lane makes
        way, one for each step. Nobody does before it has gained a token by the last time, nor more
        than half as often as may be, so that a lack of memory finds somebody, too."""
        request, running, blocks = self.waiting.head(now), self.running, self.blocks
        if request is None or self._may_find_room(request):
            return
        if self._has_slot():
            if blocks.num_deferred_blocks:
                return  # some are coming back
            needs = -(-len(request.token_ids) // blocks.block_size) * len(blocks.windows)
            held = Counter[bytes]()
            for other in running:
                held[self.policy.lane(other)] += sum(blocks.num_held(other))
            total = blocks.num_blocks
        else:
            needs, held, total = 1, running.slots, self.max_num_seqs
        parts = {lane: num / total for lane, num in held.items()}
        lane = self.policy.yields(self.policy.lane(request), needs / total, parts)
        there = running.of_lane(lane) if lane is not None else ()
        for other in reversed(there[1:]):
            has_gained = not other.num_preemptions or other.num_pending_tokens <= 1
            if has_gained and 2 * other.num_preemptions < self.state.max_preemptions:
                self.state.preempt(other, now)
                return

    def _admit_waiting(self, step: _Step, *, before: bytes | None = None) -> None:
        """What is left of the budget goes to waiting requests, in order; nobody overtakes one that
        finds no room. `before`: only to those of lanes that are served before this one."""
        while step.budget > 0 and not step.memory_is_short:
            request = self.waiting.head(step.now)
            if request is None or not self._may_find_room(request):
                return
            if before is not None:
                rank = self.policy.lane_rank
                if rank(self.policy.lane(request)) >= rank(before):
                    return
            if request.num_known_tokens < len(request.token_ids):
                return  # preempted with a step in flight: its token is still to come
            prefix = self._prefix(request, step)
            if prefix is None:
                continue  # a fork whose parent has lost the prompt
            if not self._fits(request, prefix):
                self._no_room = (request, self.state.num_changes, self.blocks.free_blocks)
                return
            num_tokens = len(request.token_ids) - prefix.num_tokens
            if not self.chunked_prefill and num_tokens > step.budget:
                return  # to be computed whole, in a step with less to do
            self._admit(request, prefix, step)

    def may_admit(self) -> bool:
        """Could somebody be admitted by the next steps, as long as nobody leaves? For policies
        whose ranks are fixed."""
        request, blocks = self.waiting.head(0.0), self.blocks
        if request is None or self._no_room is None:
            return request is not None and self._has_slot()
        who, change, free = self._no_room
        is_same = who is request and change == self.state.num_changes
        is_no_more = blocks.num_free_blocks + blocks.num_deferred_blocks <= sum(free)
        stays_full = is_same and is_no_more and not blocks.has_windows
        return self._has_slot() and not stays_full

    def _has_slot(self) -> bool:
        return len(self.running) < self.max_num_seqs

    def _may_find_room(self, request: Request) -> bool:
        """A cheap look, before the prefix cache is asked again about one that found no room."""
        if len(self.running) >= self.max_num_seqs:
            return False
        if self._no_room is None:
            return True
        who, change, free = self._no_room
        is_same = who is request and change == self.state.num_changes
        return not is_same or any(map(gt, self.blocks.free_blocks, free))

    def _prefix(self, request: Request, step: _Step) -> Prefix | None:
        """What it need not compute. None: it is parked until its parent has the prompt."""
        if (parent := self.state.forks.parent_of(request)) is not None:
            planned = step.num_planned.get(parent.request_id, 0)
            if not has_prompt(parent, parent.num_computed_tokens - planned):
                self._park_again(request, parent)
                return None
            request.pool = parent.pool
            shared = self.blocks.share(parent, len(request.prompt_token_ids) - 1)
            if shared is not None:
                return shared
        limit = len(request.token_ids)
        wants_prompt = request.sampling.prompt_logprobs is not None
        if wants_prompt and request.num_prompt_logprobs < len(request.prompt_token_ids) - 1:
            limit = 0  # each prompt position is to be computed
        return self.blocks.match(request, limit)

    def _park_again(self, fork: Request, parent: Request) -> None:
        self.waiting.discard(fork)
        self.state.forks.park(fork)
        if has_prompt(parent, parent.num_computed_tokens):
            self.state.forks.wake(parent)  # this very step computes it

    def _fits(self, request: Request, prefix: Prefix) -> bool:
        """Is there room for all its tokens so far? And for one that was preempted too often, or
        beside such a one: for everything that anybody running may still ask for?"""
        chunk, blocks = self.max_num_batched_tokens, self.blocks.pools[request.pool]
        if not blocks.fits(prefix, len(request.token_ids) - prefix.num_tokens, chunk):
            return False
        if not self.state.num_exempt:
            return True
        beside = (other for other in self.running if other.pool == request.pool)
        to_come = sum(self._num_blocks_to_come(other) for other in beside)
        return self.capacity.blocks_needed(request) + to_come <= blocks.num_free_blocks

    def _num_blocks_to_come(self, request: Request) -> int:
        to_come = self.capacity.blocks_to_come(request, self.blocks.num_held(request))
        return to_come + self.blocks.num_to_copy(request)

    def _admit(self, request: Request, prefix: Prefix, step: _Step) -> None:
        num_tokens = len(request.token_ids) - prefix.num_tokens
        self.state.start(request)
        if not request.has_output and not request.num_preemptions:
            request.num_cached_tokens = prefix.num_tokens
        self._open(request, prefix, min(num_tokens, step.budget), step)

    def _open(self, row: Request, prefix: Prefix, num_tokens: int, step: _Step) -> None:
        self.blocks.admit(row, prefix)
        room = self.blocks.extend(row, num_tokens, step.step_id)
        self._commit(row, num_tokens, 0, room, prefix.tables, step)
