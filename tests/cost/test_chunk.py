"""The shortest step that reads prompts at most of the best rate, and no shorter one."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from ridgeline.cost.captured import ROUNDING, efficient_chunk
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Setup
from ridgeline.step import StepPricer, StepShape
from tests.cost.random_setups import LLAMA_8B, device, random_setup, spec_of


@dataclass(frozen=True, slots=True)
class Fixed:
    """A step takes `fixed_s`, then so much a token."""

    fixed_s: float
    per_token_s: float = 1e-5

    def seconds(self, shape: StepShape) -> float:
        return self.fixed_s + self.per_token_s * sum(new for new, _ in shape)


def rate(pricer: StepPricer, num_tokens: int) -> float:
    return num_tokens / pricer.seconds(((num_tokens, 0),))


def best_rate(pricer: StepPricer, most: int) -> float:
    sizes = {most} | {m for i in range(14) for m in (2**i, 3 * 2**i) if m <= most}
    return max(rate(pricer, size) for size in sizes)


@pytest.mark.parametrize(("fixed_s", "most"), [(1e-3, 8192), (1e-2, 8192), (1e-6, 512)])
def test_the_size_is_that_of_the_formula(fixed_s: float, most: int) -> None:
    pricer = Fixed(fixed_s)
    share = 0.9 * best_rate(pricer, most) * 1e-5  # n / (n + f) >= share
    exact = share / (1 - share) * fixed_s / 1e-5
    got = efficient_chunk(pricer, most)
    assert exact <= got <= exact + 1 + ROUNDING


def test_never_more_than_there_is_room_for() -> None:
    assert efficient_chunk(Fixed(1.0), 100) <= 100
    assert efficient_chunk(Fixed(1.0), 1) == 1
    assert efficient_chunk(Fixed(0.0), 100) == ROUNDING


@pytest.mark.parametrize("seed", range(30))
def test_it_reads_at_nine_tenths_and_a_shorter_step_does_not(seed: int) -> None:
    pricer, most = Pricer(random_setup(random.Random(seed))), 4096
    got, wanted = efficient_chunk(pricer, most), 0.9 * best_rate(pricer, most)
    assert got == most or rate(pricer, got) >= 0.999 * wanted, seed
    assert got <= 2 * ROUNDING or rate(pricer, got // 2) < wanted, seed


def test_an_8b_model_on_a_large_gpu() -> None:
    pricer = Pricer(Setup(spec_of(LLAMA_8B), device("h100-sxm")))
    assert 200 <= efficient_chunk(pricer, 8192) <= 800
