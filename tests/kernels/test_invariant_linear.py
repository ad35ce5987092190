"""Rows of an invariant product are the same bits in any batch, and near the reference.

Without a GPU the kernel runs through Triton's interpreter, in float32 and float16 and small shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ridgeline.errors import InternalError
from ridgeline.kernels.fp8_linear import Fp8Matrix
from ridgeline.kernels.invariant_linear import (
    InvariantTile,
    invariant_fp8_linear,
    invariant_linear,
    invariant_linear_reference,
    invariant_tile,
)
from ridgeline.kernels.quantize_rows import QuantizedRows, quantize_rows_reference
from tests.kernels.references import fp8_linear_reference, invariant_fp8_reference

if TYPE_CHECKING:
    from ridgeline.kernels import invariant_linear_triton as ours
else:
    ours = pytest.importorskip("ridgeline.kernels.invariant_linear_triton")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ROWS = (1, 2, 3, 17, 64, 65, 130)
BOUND = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the largest number
DTYPES = list(BOUND) if CUDA else list(BOUND)[:2]
SHAPES = [(64, 64), (37, 100), (130, 150)]  # outputs, inputs
TILES = {
    "as served": None,
    "small": InvariantTile(32, 32, 32, stages=2),
    "wide": InvariantTile(64, 128, 64, stages=2),
}
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, dtype)


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    apart = float((got.double() - want.double()).abs().max())
    assert apart <= BOUND[dtype] * max(1.0, float(want.abs().max()))


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit; -0.0 is not 0.0."""
    kind = torch.int32 if one.dtype == torch.float32 else torch.int16
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


@pytest.mark.every_pair
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("named", list(TILES))
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_rows_are_the_same_in_any_company(
    outputs: int, inputs: int, named: str, dtype: torch.dtype
) -> None:
    weight = noise(outputs, inputs, seed=7, dtype=dtype) / inputs**0.5
    bias = noise(outputs, seed=8, dtype=dtype)
    tile = TILES[named] or invariant_tile(outputs, dtype)
    every = noise(max(ROWS), inputs, dtype=dtype)
    whole = ours.invariant_linear_triton(every, weight, tile=tile, bias_N=bias)
    assert_near(whole, invariant_linear_reference(every, weight, bias_N=bias), dtype)
    for rows in ROWS:
        first = ours.invariant_linear_triton(every[:rows], weight, tile=tile, bias_N=bias)
        assert equal(first, whole[:rows])
        last = ours.invariant_linear_triton(every[-rows:], weight, tile=tile, bias_N=bias)
        assert equal(last, whole[-rows:]), "the place of a row in its tile matters"


def test_many_tiles_of_rows_are_all_answered() -> None:
    weight, x = noise(37, 32, seed=7), noise(16 * 17 + 5, 32)
    got = ours.invariant_linear_triton(x, weight, tile=InvariantTile(16, 16, 32, stages=2))
    assert_near(got, invariant_linear_reference(x, weight), torch.float32)


# NumPy, which the interpreter computes with, warns where a GPU gives NaN.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_beside_a_row_does_not_matter(dtype: torch.dtype) -> None:
    """Nor how the rows lie in memory: NaN and infinity beside it, and gaps between rows."""
    weight, x = noise(40, 72, seed=7, dtype=dtype), noise(5, 72, dtype=dtype)
    tile = invariant_tile(40, dtype)
    alone = ours.invariant_linear_triton(x[2:3], weight, tile=tile)
    wide = x.new_full((5, 79), torch.nan)
    wide[:, 3:-4] = x
    wide[0, 3:-4], wide[4, 3:-4] = torch.inf, torch.nan
    strided = wide[:, 3:-4]
    assert not strided.is_contiguous()
    got = ours.invariant_linear_triton(strided, weight, tile=tile)
    assert equal(got[2:3], alone)
    assert bool(got[4].isnan().all())


def test_into_columns_of_a_larger_matrix() -> None:
    weight, x = noise(24, 40, seed=7), noise(9, 40)
    out = torch.full((9, 30), torch.nan, device=DEVICE)
    got = ours.invariant_linear_triton(
        x, weight, tile=invariant_tile(24, x.dtype), out_MN=out[:, 6:]
    )
    assert got.data_ptr() == out[:, 6:].data_ptr()
    assert bool(out[:, :6].isnan().all())
    assert_near(out[:, 6:], invariant_linear_reference(x, weight), torch.float32)


