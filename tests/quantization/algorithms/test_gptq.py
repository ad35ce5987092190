"""GPTQ: never worse than rounding where it can correct, equal to it where it cannot."""

from __future__ import annotations

import pytest
import torch

from ridgeline.errors import ConfigError
from ridgeline.quantization.algorithms.awq import output_error
from ridgeline.quantization.algorithms.gptq import GptqSettings, InputStatistics, gptq
from ridgeline.quantization.algorithms.grid import Grid, round_to_nearest

PLAIN = GptqSettings(act_order=False, search=False)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(inputs: int, seed: int = 1) -> torch.Tensor:
    """Hessian of inputs of which few are independent, some are large."""
    seen = InputStatistics(inputs, torch.device("cpu"))
    x_TI = noise(500, inputs // 4, seed=seed) @ noise(inputs // 4, inputs, seed=seed + 1)
    seen.add((x_TI + 0.3 * noise(500, inputs, seed=seed + 2)) * torch.logspace(-1, 1, inputs))
    return seen.hessian_II


def test_the_statistics_are_those_of_all_rows() -> None:
    x_TI = noise(30, 6)
    seen = InputStatistics(6, torch.device("cpu"))
    seen.add(x_TI[:7])
    seen.add(x_TI[7:].to(torch.float64))
    assert torch.allclose(seen.hessian_II, 2 * x_TI.T @ x_TI / 30, atol=1e-5)
    assert torch.allclose(seen.magnitude_I, x_TI.abs().mean(0), atol=1e-6)
    assert seen.num_tokens == 30


@pytest.mark.parametrize("group", [0, 16, 32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("bits", [3, 4])
def test_outputs_are_nearer_than_those_of_rounding(
    bits: int, act_order: bool, symmetric: bool, group: int
) -> None:
    weight_OI, hessian_II, grid = noise(48, 192), correlated(192), Grid(bits, group, symmetric)
    settings = GptqSettings(act_order=act_order, search=False)
    near = output_error(
        weight_OI - gptq(weight_OI, hessian_II, grid, settings).dequantize(), hessian_II
    )
    far = output_error(weight_OI - round_to_nearest(weight_OI, grid).dequantize(), hessian_II)
    assert near < 0.7 * far


@pytest.mark.parametrize("settings", [PLAIN, GptqSettings(search=False)])
def test_independent_inputs_leave_nothing_to_correct(settings: GptqSettings) -> None:
    weight_OI, grid = noise(8, 160), Grid(4, 16)
    found = gptq(weight_OI, torch.diag(torch.rand(160) + 0.5), grid, settings)
    assert torch.equal(found.codes_OI, round_to_nearest(weight_OI, grid).codes_OI)


def test_inputs_that_were_never_seen_are_rounded_to_nearest() -> None:
    weight_OI, grid = noise(8, 64), Grid(4, 8)
    found = gptq(weight_OI, torch.zeros(64, 64), grid, GptqSettings(search=False))
    assert torch.equal(found.codes_OI, round_to_nearest(weight_OI, grid).codes_OI)


def test_the_columns_follow_the_definition() -> None:
    """Column by column with the inverse of what is left of the Hessian, written out in float64."""
    weight_OI, hessian_II, grid = noise(5, 24), correlated(24), Grid(4, 0)
    found = gptq(weight_OI, hessian_II, grid, PLAIN)
    damped = hessian_II.double()
    damped.diagonal().add_(PLAIN.damping * hessian_II.diagonal().mean().double())
    work, scale_O = weight_OI.double(), found.scales.scale_OG[:, 0].double()
    for column in range(24):
        inverse = torch.linalg.inv(damped[column:, column:])
        codes_O = (work[:, column] / scale_O).round().clamp(grid.low, grid.high)
        assert torch.equal(codes_O.to(torch.int8), found.codes_OI[:, column]), column
        error_O = work[:, column] - codes_O * scale_O
        work[:, column:] -= torch.outer(error_O, inverse[0] / inverse[0, 0])


def test_scales_of_groups_stay_where_the_columns_are() -> None:
    """With act-order too, group g of a row has the scale of columns g * size and after."""
    weight_OI, grid = noise(4, 64), Grid(4, 16)
    weight_OI[:, 16:32] *= 100
    scale_OG = gptq(weight_OI, correlated(64), grid).scales.scale_OG
    assert scale_OG.argmax(1).tolist() == [1] * 4


def test_a_singular_hessian_is_damped() -> None:
    x_T1 = noise(100, 1)
    hessian_II = 2 * (x_T1 @ noise(1, 32)).T @ (x_T1 @ noise(1, 32)) / 100
    found = gptq(noise(4, 32), hessian_II, Grid(4, 8), GptqSettings(damping=1e-9))
    assert bool(torch.isfinite(found.dequantize()).all())


def test_a_hessian_with_nan_is_refused() -> None:
    with pytest.raises(ConfigError, match="infinite or NaN"):
        gptq(noise(4, 8), torch.full((8, 8), float("nan")), Grid(4, 8), PLAIN)
