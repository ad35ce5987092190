"""What is the life of a request? add, launch, collect, step, abort."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from ridgeline.clock import Clock
from ridgeline.errors import EngineFault, RequestFault
from ridgeline.log import say
from ridgeline.request import FinishReason, Request, RequestOutput
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.step import Executor, KnowsEnd, Listeners, StepFuture, StepRecord, StepResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Failed:
    """The future of a step that the executor would not even take."""

    fault: EngineFault

    def result(self) -> StepResult:
        raise self.fault


class Engine:
    """`max_in_flight` 1 plans a step after the last one's result; 2 and more plan it while they
    run. The same two calls, launch and collect, in another order."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Clock, max_in_flight: int = 1
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.max_in_flight = max_in_flight
        self.listeners = Listeners()
        self._in_flight: deque[tuple[StepRecord, StepFuture]] = deque()

    @property
    def is_idle(self) -> bool:
        return not self.scheduler.requests and not self._in_flight

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def oldest_is_over(self) -> bool | None:
        """Nobody would have to wait for the oldest step in flight. None: there is none, or its
        executor does not tell."""
        if not self._in_flight or not isinstance(self._in_flight[0][1], KnowsEnd):
            return None
        return self._in_flight[0][1].is_over()

    def add(self, request: Request) -> None:
        """Let a request wait for its turn. Raises RequestFault when it cannot be served."""
        now = self.clock.now()
        try:
            self.scheduler.add(request, now)
        except RequestFault as fault:
            self.listeners.tell("on_add", request, now, fault)
            raise
        self.listeners.tell("on_add", request, now, None)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request, in whatever state it is. None for one that is unknown or over."""
        if not self.scheduler.finish(request_id):
            return None
        self.listeners.tell("on_abort", request_id, self.clock.now())
        return RequestOutput(request_id, (), FinishReason.ABORT)

    def launch(self) -> StepFuture | None:
        """Plan a step and send it off. None when there is nothing to send, or no place for it."""
        if len(self._in_flight) >= self.max_in_flight:
            return None
        now = self.clock.now()
        plan = self.scheduler.schedule(now)
        self.listeners.tell("on_plan", plan, now)
        if not plan.scheduled:
            return None
        future: StepFuture
        try:
            future = self.executor.submit(plan)
        except EngineFault as fault:
            future = _Failed(fault)
        self._in_flight.append((StepRecord(plan, now), future))
        self.scheduler.blocks.hash_blocks()  # while the device is at work
        if self.listeners:
            self.listeners.tell("on_submitted", plan, self.clock.now())
        return future

    def collect(self) -> list[RequestOutput]:
        """Wait for the oldest step and take in its tokens. [] when none is in flight."""
        if not self._in_flight:
            return []
        step, future = self._in_flight.popleft()
        try:
            result = future.result()
        except EngineFault as fault:
            return self._fail(step, str(fault) or "a step failed")
        step.outputs = outputs = self.scheduler.update(step.plan, result)
        self._tell(step, result)
        return outputs

    def step(self) -> list[RequestOutput]:
        """Keep `max_in_flight` steps going; collect one when there is no place for another."""
        launched = self.launch()
        if self._in_flight and (launched is None or len(self._in_flight) >= self.max_in_flight):
            return self.collect()
        return []

    def _fail(self, step: StepRecord, reason: str) -> list[RequestOutput]:
        """A step failed: so does every request with tokens in flight. The engine goes on."""
        say(logger, logging.ERROR, "step failed", step=step.plan.step_id, reason=reason)
        behind = list(self._in_flight)
        self._in_flight.clear()
        for later, future in behind:
            try:
                future.result()  # what it touches is ours again only when it is over
            except EngineFault as fault:
                say(logger, logging.ERROR, "step failed", step=later.plan.step_id, reason=fault)
        step.outputs = outputs = self.scheduler.fail_in_flight(reason)
        for failed in (step, *(later for later, _ in behind)):
            failed.error = reason
            self._tell(failed, None)
        return outputs

    def _tell(self, step: StepRecord, result: StepResult | None) -> None:
        if not (listeners := self.listeners):
            return
        step.collected_at = now = self.clock.now()
        listeners.tell("on_collect", step.plan, result, step.outputs, step.error, now)
        if listeners.hear_steps:
            listeners.tell("on_step", step)
