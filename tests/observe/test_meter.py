"""Two ways to the price of a step that only decodes give the same figures."""

from __future__ import annotations

import random

import pytest

from ridgeline.cost.pricer import Pricer
from ridgeline.observe.meter import Meter
from tests.cost.random_setups import random_setup
from tests.observe.priced import small_meter


@pytest.mark.parametrize("seed", range(100))
def test_decodes_cost_the_same_both_ways(seed: int) -> None:
    rng = random.Random(seed)
    setup = random_setup(rng)
    for _ in range(3):
        contexts = tuple(rng.randint(0, 5000) for _ in range(rng.randint(1, 40)))
        shape = tuple((1, context) for context in contexts)
        slow = Meter(Pricer(setup)).price(shape, len(shape))
        assert Meter(Pricer(setup)).price_decodes(contexts) == slow, f"seed {seed}"


def test_more_context_costs_more_until_the_window_is_full() -> None:
    meter = small_meter()
    before, full, beyond = (meter.price_decodes((n, n)) for n in (5, 23, 400))
    assert before.own_bytes < full.own_bytes == beyond.own_bytes
    assert before.flops < full.flops == beyond.flops
