"""The choice of bits: within the budget, no worse than one width for all, and near the best."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from ridgeline.compression.adviser import choose
from ridgeline.errors import ConfigError

SIZES = [(200, 300, 400, 800)] * 4


def total(values: list[tuple[float, ...]], chosen: tuple[int, ...]) -> float:
    return sum(of[at] for of, at in zip(values, chosen, strict=True))


def test_the_layer_that_needs_bits_gets_them() -> None:
    costs = [(1.0, 0.5, 0.2, 0.0), (9.0, 4.0, 1.0, 0.0), (1.0, 0.5, 0.2, 0.0)]
    assert choose(costs, SIZES[:3], 800) == (0, 2, 0)
    assert choose(costs, SIZES[:3], 10_000) == (3, 3, 3)
    assert choose(costs, SIZES[:3], 600) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_near_the_best_of_all_choices(seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    need = torch.rand(4, generator=noise).exp().tolist()
    costs = [tuple(n * 4.0**-bits for bits in (2, 3, 4, 8)) for n in need]
    for budget in (800, 1000, 1300, 2000):
        found = choose(costs, SIZES, budget)
        assert sum(SIZES[i][at] for i, at in enumerate(found)) <= budget
        fitting = [
            pick
            for pick in product(range(4), repeat=4)
            if sum(SIZES[i][at] for i, at in enumerate(pick)) <= budget
        ]
        best = min(total(costs, pick) for pick in fitting)
        assert total(costs, found) <= 1.3 * best, (seed, budget)


def test_more_bits_that_help_nothing_are_not_taken() -> None:
    assert choose([(0.5, 0.6, 0.5, 0.7)], SIZES[:1], 10_000) == (0,)


def test_a_budget_below_the_smallest_is_refused() -> None:
    with pytest.raises(ConfigError, match="take 800 bytes, more than the 799 allowed"):
        choose([(1.0, 0.5, 0.2, 0.0)] * 4, SIZES, 799)
