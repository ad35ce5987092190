"""Does the engine's own history correct the prices?"""

from __future__ import annotations

import random

import pytest

from ridgeline.scheduler.policies.step_times import LEAST_STEPS, LearnedPricer
from ridgeline.step import PricedStep, ScheduledRequest, StepPlan, StepPrice, StepShape
from tests.scheduler.policies.checks import checks
from tests.scheduler.policies.virtual_time import Linear

PRICER = Linear()


def planned(plan: StepPlan, seconds: float = 0.1) -> PricedStep:
    """A step with this plan."""
    price = StepPrice(0.0, 0.0, 0.0, 0.0)
    return PricedStep(plan, 0, 0.0, 0.0, seconds, 0.0, price, (), 0.0)


def ran(
    shape: StepShape, seconds: float, host_s: float = 0.0, *, is_overlapped: bool = False
) -> PricedStep:
    """A step that took `seconds`."""
    entries = (ScheduledRequest("r", before, new, (), True) for new, before in shape)
    plan, price = StepPlan(1, tuple(entries)), StepPrice(0.0, 0.0, 0.0, 0.0)
    return PricedStep(
        plan, 0, 0.0, 0.0, seconds, host_s, price, (), 0.0, is_overlapped=is_overlapped
    )


def shapes(seed: int, count: int) -> list[StepShape]:
    rng = random.Random(seed)
    return [
        (*(((1, rng.randint(1, 2000)),) * rng.randint(1, 99)), (rng.randint(1, 999), 0))
        for _ in range(count)
    ]


@pytest.mark.parametrize(("scale", "host_s"), [(1.0, 0.0), (30.0, 0.0), (0.03, 0.0), (1.5, 0.02)])
def test_scale_and_constant_are_found(scale: float, host_s: float) -> None:
    learned = LearnedPricer(PRICER)
    for shape in shapes(1, 400):
        learned.on_priced(ran(shape, scale * PRICER.seconds(shape), host_s))
    for shape in shapes(2, 20):
        true = scale * PRICER.seconds(shape) + host_s
        assert learned.seconds(shape) == pytest.approx(true, rel=0.05)


def test_equal_steps_are_a_matter_of_scale() -> None:
    learned, shape = LearnedPricer(PRICER), ((1, 10),)
    for _ in range(50):
        learned.on_priced(ran(shape, 3 * PRICER.seconds(shape)))
    assert learned.seconds(shape) == pytest.approx(3 * PRICER.seconds(shape), rel=0.02)
    assert learned.host_s == pytest.approx(0.0, abs=1e-4)


def test_a_stall_counts_no_more_than_a_step() -> None:
    learned = LearnedPricer(PRICER)
    for i, shape in enumerate(shapes(3, 60)):
        learned.on_priced(ran(shape, PRICER.seconds(shape) * (1000 if i == 30 else 1)))
    price = PRICER.seconds(((1, 100),) * 8)
    assert learned.seconds(((1, 100),) * 8) == pytest.approx(price, rel=0.1)


def test_old_steps_are_forgotten() -> None:
    learned = LearnedPricer(PRICER)
    for factor in (5, 1):
        for shape in shapes(4, 700):
            learned.on_priced(ran(shape, factor * PRICER.seconds(shape)))
    assert learned.seconds(((1, 100),)) == pytest.approx(PRICER.seconds(((1, 100),)), rel=0.02)


def test_first_steps_and_steps_without_time_teach_nothing() -> None:
    learned, shape = LearnedPricer(PRICER), ((1, 10),)
    for _ in range(LEAST_STEPS - 1):
        learned.on_priced(ran(shape, 1.0))
    for _ in range(50):
        learned.on_priced(ran(shape, 0.0))
    assert learned.seconds(shape) == PRICER.seconds(shape)


@pytest.mark.parametrize("contexts", [[100] * 7, [1000] * 8, [100] * 7 + [1500]])
def test_checks_are_learned_by_their_own_price(contexts: list[int]) -> None:
    learned = LearnedPricer(PRICER)
    for num_draft_tokens in (1, 2, 5) * LEAST_STEPS:
        plan = checks(contexts, num_draft_tokens)
        learned.on_priced(planned(plan, 2 * PRICER.seconds(plan.shape)))
    shape = checks(contexts, 3).shape
    assert learned.seconds(shape) == pytest.approx(2 * PRICER.seconds(shape), rel=0.01)
