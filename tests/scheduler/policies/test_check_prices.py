"""Are prices of checks, put on a line, those of the steps?"""

from __future__ import annotations

import random

import pytest

from ridgeline.cost.pricer import Pricer
from ridgeline.scheduler.policies.check_prices import CheckPrices, alike
from tests.cost.random_setups import random_setup
from tests.scheduler.policies.checks import checks


@pytest.mark.parametrize("seed", range(12))
def test_a_price_on_a_line_is_nearly_that_of_the_step(seed: int) -> None:
    """Of models of all kinds, with windows too; contexts of a step lie around their mean."""
    rng = random.Random(seed)
    pricer = Pricer(random_setup(rng))
    prices = CheckPrices(lambda rows, context: (pricer.seconds(alike(rows, context)),))
    for _ in range(40):
        mean, num_rows = rng.choice((30, 90, 300, 1100, 4500)), rng.randint(1, 64)
        contexts = [max(1, round(mean * rng.uniform(0.7, 1.3))) for _ in range(num_rows)]
        plan = checks(contexts, rng.randint(1, 7))
        (found,) = prices.of(plan.scheduled)
        assert found == pytest.approx(pricer.seconds(plan.shape), rel=0.06), (seed, contexts)
