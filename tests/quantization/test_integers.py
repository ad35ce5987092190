"""int8 and int4: what is kept, how far off it is, and that native and portable weights are one."""

from __future__ import annotations

import pytest
import torch

from ridgeline.errors import ConfigError
from ridgeline.formats import WEIGHT_FORMATS
from ridgeline.kernels.cpu import native
from ridgeline.quantization import Fusion, Parameters, open_weight_format
from ridgeline.quantization.int4 import Int4Weights
from ridgeline.quantization.int8 import Int8Weights

CPU = torch.device("cpu")
FORMATS = (Int8Weights(), Int4Weights())
needs_library = pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")


def portable(weights: Int8Weights | Int4Weights, weight: torch.Tensor) -> Parameters:
    """As on a device without the native kernels."""
    if native.library() is None:
        return weights.finish({"weight": weight.clone()})
    with native.at_level("none"):
        return weights.finish({"weight": weight.clone()})


def random_weight(outputs: int, inputs: int, seed: int) -> torch.Tensor:
    print("seed", seed)
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    weight[3] = 0
    weight[:, inputs // 2] *= 4
    return weight.bfloat16()


@needs_library
@pytest.mark.parametrize("weights", FORMATS, ids=lambda weights: weights.name)
@pytest.mark.parametrize("shape", [(32, 288), (48, 8), (64, 1024), (16, 200)])
def test_panels_hold_the_same_numbers(
    weights: Int8Weights | Int4Weights, shape: tuple[int, int]
) -> None:
    weight = random_weight(*shape, seed=5)
    for dtype in (torch.bfloat16, torch.float32):
        packed = weights.finish({"weight": weight.to(dtype)})
        assert "panels" in packed
        kept = portable(weights, weight)
        assert "codes" in kept
        assert torch.equal(weights.dequantize(packed), weights.dequantize(kept))


@pytest.mark.parametrize(("weights", "steps"), [(FORMATS[0], 0.5), (FORMATS[1], 1.0)])
def test_how_far_off(weights: Int8Weights | Int4Weights, steps: float) -> None:
    weight = random_weight(24, 300, seed=6).float()
    apart = (weights.dequantize(portable(weights, weight)) - weight).abs()
    largest = weight.abs().amax(1, keepdim=True) / (127 if weights.bits == 8 else 8)
    assert (apart <= steps * largest * 1.01).all()
    assert apart[3].max() == 0
    typical = (apart.square().mean() / weight.square().mean()).sqrt()
    assert typical < (0.02 if weights.bits == 8 else 0.15)


@needs_library
@pytest.mark.parametrize("weights", FORMATS, ids=lambda weights: weights.name)
def test_native_products_are_those_of_the_weights(weights: Int8Weights | Int4Weights) -> None:
    """But for the rounding of x to 8 bits: half a step of 127 of a row's or group's largest."""
    weight = random_weight(64, 256, seed=7)
    kept = weights.finish({"weight": weight})
    noise = torch.Generator().manual_seed(7)
    for rows in (1, 5, 33):
        x = torch.randn(rows, 256, generator=noise)
        bias = torch.randn(64, generator=noise)
        exact = x @ weights.dequantize(kept).T + bias
        got = weights.linear(x, kept, bias)
        assert (got - exact).square().mean() < 0.012**2 * exact.square().mean()
        gated = weights.fused(x, kept, bias, Fusion(is_gated=True))
        assert gated is not None
        wanted = torch.nn.functional.silu(got[:, :32]) * got[:, 32:]
        torch.testing.assert_close(gated, wanted, rtol=1e-4, atol=1e-4)
        hidden = torch.ones(rows, 64)
        added = weights.fused(x, kept, None, Fusion(residual_TO=hidden))
        assert added is hidden
        torch.testing.assert_close(hidden, weights.linear(x, kept, None) + 1)
        assert weights.fused(x, kept, None, Fusion(of_gated=True)) is None


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_bytes_are_those_of_the_table(name: str) -> None:
    weights, line = open_weight_format(name), WEIGHT_FORMATS[name]
    kept = weights.finish({"weight": torch.ones(64, 512)})
    taken = sum(tensor.nbytes for tensor in kept.values())
    assert taken == 64 * 512 * line.bits_per_weight(4) / 8 + 64 * line.row_bytes


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("outputs", [16, 17])
def test_damaged_weights_are_refused(name: str, outputs: int) -> None:
    weight = torch.ones(outputs, 128)
    weight[2, 5] = torch.nan
    with pytest.raises(
        ConfigError, match=f"{outputs} x 128 weights to {name}: .* repair the check"
    ):
        open_weight_format(name).finish({"weight": weight})


@needs_library
def test_plain_bfloat16_is_packed_in_its_own_memory() -> None:
    weights = open_weight_format("plain")
    weight = random_weight(32, 64, seed=8)
    before = weight.clone()
    kept = weights.finish({"weight": weight})
    assert kept["panels"].data_ptr() == weight.data_ptr()
    assert torch.equal(weights.dequantize(kept), before)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(8)).bfloat16()
    exact = x.double() @ before.double().T
    torch.testing.assert_close(weights.linear(x, kept, None).double(), exact, rtol=8e-3, atol=1e-3)
    alone = open_weight_format("plain", deterministic=True)
    assert "weight" in alone.finish({"weight": before})
