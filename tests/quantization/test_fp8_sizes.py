"""e4m3 with a scale for the whole matrix and for blocks of it: how far off, and how large."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ridgeline.errors import ConfigError, InternalError
from ridgeline.formats import WEIGHT_FORMATS
from ridgeline.kernels import fp8_block_linear
from ridgeline.kernels.quantize_rows import E4M3
from ridgeline.quantization import Parameters, WeightFormat, open_weight_format
from ridgeline.quantization.fp8 import Fp8BlockWeights

NAMES = ("fp8-tensor", "fp8-block")
SHAPES = ((24, 40), (128, 256), (300, 200), (1, 129))


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scales(kept: Parameters, outputs: int, inputs: int) -> torch.Tensor:
    """One for each weight."""
    scale = kept["scale"]
    if scale.dim() == 1:
        return scale[:, None].expand(outputs, inputs)
    return scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:outputs, :inputs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_weight_is_off_by_a_sixteenth_at_most(
    name: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = (noise(*shape) * 10.0 ** noise(shape[0], 1, seed=1)).to(dtype)
    weights = open_weight_format(name)
    kept = weights.finish({"weight": weight})
    assert kept["codes"].dtype == E4M3
    assert kept["codes"].float().abs().max() == 448
    off = (weights.dequantize(kept) - weight.float()).abs()
    bound = torch.maximum(weight.float().abs() / 16, 2.0**-10 * scales(kept, *shape))
    assert bool((off <= 1.0001 * bound).all())


def test_one_scale_for_all() -> None:
    weight = noise(20, 32)
    kept = open_weight_format("fp8-tensor").finish({"weight": weight})
    assert torch.equal(kept["scale"], (weight.abs().max() / 448).expand(20))


def test_blocks_do_not_share_scales() -> None:
    weight = torch.ones(130, 260)
    weight[:128, 128:256], weight[128:, 256:] = 100.0, 0.01
    kept = open_weight_format("fp8-block").finish({"weight": weight})
    largest = torch.tensor([[1.0, 100.0, 1.0], [1.0, 1.0, 0.01]])
    torch.testing.assert_close(kept["scale"], largest / 448)
    torch.testing.assert_close(open_weight_format("fp8-block").dequantize(kept), weight)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_are_safe(name: str) -> None:
    weights = open_weight_format(name)
    kept = weights.finish({"weight": torch.zeros(140, 16)})
    assert bool((kept["scale"] > 0).all())
    assert weights.dequantize(kept).abs().max() == 0
    assert bool(weights.linear(noise(3, 16), kept, None).isfinite().all())


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", NAMES)
def test_weights_that_are_not_finite_are_refused(name: str, broken: float) -> None:
    weight = noise(140, 16)
    weight[133, 5] = broken
    with pytest.raises(ConfigError, match=f"140 x 16 weights to {name}: row 133 .1 rows in all"):
        open_weight_format(name).finish({"weight": weight})


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_of_the_weights(
    name: str, shape: tuple[int, int], deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_block_linear, "PIECE_NUMBERS", 1)  # blocks of rows one after the other
    weights = open_weight_format(name, deterministic=deterministic)
    kept = weights.finish({"weight": noise(*shape, seed=2)})
    bias, weight = noise(shape[0], seed=3), weights.dequantize(kept)
    for rows in (0, 1, 7):
        x = noise(rows, shape[1], seed=4)
        for addend in (None, bias):
            wanted = x @ weight.T + (0 if addend is None else addend)
            torch.testing.assert_close(weights.linear(x, kept, addend), wanted)


def counted(name: str) -> Callable[[int, int], int]:
    line = WEIGHT_FORMATS[name]

    def count(outputs: int, inputs: int) -> int:
        groups = -(-inputs // line.group) if line.group else 0
        blocks = -(-outputs // line.group_rows)
        return outputs * (inputs + line.row_bytes) + blocks * groups * line.scale_bytes

    return count


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_table(name: str, shape: tuple[int, int]) -> None:
    kept = open_weight_format(name).finish({"weight": noise(*shape)})
    assert sum(tensor.nbytes for tensor in kept.values()) == counted(name)(*shape)


def test_blocks_that_are_given_are_kept() -> None:
    weights: WeightFormat = Fp8BlockWeights()
    assert isinstance(weights, Fp8BlockWeights)
    first = weights.finish({"weight": noise(200, 130)})
    again = weights.keep(first["codes"], first["scale"])
    assert torch.equal(weights.dequantize(again), weights.dequantize(first))
    with pytest.raises(InternalError, match="blocks of e4m3"):
        weights.keep(first["codes"], first["scale"][:1])
    with pytest.raises(InternalError, match="blocks of e4m3"):
        weights.keep(noise(200, 130), first["scale"])
