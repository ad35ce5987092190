"""The fast price equals the price operator by operator, for one step and for many."""

from __future__ import annotations

import random

import pytest

from ridgeline.cost.pricer import Pricer
from ridgeline.cost.roofline import step_cost
from ridgeline.cost.setup import Setup
from ridgeline.step import StepPricer, StepShape
from tests.cost.random_setups import (
    GEMMA_3_27B,
    LLAMA_8B,
    device,
    random_setup,
    random_shape,
    spec_of,
)

CLOSE = 1e-9


@pytest.mark.parametrize("seed", range(150))
def test_a_step_costs_the_same_both_ways(seed: int) -> None:
    rng = random.Random(seed)
    setup = random_setup(rng)
    pricer = Pricer(setup)
    for _ in range(3):
        shape = random_shape(rng)
        rows = rng.choice([None, 0, 1, len(shape), 40])
        slow = step_cost(setup, shape, rows)
        assert pricer.seconds(shape, rows) == pytest.approx(slow.expected_s, rel=CLOSE)
        assert pricer.seconds_of(pricer.totals(shape), rows) == pricer.seconds(shape, rows)
        assert pricer.cost(shape, rows) == slow


@pytest.mark.parametrize("seed", range(60))
def test_decodes_need_not_be_shown_row_by_row(seed: int) -> None:
    rng = random.Random(seed)
    setup = random_setup(rng)
    contexts = tuple(rng.randint(0, 5000) for _ in range(rng.randint(0, 40)))
    shape = tuple((1, context) for context in contexts)
    assert Pricer(setup).decode_totals(contexts) == Pricer(setup).totals(shape)
    assert Pricer(setup).decodes_seconds(contexts) == Pricer(setup).seconds(shape)


def test_equal_questions_have_equal_answers_whatever_was_asked_before() -> None:
    rng = random.Random(7)
    pricer = Pricer(random_setup(rng))
    shapes = [random_shape(rng) for _ in range(12)]
    first = [pricer.seconds(shape) for shape in shapes]
    for i in [rng.randrange(12) for _ in range(100)]:
        assert pricer.seconds(shapes[i]) == first[i]
    contexts = (3, 5)
    assert pricer.decode_totals(contexts) is pricer.decode_totals(contexts)
    assert pricer.decode_totals((3, 6)) != pricer.decode_totals(contexts)


def grown(contexts: list[int], step: int) -> StepShape:
    return tuple((1, context + step) for context in contexts)


@pytest.mark.parametrize("seed", range(100))
def test_many_decode_steps_in_closed_form(seed: int) -> None:
    rng = random.Random(seed)
    pricer = Pricer(random_setup(rng))
    contexts = [rng.randint(0, 600) for _ in range(rng.randint(1, 20))]
    steps = rng.randint(1, 120)
    one_by_one = [pricer.seconds(grown(contexts, step)) for step in range(steps)]
    assert pricer.decode_seconds(contexts, steps) == pytest.approx(one_by_one, rel=CLOSE)
    run = pricer.decode_run(contexts)
    assert run.total(steps) == pytest.approx(sum(one_by_one), rel=CLOSE)
    first = rng.randint(0, steps)
    assert run.total(steps - first, first) == pytest.approx(sum(one_by_one[first:]), rel=CLOSE)


@pytest.mark.parametrize("seed", range(30))
def test_how_many_steps_are_over_after_some_time(seed: int) -> None:
    rng = random.Random(seed)
    run = Pricer(random_setup(rng)).decode_run([rng.randint(0, 500) for _ in range(5)])
    for steps in (0, 1, 7, 50):
        just_after = run.total(steps) * (1 + 1e-9)
        assert run.steps_within(just_after, 200) == steps
        assert run.steps_within(just_after, steps // 2) == steps // 2
    assert run.steps_within(run.seconds(0) / 2, 200) == 0


def test_where_windows_are_full_steps_cost_the_same() -> None:
    pricer = Pricer(Setup(spec_of(GEMMA_3_27B), device()))
    assert not pricer.decode_is_linear
    assert Pricer(Setup(spec_of(LLAMA_8B), device())).decode_is_linear
    short, full = pricer.decode_run([100] * 8), pricer.decode_run([5000] * 8)
    growth = short.seconds(1) - short.seconds(0)
    # Ten of 62 layers go on growing.
    assert full.seconds(1) - full.seconds(0) == pytest.approx(growth * 10 / 62, rel=1e-6)


def test_the_pricer_is_what_the_engine_asks_for() -> None:
    pricer: StepPricer = Pricer(Setup(spec_of(LLAMA_8B), device()))
    assert 0.004 < pricer.seconds(((1, 1000),)) < 0.01


def test_a_step_of_nothing_is_free_but_for_the_host() -> None:
    assert Pricer(Setup(spec_of(LLAMA_8B), device())).seconds(()) == 0.0
