"""How does a simulated engine pass over many steps at once in which nothing is decided?"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import islice

import msgspec

from ridgeline.clock import Clock
from ridgeline.engine import Engine
from ridgeline.request import Request, RequestOutput
from ridgeline.scheduler.macro import QuietRun, QuietSteps
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.simulator.executor import SimulatedExecutor, SimulatedFuture, Span
from ridgeline.step import StepPlan, StepRecord, StepResult

LEAST_STEPS = 2  # a single step is cheaper when it is made as usual


class Leap(msgspec.Struct, frozen=True):
    """`run.num_steps` steps were planned and as many collected.

    The device worked on the collected ones from `start_s` to `end_s` without a pause; the last of
    them was collected at `now`. The first of them ended at `first_end_s` and computed
    `num_first_tokens`; it may have been a prompt's. `begun` are requests that got their first
    token, at `begun_s`; `flying` the spans of steps in flight.
    """

    run: QuietRun
    start_s: float
    end_s: float
    now: float
    first_end_s: float
    num_first_tokens: int
    begun: tuple[str, ...]
    begun_s: float
    flying: tuple[Span, ...]


class LeapingEngine(Engine):
    """The engine, with one more way to go on: `leap` does what as many turns of launch and collect
    would do, to the last block, hash and reading of the clock."""

    executor: SimulatedExecutor

    def __init__(
        self,
        scheduler: Scheduler,
        executor: SimulatedExecutor,
        clock: Clock,
        max_in_flight: int = 1,
        plans_ahead_s: float | None = None,
    ) -> None:
        super().__init__(scheduler, executor, clock, max_in_flight)
        self.quiet = QuietSteps(scheduler)
        self.plans_ahead_s = None if executor.computes_in_submit else plans_ahead_s

    def collect(self) -> list[RequestOutput]:
        """Only the outputs with the first and the last tokens of answers, if nobody listens."""
        self.scheduler.results.tells_all = bool(self.listeners)
        return super().collect()

    @property
    def oldest(self) -> StepPlan:
        """The plan of the step that is collected next; there must be one in flight."""
        return self._in_flight[0][0].plan

    def plans_at(self) -> float | None:
        """When the next step is planned; None: now."""
        if not 0 < len(self._in_flight) == self.max_in_flight - 1 or not self._has_room:
            return None
        return self._late(self.executor.spans[0].end_s, self.clock.now())

    def leap(self, horizon: float, *, may_overshoot: bool = False) -> Leap | None:
        """Go on as long as steps are quiet and collected before `horizon`, or launched before it
        when nobody looks at the engine while its loop waits (`may_overshoot`). None: not by leaps.

        To be called when one more step may be launched, with the clock at that moment. The clock
        stays there; the engine is where it will be at the leap's end.
        """
        num_in_flight = len(self._in_flight)
        if num_in_flight != self.max_in_flight - 1 or self.listeners.hear_steps:
            return None
        if self.executor.pools > 1:  # which of them is slowest may change with each step
            return None
        rows = self.quiet.rows()
        most = self.quiet.most(rows) if rows else 0
        for row in rows:
            if row.stop_token_ids:
                most = min(most, self._num_until_stop(row, most))
        if most < LEAST_STEPS:
            return None
        ends = self._ends(rows, most, horizon)
        num_planned = len(ends) - num_in_flight
        lag = self._lag
        num_early = bisect_left(ends, horizon, lag, lag + num_planned) - lag
        num_steps = min(num_planned, num_early + may_overshoot)
        if num_steps < LEAST_STEPS:
            return None
        return self._go(rows, num_steps, ends[: num_in_flight + num_steps])

    # ------------------------------------------------------------------ details

    @property
    def _has_room(self) -> bool:
        return self.scheduler.num_running < self.scheduler.max_num_seqs

    def _late(self, end: float, now: float) -> float | None:
        """When a step is planned while one runs that ends then; None: now."""
        if self.plans_ahead_s is None or end - self.plans_ahead_s <= now:
            return None
        return end - self.plans_ahead_s

    @property
    def _lag(self) -> int:
        """A step is collected when it has ended, or (computed in submit) when as many steps as are
        in flight have ended after it."""
        return len(self._in_flight) if self.executor.computes_in_submit else 0

    def _num_known(self, row: Request) -> int:
        """Tokens of its answer that the host has."""
        return len(row.token_ids) - len(self._in_flight) - len(row.prompt_token_ids)

    def _tokens(self, row: Request, count: int) -> tuple[int, ...]:
        return self.executor.answers[row.request_id].tokens(self._num_known(row), count)

    def _num_until_stop(self, row: Request, most: int) -> int:
        """How many of its next tokens, at most `most`, come before one that ends it."""
        tokens, stops = self._tokens(row, most), row.stop_token_ids
        return next((i for i, token_id in enumerate(tokens) if token_id in stops), most)

    def _ends(self, rows: Sequence[Request], most: int, horizon: float) -> list[float]:
        """When steps end: those in flight, then those to come, until one is collected too late.

        The device never pauses between them: each is submitted before the last one has ended, or
        at that moment.
        """
        end, lag = self.executor.busy_until, self._lag
        ends = [span.end_s for span in self.executor.spans]
        times = self.executor.decode_times([row.num_computed_tokens for row in rows])
        for i, seconds in enumerate(islice(times, most)):
            end += seconds
            ends.append(end)
            if ends[lag + i] >= horizon:
                break
        return ends

    def _go(self, rows: Sequence[Request], num_steps: int, ends: Sequence[float]) -> Leap:
        num_in_flight, lag = len(self._in_flight), self._lag
        launches = collects = [self.clock.now(), *ends[lag:]]
        first_left = max(0, num_steps - num_in_flight)  # of the steps that are in flight afterwards
        if num_in_flight and self._has_room and self.plans_ahead_s is not None:
            told = 0 if self.listeners else first_left
            pairs = zip(ends[told:num_steps], collects[told:num_steps], strict=True)
            launches = collects[:told] + [self._late(end, now) or now for end, now in pairs]
        spans = list(self.executor.spans)
        start_s = spans[0].start_s if spans else launches[0]
        flying = [step.plan for step, _ in self._in_flight]
        tokens = [self._tokens(row, num_steps) for row in rows]
        oldest = [entry.num_tokens for plan in flying[:1] for entry in plan.scheduled]
        run = self.quiet.advance(rows, tokens, num_steps)
        for _ in range(min(num_steps, num_in_flight)):
            self._in_flight.popleft()
        for index in range(first_left, num_steps):
            end = num_in_flight + index
            plan, _ = self.scheduler.in_flight[run.first_step_id + index]
            span = Span(ends[end - 1], ends[end])
            future = SimulatedFuture(plan, span, self.executor)
            self._in_flight.append((StepRecord(plan, launches[index]), future))
            spans.append(span)
        self.executor.leap(spans[len(spans) - num_in_flight :], ends[-1])
        begun = tuple(run.row_ids[n] for n in run.begun)
        if self.listeners:
            cached = {rows[n].request_id: rows[n].num_cached_tokens for n in run.begun}
            self._tell_listeners([*flying, *run.plans()], run, tokens, (launches, collects), cached)
        return Leap(
            run,
            start_s,
            ends[num_steps - 1],
            collects[num_steps],
            ends[0],
            sum(oldest) or len(rows),
            begun,
            collects[1],
            tuple(self.executor.spans),
        )

    def _tell_listeners(
        self,
        plans: Sequence[StepPlan],
        run: QuietRun,
        tokens: Sequence[tuple[int, ...]],
        times: tuple[Sequence[float], Sequence[float]],
        cached: Mapping[str, int],
    ) -> None:
        """As if the steps had been made one by one. `times`: of launches, and of when the loop went
        on: the first time now, then as each step is collected."""
        num_behind = len(plans) - run.num_steps
        for index in range(run.num_steps):
            launched, collected = plans[num_behind + index], plans[index]
            sampled = {row: tokens[n][index : index + 1] for n, row in enumerate(run.row_ids)}
            result = StepResult(sampled)
            outputs = [
                RequestOutput(row, token_ids, num_cached_tokens=0 if index else cached.get(row, 0))
                for row, token_ids in sampled.items()
            ]
            begin, end = times[0][index], times[1][index + 1]
            submitted = end if self.executor.computes_in_submit else begin
            tell = self.listeners.tell
            tell("on_plan", launched, begin)
            tell("on_submitted", launched, submitted)
            tell("on_collect", collected, result, outputs, None, end)
