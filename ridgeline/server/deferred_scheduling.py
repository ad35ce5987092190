"""When is the next step planned? Late, so that who comes while the one before runs is in it.

A step that is planned as soon as the one before it runs cannot take in a request that comes while
that runs: it waits for two steps, not for one. So the loop waits, and takes commands, until just
before the running step ends. When that is, its price says, times the least that such steps took of
theirs lately; what the host needs before it was measured too. After a step that came too late, what
steps take is learned anew, and the host hurries more for some time.
"""

from __future__ import annotations

from collections import deque

from ridgeline.clock import Clock
from ridgeline.engine import Engine
from ridgeline.observe.pricing import PricedStep, Pricing
from ridgeline.step import Listener, StepPlan

LATELY = 16  # steps of a kind, or plans
LEAST_S = 0.3e-3  # a shorter wait is not worth waking up for
GUARD_S = 0.3e-3  # of sleeping, waking and what differs from step to step
EXTRA_S = 0.5e-3  # more of that, after a step that came too late
CALMING = 0.98  # what is left of that after each step that did not


class DeferredScheduling(Listener):
    """One of the engine's listeners, which follows its prices too."""

    def __init__(self, engine: Engine, pricing: Pricing, clock: Clock) -> None:
        self.num_waits = self.num_late = 0
        self._engine, self._pricing, self._clock = engine, pricing, clock
        self._took: dict[bool, deque[float]] = {}  # of its price, by: it reads prompts
        self._needs_s: deque[float] = deque(maxlen=LATELY)  # from planning a step to having sent it
        self._extra_s = 0.0
        self._planned_at = 0.0
        engine.listeners.append(self)
        pricing.listeners.append(self.on_priced)

    def pause(self) -> float:
        """Seconds that the next plan can wait, now. 0: it cannot, or nobody gains by it."""
        engine, scheduler = self._engine, self._engine.scheduler
        is_room = scheduler.num_running < scheduler.max_num_seqs
        if not is_room or not 0 < engine.num_in_flight == engine.max_in_flight - 1:
            return 0.0
        running = self._pricing.running
        if running is None or len(self._needs_s) < LATELY:
            return 0.0
        took = self._took.get(running.reads_prompts, ())
        if len(took) < LATELY:
            return 0.0
        ends = running.began + min(took) * running.expected_s
        left = ends - max(self._needs_s) - GUARD_S - self._extra_s - self._clock.now()
        if left < LEAST_S or engine.oldest_is_over is not False:
            return 0.0
        self.num_waits += 1
        return left

    # ------------------------------------------------------------------ what is learned

    def on_plan(self, plan: StepPlan, now: float) -> None:
        self._planned_at = now

    def on_submitted(self, plan: StepPlan, now: float) -> None:
        if self._engine.num_in_flight < self._engine.max_in_flight:
            return
        self._needs_s.append(now - self._planned_at)
        if not self._engine.oldest_is_over:
            self._extra_s *= CALMING
            return
        self.num_late += 1
        self._took.clear()
        self._extra_s += EXTRA_S

    def on_priced(self, step: PricedStep) -> None:
        if step.price.expected_s > 0:
            took = self._took.setdefault(bool(step.prompts), deque(maxlen=LATELY))
            took.append(step.seconds / step.price.expected_s)
