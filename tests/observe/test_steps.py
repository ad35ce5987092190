"""Do the step counters follow the plans?"""

from __future__ import annotations

from ridgeline.observe.run import Run
from ridgeline.request import SamplingParams
from ridgeline.step import NewRequest, ScheduledRequest, StepPlan, StepRecord, StepResult


def record(
    step: int,
    at: float,
    ended: float,
    scheduled: tuple[tuple[str, int, int], ...],
    new: tuple[tuple[str, int, int], ...] = (),
    error: str | None = None,
) -> StepRecord:
    """`scheduled` are (id, start, tokens), `new` are (id, known tokens, prompt tokens)."""
    plan = StepPlan(
        step,
        tuple(ScheduledRequest(i, start, n, ((),), samples=True) for i, start, n in scheduled),
        tuple(NewRequest(i, (1,) * n, p, SamplingParams(), ((),)) for i, n, p in new),
    )
    return StepRecord(plan, at, ended, (), error)


class Counters(Run):
    """Of a run whose steps nobody prices."""

    def __init__(self) -> None:
        super().__init__()
        assert self.take_started() == ()  # nothing is kept before

    def on_step(self, record: StepRecord) -> None:
        self.on_plan(record.plan, record.launched_at)
        result = None if record.error else StepResult({})
        self.on_collect(record.plan, result, (), record.error, record.collected_at)


def test_tokens_hits_and_starts() -> None:
    steps = Counters()
    steps.on_step(record(1, 0.0, 1.0, (("a", 16, 4), ("b", 0, 8)), (("a", 20, 20), ("b", 8, 8))))
    assert (steps.num_steps, steps.num_scheduled_tokens) == (1, 12)
    assert (steps.num_prompt_tokens, steps.num_hit_tokens) == (28, 16)
    assert steps.take_started() == (("a", 0.0), ("b", 0.0))  # planned then, not collected
    assert steps.take_started() == ()
    steps.on_step(record(2, 1.0, 2.0, (("a", 20, 1),)))
    assert (steps.num_steps, steps.num_scheduled_tokens) == (2, 13)
    assert steps.take_started() == ()


def test_a_request_that_comes_back_is_no_prompt() -> None:
    steps = Counters()
    steps.on_step(record(1, 0.0, 1.0, (("a", 16, 9),), (("a", 25, 20),)))
    assert (steps.num_prompt_tokens, steps.num_hit_tokens) == (0, 0)
    assert steps.take_started() == (("a", 0.0),)


def test_overlapping_steps_are_not_counted_twice() -> None:
    steps = Counters()
    steps.on_step(record(1, 0.0, 2.0, (("a", 0, 1),)))
    steps.on_step(record(2, 1.0, 3.0, (("a", 1, 1),)))
    steps.on_step(record(3, 10.0, 11.0, (("a", 2, 1),)))
    assert steps.busy_s == 4.0


def test_failures() -> None:
    steps = Counters()
    steps.on_step(record(1, 0.0, 1.0, (("a", 0, 1),), error="no"))
    steps.on_step(record(2, 0.0, 1.0, (("a", 0, 1),), error="no"))
    assert (steps.num_failed_steps, steps.last_failed) == (2, True)
    steps.on_step(record(3, 0.0, 1.0, (("a", 0, 1),)))
    assert (steps.num_failed_steps, steps.last_failed) == (2, False)
