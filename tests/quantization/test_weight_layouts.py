"""The first layout that takes an integer matrix keeps it exactly, and all multiply alike."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch

from ridgeline.errors import InternalError
from ridgeline.kernels.cpu import native
from ridgeline.kernels.quantized_matrix import QuantizedMatrix, WeightLayout, join_bytes
from ridgeline.quantization import Fusion, Parameters, open_vocabulary_format, open_weight_format
from ridgeline.quantization.integers import IntegerWeights, int8
from ridgeline.quantization.weight_layouts import LAYOUTS, Layouts, PortableLayout

needs_library = pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")
SCALES = (torch.bfloat16, torch.float16, torch.float32)
KINDS = (
    (4, 128, False),
    (4, 64, True),
    (4, 32, False),
    (4, 32, True),
    (4, 0, False),
    (4, 20, True),
    (8, 0, False),
    (8, 0, True),
    (8, 32, False),
    (8, 128, True),
)


def without_library() -> AbstractContextManager[None]:
    return nullcontext() if native.library() is None else native.at_level("none")


def any_matrix(
    outputs: int,
    inputs: int,
    bits: int,
    group: int,
    *,
    has_zero: bool,
    scale_dtype: torch.dtype,
    seed: int = 0,
) -> QuantizedMatrix:
    noise = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group) if group else 1
    codes_OI = torch.randint(0, 1 << bits, (outputs, inputs), generator=noise, dtype=torch.uint8)
    scale = torch.rand(outputs, groups, generator=noise).add_(0.5).to(scale_dtype)
    top = 17 if bits == 4 else 256
    zero = torch.randint(0, top, (outputs, groups), generator=noise, dtype=torch.uint8)
    codes = join_bytes(codes_OI, bits)
    return QuantizedMatrix(codes, scale, zero if has_zero else None, inputs, bits, group)


def same(one: QuantizedMatrix, other: QuantizedMatrix) -> bool:
    if (one.zero is None) != (other.zero is None):
        return False
    zeros = (one.zero, other.zero) if one.zero is not None and other.zero is not None else ()
    return (
        (one.inputs, one.bits, one.group) == (other.inputs, other.bits, other.group)
        and one.scale.dtype == other.scale.dtype
        and torch.equal(one.codes, other.codes)
        and torch.equal(one.scale, other.scale)
        and (not zeros or torch.equal(*zeros))
    )


@pytest.mark.parametrize("scale_dtype", SCALES)
@pytest.mark.parametrize(("bits", "group", "has_zero"), KINDS)
@pytest.mark.parametrize("is_native", [False, True])
def test_a_matrix_comes_back_as_it_was_and_takes_no_more(
    is_native: bool, bits: int, group: int, has_zero: bool, scale_dtype: torch.dtype
) -> None:
    for outputs, inputs in ((32, 320), (17, 120)):
        matrix = any_matrix(
            outputs, inputs, bits, group, has_zero=has_zero, scale_dtype=scale_dtype
        )
        with nullcontext() if is_native else without_library():
            kept = Layouts(LAYOUTS).keep(matrix, torch.bfloat16)
            layout = Layouts(LAYOUTS).of(kept)
            assert same(layout.matrix(kept), matrix)
            assert sum(tensor.nbytes for tensor in kept.values()) == matrix.nbytes


@needs_library
def test_who_takes_what() -> None:
    layouts = Layouts(LAYOUTS)
    usual = any_matrix(32, 256, 4, 128, has_zero=False, scale_dtype=torch.float16)
    assert layouts.choose(usual, torch.bfloat16) == "panels"
    assert layouts.choose(usual, torch.float16) == "portable"  # rows that the kernels do not read
    assert layouts.choose(usual.part(0, 17), torch.bfloat16) == "portable"  # a panel is not full
    whole_rows = any_matrix(32, 256, 4, 0, has_zero=False, scale_dtype=torch.float16)
    assert layouts.choose(whole_rows, torch.bfloat16) == "portable"
    for bits, group, has_zero in ((4, 32, True), (8, 32, False), (8, 0, False)):
        taken = any_matrix(32, 256, bits, group, has_zero=has_zero, scale_dtype=torch.bfloat16)
        assert layouts.choose(taken, torch.float32) == "panels"
    moved = any_matrix(32, 256, 8, 32, has_zero=True, scale_dtype=torch.bfloat16)
    assert layouts.choose(moved, torch.float32) == "portable"
    with without_library():
        assert layouts.choose(usual, torch.bfloat16) == "portable"


@pytest.mark.parametrize("scale_dtype", SCALES)
@pytest.mark.parametrize(("bits", "group", "has_zero"), KINDS)
def test_products_are_those_of_the_weights(
    bits: int, group: int, has_zero: bool, scale_dtype: torch.dtype
) -> None:
    """But for the rounding of x to 8 bits in panels: half a step of 127 of the largest of a row or
    group, which is under a hundredth of the length of x in the mean."""
    matrix = any_matrix(64, 320, bits, group, has_zero=has_zero, scale_dtype=scale_dtype)
    weight = matrix.dequantize()
    kept = Layouts(LAYOUTS).keep(matrix, torch.float32)
    layout = Layouts(LAYOUTS).of(kept)
    noise = torch.Generator().manual_seed(1)
    for rows in (1, 5, 33):
        x, bias = (torch.randn(rows, 320, generator=noise), torch.randn(64, generator=noise))
        size = x.norm(dim=1)[:, None] * weight.norm(dim=1)[None]
        wanted = x @ weight.T + bias
        got = layout.linear(x, kept, bias)
        slack = 1e-6 if isinstance(layout, PortableLayout) else 0.005
        assert ((got - wanted).abs() / size).max() < slack
        gated = layout.fused(x, kept, bias, Fusion(is_gated=True))
        if gated is not None:
            plain = torch.nn.functional.silu(got[:, :32]) * got[:, 32:]
            torch.testing.assert_close(gated, plain, rtol=1e-4, atol=1e-3)
        assert layout.looks_up
        into = torch.empty(rows, 50)
        assert layout.linear_into(x, kept, into) is into
        assert torch.allclose(into, layout.linear(x, kept, None)[:, :50], rtol=1e-5, atol=1e-3)
    assert layout.looks_up
    named = torch.tensor([5, 63, 5])
    assert torch.equal(layout.rows(kept, named, torch.float32), weight[named])


def test_a_mark_says_who_kept_what() -> None:
    matrix = any_matrix(17, 64, 8, 0, has_zero=False, scale_dtype=torch.float32)
    kept = Layouts(LAYOUTS).keep(matrix, torch.float32)
    assert isinstance(Layouts(LAYOUTS).of(kept), PortableLayout)
    del kept["home:portable"]
    with pytest.raises(InternalError, match=r"no layout of panels.*portable kept codes"):
        Layouts(LAYOUTS).of(kept)


class Shelf(PortableLayout):
    """A layout from outside."""

    kept = 0

    def takes(self, like: QuantizedMatrix, dtype: torch.dtype) -> bool:
        return like.bits == 8 and like.inputs % 64 == 0

    def keep(self, matrix: QuantizedMatrix) -> Parameters:
        Shelf.kept += 1
        return super().keep(matrix)


class LooselyShelf(WeightLayout):
    """The same by what a layout must have alone, without look-ups."""

    def __init__(self) -> None:
        self.shelf = Shelf()

    def takes(self, like: QuantizedMatrix, dtype: torch.dtype) -> bool:
        return self.shelf.takes(like, dtype)

    def keep(self, matrix: QuantizedMatrix) -> Parameters:
        return self.shelf.keep(matrix)

    def matrix(self, parameters: Parameters) -> QuantizedMatrix:
        return self.shelf.matrix(parameters)

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return self.shelf.linear(x_TI, parameters, bias_O)


def test_a_new_home_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    where = f"{__name__}:LooselyShelf"
    table = {"shelf": where, **LAYOUTS}
    weights = int8()
    weights.layouts = replace(weights.layouts, table=table)
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    before = Shelf.kept
    kept = weights.finish({"weight": weight})
    assert Shelf.kept == before + 1
    assert "home:shelf" in kept
    plain = int8()
    with without_library():
        other = plain.finish({"weight": weight})
    assert same(weights.matrix(kept), plain.matrix(other))
    named = torch.tensor([3, 1])
    assert torch.equal(weights.rows(kept, named, torch.float32), weights.dequantize(kept)[named])
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(4))
    into = torch.empty(2, 31)
    weights.linear_into(x, kept, into)
    assert torch.equal(into, weights.linear(x, kept, None)[:, :31])
    vocabulary = weights.of_vocabulary()
    vocabulary.layouts = replace(vocabulary.layouts, table=table)
    assert "home:shelf" not in vocabulary.finish({"weight": weight})


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_vocabularies_live_where_rows_are_looked_up(name: str) -> None:
    vocabulary = open_vocabulary_format(name)
    assert isinstance(vocabulary, IntegerWeights)
    assert vocabulary.layouts.looks_up
    layers = open_weight_format(name)
    assert isinstance(layers, IntegerWeights)
    assert not layers.layouts.looks_up