def test_no_rows_and_wrong_shapes() -> None:
    weight, tile = noise(24, 40, seed=7), invariant_tile(24, torch.float32)
    assert ours.invariant_linear_triton(noise(0, 40), weight, tile=tile).shape == (0, 24)
    with pytest.raises(InternalError, match="same inputs"):
        ours.invariant_linear_triton(noise(3, 41), weight, tile=tile)
    with pytest.raises(InternalError, match="one dtype"):
        ours.invariant_linear_triton(noise(3, 40).half(), weight, tile=tile)


def test_the_tile_does_not_know_the_rows() -> None:
    assert invariant_tile(4096, torch.bfloat16).block_n == 64
    assert invariant_tile(28672, torch.bfloat16).block_n == 128
    assert invariant_tile(4096, torch.float8_e4m3fn).block_k == 128
    assert invariant_tile(28672, torch.float32) == InvariantTile(block_k=32, stages=2)


# ---------------------------------------------------------------------- e4m3


def matrix(outputs: int, inputs: int) -> Fp8Matrix:
    rows = quantize_rows_reference(noise(outputs, inputs, seed=7) / inputs**0.5)
    return Fp8Matrix(rows.codes_MK, rows.scale_M)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (48, 160)])
def test_rounded_rows_are_the_same_in_any_company(
    outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    weight, bias = matrix(outputs, inputs), noise(outputs, seed=8, dtype=dtype)
    rows = quantize_rows_reference(noise(130, inputs, dtype=dtype))
    tile = invariant_tile(outputs, torch.float8_e4m3fn)

    def product(part: slice) -> torch.Tensor:
        return ours.invariant_linear_triton(
            rows.codes_MK[part],
            weight.codes_NK,
            tile=tile,
            scales=(rows.scale_M[part], weight.scale_N),
            dtype=dtype,
            bias_N=bias,
        )

    whole = product(slice(None))
    want = invariant_fp8_reference(
        QuantizedRows(rows.codes_MK, rows.scale_M), weight, dtype, bias_N=bias
    )
    assert_near(whole, want, dtype)
    for num in ROWS:
        assert equal(product(slice(0, num)), whole[:num])
        assert equal(product(slice(-num, None)), whole[-num:])


@pytest.mark.parametrize("pieces", [1 << 22, 700])
def test_where_there_is_no_e4m3_weights_become_numbers(
    monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    monkeypatch.setattr("ridgeline.kernels.invariant_linear.MANY_NUMBERS", pieces)
    weight, x, bias = matrix(37, 50), noise(6, 50), noise(37, seed=8)
    got = invariant_fp8_linear(x, weight, bias_N=bias)
    assert_near(got, fp8_linear_reference(x, weight, bias_N=bias), torch.float32)


def test_on_a_cpu_the_reference_answers() -> None:
    weight, x = noise(24, 40, seed=7).cpu(), noise(9, 40).cpu()
    out = torch.empty(9, 24)
    assert invariant_linear(x, weight, out_MN=out) is out
    assert torch.equal(out, invariant_linear_reference(x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (28672, 4096), (4096, 14336)])
class TestLarge:
    """The shapes of an 8B model, through what the layers call."""

    pytestmark = gpu

    def test_rows_are_the_same_in_any_company(
        self, outputs: int, inputs: int, dtype: torch.dtype
    ) -> None:
        weight = noise(outputs, inputs, seed=7, dtype=dtype) / inputs**0.5
        every = noise(1030, inputs, dtype=dtype)
        whole = invariant_linear(every, weight)
        want = every.double() @ weight.double().T
        near = every @ weight.T
        # One sum over all of K, where the library may add up several shorter ones.
        slack = 1e-5 if dtype == torch.float32 else 0.0
        bound = 2 * (near.double() - want).norm() + slack * want.norm()
        assert (whole.double() - want).norm() <= bound
        for rows in (*ROWS, 128, 200, 512, 1000):
            assert equal(invariant_linear(every[:rows], weight), whole[:rows])
            assert equal(invariant_linear(every[-rows:], weight), whole[-rows:])

    def test_rounded_rows_are_too(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        weight, every = matrix(outputs, inputs), noise(520, inputs, dtype=dtype)
        whole = invariant_fp8_linear(every, weight)
        for rows in (*ROWS, 200, 512):
            assert equal(invariant_fp8_linear(every[:rows], weight), whole[:rows])
            assert equal(invariant_fp8_linear(every[-rows:], weight), whole[-rows:])
