"""AWQ: scales and spans that never make outputs worse, and help where few inputs are large."""

from __future__ import annotations

import pytest
import torch

from ridgeline.quantization.algorithms.awq import clip_and_round, output_error, search_scales
from ridgeline.quantization.algorithms.grid import Grid, round_to_nearest
from tests.quantization.algorithms.test_gptq import correlated, noise


def test_the_error_is_that_of_the_outputs() -> None:
    x_TI, delta_OI = noise(50, 12), noise(3, 12, seed=1)
    hessian_II = 2 * x_TI.T @ x_TI / 50
    direct = float((x_TI @ delta_OI.T).square().sum(1).mean())
    assert output_error(delta_OI, hessian_II) == pytest.approx(direct, rel=1e-4)


def salient() -> tuple[torch.Tensor, torch.Tensor]:
    """(Hessian, mean magnitudes) of inputs of which 3 of 64 are fifty times the others."""
    size_I = torch.ones(64)
    size_I[[5, 20, 41]] = 50.0
    x_TI = noise(400, 64) * size_I
    return 2 * x_TI.T @ x_TI / 400, x_TI.abs().mean(0)


@pytest.mark.parametrize("symmetric", [True, False])
def test_large_inputs_get_finer_steps(symmetric: bool) -> None:
    hessian_II, magnitude_I = salient()
    weights, grid = [noise(32, 64), noise(16, 64, seed=1)], Grid(4, 32, symmetric)
    scale_I = search_scales(weights, hessian_II, magnitude_I, grid)
    assert float(scale_I[5]) > 2 * float(scale_I[6])

    def error(scale_I: torch.Tensor) -> float:
        return sum(
            output_error(w - round_to_nearest(w * scale_I, grid).dequantize() / scale_I, hessian_II)
            for w in weights
        )

    assert error(scale_I) < 0.5 * error(torch.ones(64))


def test_inputs_that_must_share_a_factor_do() -> None:
    hessian_II, magnitude_I = salient()

    def share(values_I: torch.Tensor) -> torch.Tensor:
        return values_I.view(2, 32).mean(0).repeat(2)

    scale_I = search_scales([noise(8, 64)], hessian_II, magnitude_I, Grid(4, 32), share=share)
    assert torch.equal(scale_I[:32], scale_I[32:])
    assert not torch.equal(scale_I, torch.ones(64))


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("group", [0, 16])
def test_cut_spans_make_no_output_of_a_group_worse(group: int, bits: int) -> None:
    weight_OI, hessian_II, grid = noise(24, 64).pow(3), correlated(64), Grid(bits, group)
    found = clip_and_round(weight_OI, hessian_II, grid)
    size = group or 64
    for begin in range(0, 64, size):
        part = slice(begin, begin + size)
        block_II = hessian_II[part, part]
        cut = (weight_OI - found.dequantize())[:, part]
        whole = (weight_OI - round_to_nearest(weight_OI, grid).dequantize())[:, part]
        for row in range(24):
            limit = output_error(whole[row : row + 1], block_II)
            assert output_error(cut[row : row + 1], block_II) <= limit * (1 + 1e-4) + 1e-9
