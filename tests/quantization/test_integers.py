"""int8 and int4: what is kept, how far off it is, and that native and portable weights are one."""

from __future__ import annotations

import pytest
import torch

from ridgeline.errors import ConfigError
from ridgeline.formats import WEIGHT_FORMATS
from ridgeline.kernels.cpu import native
from ridgeline.kernels.quantized_matrix import QuantizedMatrix
from ridgeline.quantization import Fusion, Parameters, integers, open_weight_format
from ridgeline.quantization.integers import IntegerWeights, SpanRounding

CPU = torch.device("cpu")
NAMES = (
    "int8",
    "int8-outliers",
    "int4",
    "int4-all",
    "int4-g64",
    "int4-g32",
    "int4-asym",
    "int4-g64-asym",
    "int4-g32-asym",
)
needs_library = pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")


def opened(name: str) -> IntegerWeights:
    weights = open_weight_format(name)
    assert isinstance(weights, IntegerWeights)
    return weights


def portable(weights: IntegerWeights, weight: torch.Tensor) -> Parameters:
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
    weight[5] += 3  # of one sign
    weight[6] *= 1e-39  # scales are no normal numbers
    return weight.bfloat16()


def same(one: QuantizedMatrix, other: QuantizedMatrix) -> bool:
    zeros = one.zero is None and other.zero is None
    if one.zero is not None and other.zero is not None:
        zeros = torch.equal(one.zero, other.zero)
    return zeros and torch.equal(one.codes, other.codes) and torch.equal(one.scale, other.scale)


@needs_library
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(32, 288), (48, 8), (64, 1024), (16, 200)])
def test_panels_hold_the_same_numbers(name: str, shape: tuple[int, int]) -> None:
    weights, weight = opened(name), random_weight(*shape, seed=5)
    for dtype in (torch.bfloat16, torch.float32):
        packed = weights.finish({"weight": weight.to(dtype)})
        assert "panels" in packed
        kept = portable(weights, weight)
        assert "codes" in kept
        assert same(weights.matrix(packed), weights.matrix(kept))
        assert torch.equal(weights.dequantize(packed), weights.dequantize(kept))
        every = torch.arange(shape[0])
        rows = weights.rows(packed, every, torch.float32)
        assert torch.equal(rows, weights.dequantize(kept))


@pytest.mark.parametrize("name", NAMES)
def test_how_far_off(name: str) -> None:
    """Half a scale; symmetric, a whole one at the opposite end, and asymmetric a little more than
    half of one at an end, because zero points and scales are rounded too."""
    weights, weight = opened(name), random_weight(24, 300, seed=6).float()
    kept = portable(weights, weight)
    matrix, off = weights.matrix(kept), (weights.dequantize(kept) - weight).abs()
    group = matrix.group or 300
    scale_OI = matrix.scale.float().abs().repeat_interleave(group, 1)[:, :300]
    is_span = isinstance(weights.rounding, SpanRounding)
    steps = 0.5 if weights.bits == 8 else 0.6 if is_span else 1.04
    normal = torch.arange(24) != 6  # numbers that scales in bfloat16 hold
    assert (off[normal] <= steps * scale_OI[normal] * 1.001).all()
    assert off[3].max() == 0
    assert off[6].max() < 1e-38
    typical = (off[:3].square().mean() / weight[:3].square().mean()).sqrt()
    assert 0 < typical < (0.02 if weights.bits == 8 else 0.15)


def test_smaller_groups_are_nearer_and_so_are_zero_points() -> None:
    weight = random_weight(64, 512, seed=9)[8:]
    weight = weight + 0.5
    far = {
        name: float((opened(name).dequantize(portable(opened(name), weight)) - weight).norm())
        for name in NAMES
    }
    assert far["int8"] < far["int4-g32"] < far["int4-g64"] < far["int4"]
    for name in ("int4", "int4-g64", "int4-g32"):
        assert far[f"{name}-asym"] < far[name]


@needs_library
@pytest.mark.parametrize("name", NAMES)
def test_native_products_are_those_of_the_weights(name: str) -> None:
    """But for the rounding of x to 8 bits: half a step of 127 of a row's or group's largest."""
    weights, weight = opened(name), random_weight(64, 256, seed=7)
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_native", [False, True])
def test_bytes_are_those_of_the_table(name: str, is_native: bool) -> None:
    weights, line = opened(name), WEIGHT_FORMATS[name]
    weight = torch.ones(64, 512)
    kept = weights.finish({"weight": weight}) if is_native else portable(weights, weight)
    taken = sum(tensor.nbytes for tensor in kept.values())
    assert taken == 64 * 512 * line.bits_per_weight(4) / 8 + 64 * line.row_bytes
    assert taken == weights.matrix(kept).nbytes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("outputs", [16, 17])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_damaged_weights_are_refused(name: str, outputs: int, broken: float) -> None:
    weight = torch.ones(outputs, 128)
    weight[2, 5] = broken
    with pytest.raises(
        ConfigError, match=f"{outputs} x 128 weights to {name}: .* repair the check"
    ):
        open_weight_format(name).finish({"weight": weight})


@pytest.mark.parametrize("name", ["int8", "int4", "int4-g32-asym"])
def test_rounding_goes_by_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, weight = opened(name), random_weight(37, 64, seed=10)
    whole = weights.matrix(weights.finish({"weight": weight}))
    monkeypatch.setattr(integers, "PIECE_NUMBERS", 5 * 64)
    assert same(weights.matrix(weights.finish({"weight": weight})), whole)


@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_that_is_quantized_is_kept_as_it_is(name: str) -> None:
    weights = opened(name)
    for outputs in (32, 33):
        first = weights.finish({"weight": random_weight(outputs, 256, seed=11)})
        again = weights.keep(weights.matrix(first), torch.bfloat16)
        assert again.keys() == first.keys()
        assert all(torch.equal(again[key], first[key]) for key in first)


@needs_library
@pytest.mark.parametrize("name", NAMES)
def test_deterministic_rows_are_the_same_in_any_company(name: str) -> None:
    weights = open_weight_format(name, deterministic=True)
    kept = weights.finish({"weight": random_weight(48, 256, seed=12)})
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(12)) * 3
    together = weights.linear(x, kept, None)
    for begin, end in ((0, 1), (3, 5), (10, 26)):
        assert torch.equal(weights.linear(x[begin:end], kept, None), together[begin:end])


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
