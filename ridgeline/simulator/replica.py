"""What does one engine do with what it is sent? Its loop, turn by turn, and what is seen of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ridgeline.clock import VirtualClock
from ridgeline.errors import RequestFault
from ridgeline.request import FinishReason, Request, RequestOutput
from ridgeline.router.policies import ReplicaView
from ridgeline.router.speeds import PricedSpeed, slot_wait_s
from ridgeline.simulator.executor import Answer, SimulatedFuture, Span
from ridgeline.simulator.macro import Leap, LeapingEngine
from ridgeline.simulator.report import RequestTimeline, StepSample


@dataclass(slots=True)
class Job:
    """A request on its way: what is put to the engine, and what it will be answered. `num_to_read`:
    tokens of its prompt that the cache did not hold when it was placed."""

    request: Request
    answer: Answer
    timeline: RequestTimeline
    num_to_read: int = 0

    @property
    def num_pending(self) -> int:
        """Tokens of its prompt that are still to be computed."""
        request = self.request
        left = len(request.prompt_token_ids) - request.num_computed_tokens
        return max(0, left if request.num_computed_tokens else min(left, self.num_to_read))


class Replica:
    """One engine with what has been sent to it and has not come in yet."""

    def __init__(
        self,
        number: int,
        engine: LeapingEngine,
        jobs: dict[str, Job],
        speeds: PricedSpeed,
        *,
        is_static: bool,
    ) -> None:
        self.number = number
        self.engine = engine
        self.clock: VirtualClock = engine.executor.clock
        self.is_static = is_static
        self.inbox: deque[Job] = deque()
        self.samples: list[StepSample] = []
        self.num_leaps = 0
        self.is_asleep = True
        self.is_ready = True  # it is sent requests
        self.is_lost = False  # and whatever it was doing
        self._jobs = jobs
        self._speeds = speeds
        self._num_answers = self._num_answered = 0  # finished ones, and their tokens
        self._spans: deque[Span] = deque()
        self._to_begin: set[str] = set()  # who has had no token yet

    # ------------------------------------------------------------------ one turn of the loop

    def take_in(self) -> None:
        """What has arrived goes to the engine; a static batch waits for the one before it."""
        if not self.inbox:
            return
        engine = self.engine
        if not self.is_static:
            while self.inbox:
                self._add(self.inbox.popleft())
            return
        if not engine.is_idle:
            return
        engine.executor.num_ghosts = 0
        while self.inbox and len(engine.scheduler.requests) < engine.scheduler.max_num_seqs:
            self._add(self.inbox.popleft())

    def _add(self, job: Job) -> None:
        request = job.request
        try:
            self.engine.add(request)
        except RequestFault as fault:
            job.timeline.refused = str(fault)
            return
        self.engine.executor.answers[request.request_id] = job.answer
        self._jobs[request.request_id] = job
        self._to_begin.add(request.request_id)

    def launch(self) -> bool:
        """False: there is nothing to launch, or no place for it."""
        now, future = self.clock.now(), self.engine.launch()
        if not isinstance(future, SimulatedFuture):
            return False
        self._spans.append(future.span)
        for new in future.plan.new:
            timeline = self._jobs[new.request_id].timeline
            if timeline.started_s is None:
                timeline.started_s = now
        return True

    def collect(self) -> None:
        now = self.clock.now()
        plan, span = self.engine.oldest, self._spans.popleft()
        begins = self._to_begin
        for output in self.engine.collect():
            if output.finish_reason is not None or output.request_id in begins:
                self._note(output, now)
        num_tokens = len(plan.scheduled)
        if plan.decodes is None:
            num_tokens = sum([entry.num_tokens for entry in plan.scheduled])
        self._record(span.start_s, span.end_s, 1, len(plan.scheduled), num_tokens)

    def leap(self, horizon: float, *, may_overshoot: bool) -> Leap | None:
        leap = self.engine.leap(horizon, may_overshoot=may_overshoot)
        if leap is not None:
            self._spans = deque(leap.flying)
            for request_id in leap.begun:
                self._begin(self._jobs[request_id], leap.begun_s)
        return leap

    def land(self, leap: Leap) -> None:
        """The clock has come to the end of a leap."""
        self.num_leaps += 1
        start_s, num_steps, num_rows = leap.start_s, leap.run.num_steps, len(leap.run.row_ids)
        if leap.num_first_tokens > num_rows:  # prompts: unlike the rest
            self._record(start_s, leap.first_end_s, 1, num_rows, leap.num_first_tokens)
            start_s, num_steps = leap.first_end_s, num_steps - 1
        self._record(start_s, leap.end_s, num_steps, num_rows, num_rows * num_steps)

    def lose(self, now: float) -> None:
        """What it does and holds is gone: no step ends any more, and no block is in use."""
        self.is_lost = True
        self.samples.append(StepSample(now, now, 0, 0, 0, 0, 0, 0, self.number))

    # ------------------------------------------------------------------ what is seen

    def view(self, request: Request | None = None) -> ReplicaView:
        """As a router sees it, for a request that is to be placed."""
        scheduler = self.engine.scheduler
        jobs = [*self.inbox, *(self._jobs[name] for name in scheduler.requests)]
        cached = 0
        if request is not None and scheduler.blocks.prefix_caching:
            prefix = scheduler.blocks.match(request, len(request.prompt_token_ids))
            cached = prefix.num_tokens
        blocks, num_running = scheduler.blocks, scheduler.num_running
        num_waiting = scheduler.num_waiting + len(self.inbox)
        num_used = (blocks.num_blocks - blocks.num_free_blocks) * blocks.block_size
        speed = self._speeds.beside(num_running, num_used)
        mean = self._num_answered / self._num_answers if self._num_answers else 1.0
        num_slots = scheduler.max_num_seqs
        return ReplicaView(
            num_running,
            num_waiting,
            sum(job.num_pending for job in jobs),
            cached,
            self.is_ready,
            speed.tokens_per_s,
            speed.step_s,
            slot_wait_s(num_running + num_waiting, num_slots, mean, speed.step_s),
        )

    def _begin(self, job: Job, now: float) -> None:
        self._to_begin.discard(job.request.request_id)
        job.timeline.first_token_s = now
        job.timeline.num_cached = job.request.num_cached_tokens

    def _note(self, output: RequestOutput, now: float) -> None:
        job = self._jobs[output.request_id]
        timeline = job.timeline
        if timeline.first_token_s is None and output.new_token_ids:
            self._begin(job, now)
        if output.finish_reason is None:
            return
        timeline.finished_s = now
        self._num_answers += 1
        self._num_answered += timeline.num_output
        timeline.num_preemptions = job.request.num_preemptions
        if output.finish_reason is FinishReason.ERROR:
            timeline.refused = output.error or "it failed"
        del self._jobs[output.request_id]
        self._to_begin.discard(output.request_id)
        executor = self.engine.executor
        executor.num_ghosts += self.is_static
        executor.forget(output.request_id)

    def _record(
        self, start_s: float, end_s: float, num_steps: int, num_rows: int, num_tokens: int
    ) -> None:
        scheduler = self.engine.scheduler
        blocks = scheduler.blocks
        self.samples.append(
            StepSample(
                start_s,
                end_s,
                num_steps,
                num_rows,
                num_tokens,
                scheduler.num_running,
                scheduler.num_waiting + len(self.inbox),
                blocks.num_blocks - blocks.num_free_blocks,
                self.number,
            )
        )
