"""The fast price equals the price operator by operator, for one step and for many."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice

import pytest

from ridgeline.architectures.counts import layer_attention_flops
from ridgeline.cost.hardware import catalogue
from ridgeline.cost.ops import layer_products
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.roofline import step_cost
from ridgeline.cost.setup import ONE_DEVICE, Setup
from ridgeline.cost.step_features import attention_kinds, chunk_keys, step_features
from ridgeline.step import StepPricer, StepShape
from tests.cost.random_setups import (
    GEMMA_3_27B,
    LLAMA_8B,
    device,
    random_calibration,
    random_setup,
    random_shape,
    spec_of,
)
from tests.observe.priced import small_pricer
from tests.thinning import slow

CLOSE = 1e-9


@pytest.mark.parametrize("seed", [*range(50), *slow(*range(50, 150))])
def test_a_step_costs_the_same_both_ways(seed: int) -> None:
    rng = random.Random(seed)
    setup = random_setup(rng)
    pricer = Pricer(setup)
    for _ in range(3):
        shape = random_shape(rng)
        rows = rng.choice([None, 0, 1, len(shape), 40])
        slow = step_cost(setup, shape, rows)
        assert pricer.seconds(shape, rows) == pytest.approx(slow.expected_s, rel=CLOSE)
        assert pricer.seconds_of(pricer.features(shape), rows) == pricer.seconds(shape, rows)
        assert pricer.cost(shape, rows) == slow
        tp = setup.layout.tp
        price = pricer.price(shape, len(shape) if rows is None else rows)
        assert price.expected_s == pricer.seconds(shape, rows)
        assert price.ideal_s == pytest.approx(slow.ideal_s, rel=CLOSE)
        assert price.flops == pytest.approx(tp * slow.flops, rel=CLOSE)
        assert price.bytes == pytest.approx(tp * slow.bytes, rel=CLOSE)


def every_constant(rng: random.Random, setup: Setup) -> Setup:
    """The setup with the constants that `random_calibration` leaves at nothing, on any device."""
    on = rng.choice(list(catalogue().values()))
    known = random_calibration(rng, on)
    matmul = {
        name: replace(
            c, e_v=rng.uniform(0.2, 1.0), k_m=rng.uniform(0, 90), k_s=rng.uniform(0, 1e-9)
        )
        for name, c in known.matmul.items()
    }
    host = replace(
        known.host, captured_tokens=512, warm_t0=0.4, own_t0=0.2, own_rows_t0=0.5,
        captured_s=rng.uniform(0, 1e-4), lone_s=2e-4, lone_request_s=1e-5, lone_least_s=1e-3,
        check_request_s=3e-6,
    )  # fmt: skip
    attention = {"bf16": replace(known.attention["bf16"], verify_token=rng.uniform(0, 0.3))}
    own = tuple(sorted(layer_products(setup.spec, ONE_DEVICE, setup.precision)))
    calibration = replace(known, matmul=matmul, host=host, attention=attention, own_products=own)
    return replace(setup, device=on, layout=ONE_DEVICE, calibration=calibration)


@pytest.mark.parametrize("seed", range(40))
def test_a_step_costs_the_same_both_ways_with_every_constant(seed: int) -> None:
    rng = random.Random(seed)
    setup = every_constant(rng, random_setup(rng))
    pricer = Pricer(setup)
    for most in (1, 3, 12):
        checks = tuple((rng.randint(1, 6), rng.randint(1, 700)) for _ in range(most))
        for shape in (random_shape(rng, most), checks, ((1, 9),)):
            slow = step_cost(setup, shape)
            price = pricer.price(shape, len(shape))
            assert price.expected_s == pytest.approx(slow.expected_s, rel=CLOSE), shape
            assert price.ideal_s == pytest.approx(slow.ideal_s, rel=CLOSE), shape


@pytest.mark.parametrize("seed", range(40))
def test_sums_are_those_of_each_request(seed: int) -> None:
    rng = random.Random(seed)
    kinds, shape = tuple(attention_kinds(random_setup(rng).spec)), random_shape(rng)
    chunks = [one for one in shape if one[0] > 1]
    found = step_features(kinds, shape)
    assert (found.num_requests, found.num_chunks) == (len(shape), len(chunks))
    for kind, sums in zip(kinds, found.attention, strict=True):
        assert sums.prefill_flops == sum(layer_attention_flops(kind, *one) for one in chunks)
        assert sums.prefill_keys == sum(chunk_keys(kind.window, *one) for one in chunks)


@pytest.mark.parametrize("seed", range(60))
def test_decodes_need_not_be_shown_row_by_row(seed: int) -> None:
    rng = random.Random(seed)
    setup = random_setup(rng)
    contexts = tuple(rng.randint(0, 5000) for _ in range(rng.randint(0, 40)))
    shape = tuple((1, context) for context in contexts)
    assert Pricer(setup).decode_features(contexts) == Pricer(setup).features(shape)
    assert Pricer(setup).decodes_seconds(contexts) == Pricer(setup).seconds(shape)


def test_equal_questions_have_equal_answers_whatever_was_asked_before() -> None:
    rng = random.Random(7)
    pricer = Pricer(random_setup(rng))
    shapes = [random_shape(rng) for _ in range(12)]
    first = [pricer.seconds(shape) for shape in shapes]
    for i in [rng.randrange(12) for _ in range(100)]:
        assert pricer.seconds(shapes[i]) == first[i]
    contexts = (3, 5)
    assert pricer.decode_features(contexts) is pricer.decode_features(contexts)
    assert pricer.decode_features((3, 6)) != pricer.decode_features(contexts)


def grown(contexts: list[int], step: int) -> StepShape:
    return tuple((1, context + step) for context in contexts)


@pytest.mark.parametrize("seed", range(100))
def test_many_decode_steps_in_closed_form(seed: int) -> None:
    rng = random.Random(seed)
    pricer = Pricer(random_setup(rng))
    contexts = [rng.randint(0, 600) for _ in range(rng.randint(1, 20))]
    steps = rng.randint(1, 120)
    one_by_one = [pricer.seconds(grown(contexts, step)) for step in range(steps)]
    run = pricer.decode_run(contexts)
    each = [run.seconds(step) for step in range(steps)]
    assert each == pytest.approx(one_by_one, rel=CLOSE)
    assert list(islice(pricer.each_decode(contexts), steps)) == each
    assert run.total(steps) == pytest.approx(sum(one_by_one), rel=CLOSE)
    first = rng.randint(0, steps)
    assert run.total(steps - first, first) == pytest.approx(sum(one_by_one[first:]), rel=CLOSE)


def test_where_windows_are_full_steps_cost_the_same() -> None:
    pricer = Pricer(Setup(spec_of(GEMMA_3_27B), device()))
    short, full = pricer.decode_run([100] * 8), pricer.decode_run([5000] * 8)
    growth = short.seconds(1) - short.seconds(0)
    # Ten of 62 layers go on growing.
    assert full.seconds(1) - full.seconds(0) == pytest.approx(growth * 10 / 62, rel=1e-6)


def test_the_pricer_is_what_the_engine_asks_for() -> None:
    pricer: StepPricer = Pricer(Setup(spec_of(LLAMA_8B), device()))
    assert 0.004 < pricer.seconds(((1, 1000),)) < 0.01


def test_a_step_of_nothing_is_free_but_for_the_host() -> None:
    assert Pricer(Setup(spec_of(LLAMA_8B), device())).seconds(()) == 0.0


@pytest.mark.parametrize("seed", [*range(40), *slow(*range(40, 100))])
def test_decodes_cost_the_same_both_ways(seed: int) -> None:
    rng = random.Random(seed)
    setup = random_setup(rng)
    for _ in range(3):
        contexts = tuple(rng.randint(0, 5000) for _ in range(rng.randint(1, 40)))
        shape = tuple((1, context) for context in contexts)
        slow = Pricer(setup).price(shape, len(shape))
        assert Pricer(setup).price_decodes(contexts) == slow, f"seed {seed}"


def test_more_context_costs_more_until_the_window_is_full() -> None:
    pricer = small_pricer()
    before, full, beyond = (pricer.price_decodes((n, n)) for n in (5, 23, 400))
    assert before.own_bytes < full.own_bytes == beyond.own_bytes
    assert before.flops < full.flops == beyond.flops
