"""Rounding to nearest: the golden case, the bound of the error, and what must not break."""

from __future__ import annotations

import pytest
import torch

from ridgeline.errors import ConfigError
from ridgeline.quantization.algorithms.grid import Grid, fit, fit_best, round_to_nearest

GOLDEN = torch.tensor([[0.12, -0.83, 0.45, -0.21]])


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_golden_case() -> None:
    found = round_to_nearest(GOLDEN, Grid(4, 4))
    assert found.codes_OI.tolist() == [[1, -7, 4, -2]]
    assert found.scales.scale_OG.item() == pytest.approx(0.118571, abs=1e-6)
    error = (found.dequantize() - GOLDEN).abs().max().item()
    assert error == pytest.approx(0.0271, abs=5e-5)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_a_group_of_zeros_is_safe(bits: int, symmetric: bool) -> None:
    weight_OI = torch.zeros(2, 8)
    weight_OI[1, 4:] = noise(4)
    found = round_to_nearest(weight_OI, Grid(bits, 4, symmetric)).dequantize()
    assert torch.equal(found[0], torch.zeros(8))
    assert torch.equal(found[1, :4], torch.zeros(4))
    assert bool(torch.isfinite(found).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [0, 1, 4, 16])
@pytest.mark.parametrize("bits", range(2, 9))
def test_errors_are_at_most_half_a_scale(bits: int, group: int, dtype: torch.dtype) -> None:
    weight_OI = noise(8, 16, seed=bits)
    # Scales so small that float16 has fewer digits for them have a larger error.
    weight_OI = weight_OI.where(weight_OI.abs() > 0.1, 0.1) * torch.logspace(0, 3, 8)[:, None]
    grid = Grid(bits, group, scale_dtype=dtype)
    found = round_to_nearest(weight_OI, grid)
    scale_OG1 = found.scales.scale_OG.float()[..., None]
    error_OGg = grid.grouped((found.dequantize() - weight_OI).abs())
    # A stored scale may be smaller than the exact one by half a unit in its last place; the end
    # of the span then lies so much further out.
    slack = torch.finfo(dtype).eps * grid.high
    assert bool((error_OGg <= (0.5 + slack) * scale_OG1).all())
    assert int(found.codes_OI.min()) >= grid.low
    assert int(found.codes_OI.max()) <= grid.high


@pytest.mark.parametrize("bits", range(2, 9))
def test_asymmetric_errors_and_zero(bits: int) -> None:
    weight_OI = noise(8, 32, seed=bits) + 1.5
    weight_OI[:, 3] = 0.0
    grid = Grid(bits, 16, symmetric=False)
    found = round_to_nearest(weight_OI, grid)
    error_OGg = grid.grouped((found.dequantize() - weight_OI).abs())
    assert bool((error_OGg <= 1.001 * found.scales.scale_OG[..., None]).all())
    assert torch.equal(found.dequantize()[:, 3], torch.zeros(8))
    symmetric = round_to_nearest(weight_OI, Grid(bits, 16)).dequantize()
    assert (found.dequantize() - weight_OI).norm() < (symmetric - weight_OI).norm()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_what_was_rounded_stays_as_it_is(bits: int, symmetric: bool) -> None:
    grid = Grid(bits, 8, symmetric)
    once = round_to_nearest(noise(4, 16), grid)
    again = round_to_nearest(once.dequantize(), grid)
    assert torch.allclose(once.dequantize(), again.dequantize(), atol=1e-6)


def test_groups_must_divide_a_row() -> None:
    with pytest.raises(ConfigError, match=r"group_size 5 does not divide a row of 12.*such as 4"):
        round_to_nearest(noise(2, 12), Grid(4, 5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damaged_weights_are_refused(bad: float) -> None:
    weight_OI = noise(2, 4)
    weight_OI[1, 2] = bad
    for symmetric in (True, False):
        with pytest.raises(ConfigError, match="infinite, NaN or too large"):
            round_to_nearest(weight_OI, Grid(4, 4, symmetric))


def test_scales_too_large_for_their_dtype_are_refused() -> None:
    with pytest.raises(ConfigError, match="float16"):
        round_to_nearest(noise(2, 4) * 1e6, Grid(4, 4, scale_dtype=torch.float16))


def test_the_best_span_never_costs_more_than_the_whole_one() -> None:
    weight_OI = noise(32, 64).pow(3)
    grid = Grid(3, 16)
    weight_OGg = grid.grouped(weight_OI)

    def cost(scale_OG: torch.Tensor) -> torch.Tensor:
        codes = (weight_OGg / scale_OG[..., None]).round().clamp(grid.low, grid.high)
        return (codes * scale_OG[..., None] - weight_OGg).square().sum(-1)

    best = fit_best(weight_OGg, grid, lambda d: d.square().sum(-1), smallest=0.4, steps=20)
    assert bool((cost(best.scale_OG) <= cost(fit(weight_OGg, grid).scale_OG)).all())
    assert cost(best.scale_OG).sum() < 0.9 * cost(fit(weight_OGg, grid).scale_OG).sum()
