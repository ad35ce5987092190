"""A device that is only a price: when its steps end, what they give, which drafts hold."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from ridgeline.clock import VirtualClock
from ridgeline.errors import ConfigError
from ridgeline.simulator.executor import Answer, SimulatedExecutor, Span, Speculation
from ridgeline.step import NewRequest, ScheduledRequest, StepPlan, StepShape
from tests.simulator.worlds import LinearPricer

NO_BLOCKS = ((),)


def entry(
    name: str, start: int, num_tokens: int = 1, *, samples: bool = True, num_draft: int = 0
) -> ScheduledRequest:
    return ScheduledRequest(name, start, num_tokens, NO_BLOCKS, samples, num_draft)


def executor(pricer: LinearPricer | None = None, **fields: object) -> SimulatedExecutor:
    chosen = pricer or LinearPricer(1.0, 0.0, 0.0)
    return SimulatedExecutor(chosen, VirtualClock(), 100, 16, **fields)  # type: ignore[arg-type]


def test_a_step_starts_when_the_one_before_it_has_ended() -> None:
    device = executor()
    spans = [device.submit(StepPlan(n, (entry("a", n),))).span for n in (1, 2)]
    device.clock.advance_to(5.0)
    spans.append(device.submit(StepPlan(3, (entry("a", 3),))).span)
    assert spans == [Span(0.0, 1.0), Span(1.0, 2.0), Span(5.0, 6.0)]
    assert device.clock.now() == 5.0


def test_who_computes_in_submit_comes_back_when_it_is_done() -> None:
    device = executor(computes_in_submit=True)
    device.submit(StepPlan(1, (entry("a", 0),)))
    assert device.clock.now() == 1.0


def test_a_step_gives_the_known_tokens_of_those_who_sample() -> None:
    device = executor()
    device.answers |= {"a": Answer(3, (7, 8)), "b": Answer(2, (), filler=9), "c": Answer(1, (5,))}
    plan = StepPlan(
        1, (entry("a", 0, 3), entry("b", 4), entry("c", 0, samples=False), entry("gone", 8))
    )
    future = device.submit(plan)
    assert future.result().token_ids == {"a": (7,), "b": (9,), "gone": (0,)}
    assert not device.spans


@pytest.mark.parametrize(
    ("first", "count", "tokens"),
    [(0, 2, (1, 2)), (1, 3, (2, 3, 9)), (3, 2, (9, 9)), (7, 0, ()), (2, 1, (3,))],
)
def test_an_answer_goes_on_with_its_filler(first: int, count: int, tokens: tuple[int]) -> None:
    assert Answer(5, (1, 2, 3), filler=9).tokens(first, count) == tokens


def test_ghosts_cost_as_much_as_the_longest_row() -> None:
    device = executor(LinearPricer())
    shape: StepShape = ((1, 10), (1, 30))
    plain = device.seconds(shape)
    device.num_ghosts = 2
    assert device.seconds(shape) == LinearPricer().seconds((*shape, (1, 30), (1, 30))) > plain
    assert device.seconds(()) == LinearPricer().seconds(())


@pytest.mark.parametrize("num_ghosts", [0, 3])
def test_times_of_a_run_are_those_of_its_steps(num_ghosts: int) -> None:
    device = executor(LinearPricer(), num_ghosts=num_ghosts)
    for step, seconds in enumerate(islice(device.decode_times([3, 50, 7]), 40)):
        shape = tuple((1, context + step) for context in (3, 50, 7))
        assert seconds == device.seconds(shape)


# ---------------------------------------------------------------------- drafts


def drafting(speculation: Speculation, seed: int = 1) -> SimulatedExecutor:
    device = executor(speculation=speculation, rng=random.Random(seed))
    device.answers["a"] = Answer(2, tuple(range(100, 200)))
    return device


def new_row(num_known: int) -> NewRequest:
    tokens = tuple(range(num_known))
    return NewRequest("a", tokens, 2, None, NO_BLOCKS)  # type: ignore[arg-type]


def test_accepted_drafts_move_the_row_on() -> None:
    device = drafting(Speculation(3, (1.0, 1.0, 0.0)))
    first = device.submit(StepPlan(1, (entry("a", 0, 2),), (new_row(2),))).result()
    assert first.token_ids == {"a": (100,)}
    assert len(first.draft_token_ids["a"]) == 3
    second = device.submit(StepPlan(2, (entry("a", 2, 4, num_draft=3),))).result()
    assert second.token_ids == {"a": (101, 102, 103)}  # two drafts and the next token
    reopened = StepPlan(3, (entry("a", 0, 4),), (new_row(4),), preempted=("a",))
    assert device.submit(reopened).result().token_ids == {"a": (102,)}


def test_fewer_drafts_are_verified_when_fewer_are_planned() -> None:
    device = drafting(Speculation.even(4, 1.0))
    device.submit(StepPlan(1, (entry("a", 0, 2),), (new_row(2),))).result()
    result = device.submit(StepPlan(2, (entry("a", 2, 2, num_draft=1),))).result()
    assert result.token_ids == {"a": (101, 102)}


def test_making_drafts_takes_time() -> None:
    speculation = Speculation.even(2, 0.5, lambda shape: 0.25 * len(shape))
    device = drafting(speculation)
    plan = StepPlan(1, (entry("a", 0, 2), entry("b", 0, 5, samples=False)), (new_row(2),))
    assert device.submit(plan).span.end_s == 1.25


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        (Speculation.even(4, 0.7), sum(0.7**k for k in range(1, 5))),
        (Speculation.from_curve(3, (1.8, 2.33, 2.75)), 1.75),
        (Speculation.from_curve(2, (1.8, 2.33, 2.75)), 1.33),
    ],
)
def test_as_many_are_accepted_as_the_rates_say(speculation: Speculation, expected: float) -> None:
    rng, count = random.Random(3), 20_000
    total = sum(speculation.num_accepted(speculation.num_drafts, rng) for _ in range(count))
    assert total / count == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("accepted", [(0.5,), (0.5, 1.5), (-0.1, 0.5)])
def test_rates_that_cannot_be(accepted: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="acceptance rates"):
        Speculation(2, accepted)
