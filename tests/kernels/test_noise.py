from __future__ import annotations

import math

import pytest
import torch

from ridgeline.kernels.noise import minus_gumbel, stream_key, uniforms
from tests.sampling.build import p_value


def keys(*seeds: int) -> torch.Tensor:
    return torch.tensor([stream_key(seed) for seed in seeds])


def bins(values: torch.Tensor, num: int = 64) -> float:
    counts = torch.bincount((values.flatten() * num).long(), minlength=num)
    return p_value(counts, torch.full((num,), 1 / num))


def test_the_numbers_never_change() -> None:
    """Frozen: a seed must give the same tokens in every version and on every machine."""
    assert stream_key(0) == 0xE220A8397B1DCDAF - (1 << 64)  # splitmix64's first number for 0
    got = uniforms(keys(0, 7, -1), torch.tensor([0, 5, 1 << 20]), 3)
    assert got.tolist() == [
        [0.6131064891815186, 0.7422307133674622, 0.5951759815216064],
        [0.6310447454452515, 0.17876048386096954, 0.7060227990150452],
        [0.9932611584663391, 0.17282989621162415, 0.37782296538352966],
    ]


def test_uniform_over_tokens_positions_and_seeds() -> None:
    assert bins(uniforms(keys(3), torch.tensor([11]), 100_000)) > 1e-4
    positions = torch.arange(100_000)
    assert bins(uniforms(keys(3).expand(100_000), positions, 2)[:, 1]) > 1e-4
    assert bins(uniforms(keys(*range(100_000)), torch.zeros(100_000, dtype=torch.int64), 1)) > 1e-4


def test_pairs_of_neighbours_are_independent() -> None:
    num = 1 << 17
    u = uniforms(keys(5).expand(num), torch.arange(num), 2)
    seeds = uniforms(keys(*range(num // 8)), torch.zeros(num // 8, dtype=torch.int64), 1)[:, 0]
    for left, right in (
        (u[:, 0], u[:, 1]),  # neighbouring tokens
        (u[:-1, 0], u[1:, 0]),  # neighbouring positions
        (u[:-1, 1], u[1:, 0]),  # next position, token before
        (seeds[:-1], seeds[1:]),  # neighbouring seeds
    ):
        cells = (left * 16).long() * 16 + (right * 16).long()
        counts = torch.bincount(cells, minlength=256)
        assert p_value(counts, torch.full((256,), 1 / 256)) > 1e-4


def test_never_zero_or_one_and_noise_is_finite() -> None:
    u = uniforms(keys(1), torch.tensor([0]), 3_000_000)
    assert 0 < float(u.min()) < 1e-5
    assert 1 - 1e-5 < float(u.max()) < 1
    g = -minus_gumbel(keys(1), torch.tensor([0]), 3_000_000)
    assert bool(g.isfinite().all())
    assert float(g.mean()) == pytest.approx(0.5772, abs=0.005)  # Euler's constant
    assert float(g.var()) == pytest.approx(math.pi**2 / 6, abs=0.01)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    many = uniforms(keys(*range(50)), torch.arange(50) * 3, 1000)
    for row in (0, 17, 49):
        alone = uniforms(keys(row), torch.tensor([row * 3]), 1000)
        assert torch.equal(many[row], alone[0])


def test_a_longer_vocabulary_keeps_the_first_numbers() -> None:
    long = uniforms(keys(9), torch.tensor([4]), 500)
    assert torch.equal(long[:, :100], uniforms(keys(9), torch.tensor([4]), 100))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_bits_on_a_gpu() -> None:
    positions = torch.arange(64)
    there = uniforms(keys(*range(64)).cuda(), positions.cuda(), 5000).cpu()
    assert torch.equal(there, uniforms(keys(*range(64)), positions, 5000))
