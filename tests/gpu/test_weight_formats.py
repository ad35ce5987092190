"""Every weight format on a GPU: what is kept, and products that are those of the kept weights."""

from __future__ import annotations

import pytest
import torch

from ridgeline.formats import WEIGHT_FORMATS, served
from ridgeline.kernels.quantized_matrix import QuantizedMatrix, join_bytes
from ridgeline.quantization import open_vocabulary_format, open_weight_format
from ridgeline.quantization.integers import IntegerWeights
from ridgeline.quantization.weight_layouts import LAYOUTS, Layouts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = [name for name in served(WEIGHT_FORMATS) if WEIGHT_FORMATS[name].bits is not None]
ROWS = (1, 3, 8, 33, 64, 300)
SHAPES = ((256, 1024), (512, 512), (272, 320), (17, 48))
KINDS = (
    (4, 128, False),
    (4, 32, True),
    (4, 64, False),
    (4, 0, False),
    (8, 0, False),
    (8, 32, False),
)
ROUNDED = 0.04  # of the length of y: rows of x in e4m3 or 8 bits


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_products_and_bytes(name: str, dtype: torch.dtype, deterministic: bool) -> None:
    line = WEIGHT_FORMATS[name]
    weights = open_weight_format(name, deterministic=deterministic)
    for outputs, inputs in SHAPES:
        weight = noise(outputs, inputs, seed=1).cuda().to(dtype)
        kept = weights.finish({"weight": weight})
        groups = -(-inputs // line.group) if line.group else 0
        blocks = -(-outputs // line.group_rows)
        counted = outputs * (inputs * (line.bits or 0) // 8 + line.row_bytes)
        counted += blocks * groups * line.scale_bytes
        assert sum(tensor.nbytes for tensor in kept.values()) == counted, (outputs, inputs)
        exact_weight = weights.dequantize(kept).double()
        bias = noise(outputs, seed=2).cuda().to(dtype)
        for rows in ROWS:
            x = noise(rows, inputs, seed=3).cuda().to(dtype)
            exact = x.double() @ exact_weight.T + bias.double()
            got = weights.linear(x, kept, bias)
            assert got.dtype == dtype
            off = (got.double() - exact).norm() / exact.norm()
            assert off < ROUNDED, (outputs, inputs, rows, float(off))


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("bits", "group", "has_zero"), KINDS)
def test_a_matrix_comes_back_as_it_was(
    bits: int, group: int, has_zero: bool, scale_dtype: torch.dtype
) -> None:
    source = torch.Generator().manual_seed(4)
    for outputs, inputs in SHAPES:
        groups = -(-inputs // group) if group else 1
        codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=source, dtype=torch.uint8)
        scale = torch.rand(outputs, groups, generator=source).add_(0.5).to(scale_dtype)
        zero = torch.randint(0, 16, (outputs, groups), generator=source, dtype=torch.uint8)
        matrix = QuantizedMatrix(
            join_bytes(codes, bits).cuda(),
            scale.cuda(),
            zero.cuda() if has_zero else None,
            inputs,
            bits,
            group,
        )
        kept = Layouts(LAYOUTS).keep(matrix, torch.bfloat16)
        back = Layouts(LAYOUTS).of(kept).matrix(kept)
        assert torch.equal(back.codes, matrix.codes)
        assert torch.equal(back.scale, matrix.scale)
        assert back.scale.dtype == scale_dtype
        assert (back.zero is None) != has_zero
        if back.zero is not None and matrix.zero is not None:
            assert torch.equal(back.zero, matrix.zero)
        taken = sum(tensor.nbytes for tensor in kept.values())
        assert taken == matrix.nbytes, (outputs, inputs)


@pytest.mark.parametrize("name", ["int8", "int4", "int4-g32-asym", "int8-outliers"])
def test_a_gpu_rounds_as_a_cpu_does(name: str) -> None:
    weights = open_weight_format(name)
    assert isinstance(weights, IntegerWeights)
    weight = noise(256, 1024, seed=5).bfloat16()
    here = weights.matrix(weights.finish({"weight": weight.cuda()}))
    there = weights.matrix(weights.finish({"weight": weight}))
    assert torch.equal(here.codes.cpu(), there.codes)
    assert torch.equal(here.scale.cpu(), there.scale)


@pytest.mark.parametrize("name", NAMES)
def test_vocabularies_are_looked_into(name: str) -> None:
    vocabulary = open_vocabulary_format(name)
    weight = noise(272, 512, seed=6).cuda().bfloat16()
    kept = vocabulary.finish({"weight": weight})
    exact = vocabulary.dequantize(kept)
    named = torch.tensor([5, 271, 5]).cuda()
    found = vocabulary.rows(kept, named, torch.bfloat16)
    assert torch.equal(found, exact[named].bfloat16())
    x = noise(7, 512, seed=7).cuda().bfloat16()
    into = torch.empty(7, 261, device="cuda")
    vocabulary.linear_into(x, kept, into)
    wanted = x.double() @ exact[:261].double().T
    assert (into.double() - wanted).norm() / wanted.norm() < ROUNDED
