"""Rows in e4m3: each number off by at most 1/16 of itself, whatever the row was made from.

Without a GPU the kernel runs through Triton's interpreter, in float32 and float16, and keeps the
numbers it would round: the interpreter rounds to e4m3 wrongly.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional

from ridgeline.errors import InternalError
from ridgeline.kernels.quantize_rows import (
    E4M3,
    LARGEST,
    MAX_SIZE,
    QuantizedRows,
    has_e4m3,
    quantize_rows,
    quantize_rows_reference,
)
from ridgeline.kernels.rms_norm import rms_norm_reference
from ridgeline.kernels.small_linear import InputNorm
from tests.kernels.references import silu_mul_reference

# A GPU if there is one, else the interpreter, which is chosen when the kernels are decorated.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")
ours = pytest.importorskip("ridgeline.kernels.quantize_rows_triton")

EPS = 1e-5
DTYPES = [torch.float32, torch.float16]
# NumPy, which the interpreter computes with, warns where a GPU gives infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, dtype)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same rows, further apart, with NaN between them."""
    wide = x.new_full((x.shape[0], x.shape[1] + 5), torch.nan)
    wide[:, 2:-3] = x
    return wide[:, 2:-3]


def value(rows: QuantizedRows) -> torch.Tensor:
    return rows.codes_MK.double() * rows.scale_M[:, None].double()


def assert_rounded(rows: QuantizedRows, exact: torch.Tensor) -> None:
    """1/16 of the number; half the smallest e4m3 for small ones; a little for the arithmetic."""
    assert rows.codes_MK.dtype == E4M3
    assert rows.scale_M.dtype == torch.float32
    assert rows.scale_M.shape == exact.shape[:1]
    scale = rows.scale_M[:, None].double()
    bound = torch.maximum(exact.double().abs() / 16, 2.0**-10 * scale) * 1.01
    assert bool(((value(rows) - exact.double()).abs() <= bound).all())
    largest = rows.codes_MK.float().abs().amax(-1)
    assert bool((largest[exact.abs().amax(-1) > 0] == LARGEST).all())


# ---------------------------------------------------------------------- the reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_are_off_by_a_sixteenth_at_most(dtype: torch.dtype) -> None:
    x = noise(20, 97, dtype=dtype) * 10.0 ** noise(20, 1, seed=1, dtype=dtype)
    assert_rounded(quantize_rows_reference(x), x)


def test_what_comes_before_the_rounding() -> None:
    gate_up, x, residual = noise(5, 64), noise(5, 32, seed=1), noise(5, 32, seed=2)
    norm = InputNorm(noise(32, seed=3), EPS)
    assert_rounded(quantize_rows_reference(gate_up, silu=True), silu_mul_reference(gate_up))
    normed = rms_norm_reference(x, norm.weight_K, EPS)
    assert_rounded(quantize_rows_reference(x, norm=norm), normed)
    summed = residual.clone()
    got = quantize_rows_reference(x, norm=norm, residual_MK=summed)
    torch.testing.assert_close(summed, residual + x)
    assert_rounded(got, rms_norm_reference(residual + x, norm.weight_K, EPS))


def test_zeros_and_tiny_numbers_have_a_scale() -> None:
    x = noise(3, 8)
    x[0], x[1] = 0.0, 1e-44
    rows = quantize_rows(x)
    assert bool((rows.scale_M > 0).all())
    assert bool(torch.isfinite(rows.scale_M).all())
    assert value(rows)[:2].abs().max() == 0


def test_what_is_not_finite_is_not_hidden() -> None:
    x = noise(3, 8)
    x[0, 3], x[1, 4] = torch.nan, -torch.inf
    found = value(quantize_rows(x)).sum(-1)
    assert found.isnan().tolist() == [True, True, False]


def test_nothing() -> None:
    assert quantize_rows(noise(0, 8)).codes_MK.shape == (0, 8)
    rows = quantize_rows(noise(3, 0))
    assert rows.codes_MK.shape == (3, 0)
    assert rows.scale_M.tolist() == [1.0] * 3


def test_devices_without_e4m3() -> None:
    assert not has_e4m3(torch.device("cpu"))
    assert not has_e4m3(torch.device("meta"))


# ---------------------------------------------------------------------- the kernel


def assert_same(x: torch.Tensor, *, silu: bool, norm: bool, residual: bool) -> None:
    width = x.shape[1] // 2 if silu else x.shape[1]
    weight = InputNorm(noise(width, seed=3, dtype=x.dtype), EPS) if norm else None
    old = strided(noise(x.shape[0], width, seed=4, dtype=x.dtype)) if residual else None
    mine, theirs = (None if old is None else strided(old.clone()) for _ in range(2))
    got = ours.quantize_rows_triton(
        strided(x), silu=silu, norm=weight, residual_MK=mine, dtype=torch.float32
    )
    want = quantize_rows_reference(x, silu=silu, norm=weight, residual_MK=theirs)
    torch.testing.assert_close(got.scale_M, want.scale_M, rtol=1e-5, atol=0)
    rounded = QuantizedRows(got.codes_MK.clamp(-LARGEST, LARGEST).to(E4M3), got.scale_M)
    assert (rounded.codes_MK.float() != want.codes_MK.float()).float().mean() < 0.01
    apart = (value(rounded) - value(want)).abs() - value(want).abs() / 7.9
    assert bool((apart <= 2.0**-8 * want.scale_M[:, None]).all())  # the next code, if at all
    if mine is not None and theirs is not None:
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 33), (3, 1), (2, 5000)])
def test_rows(rows: int, width: int, dtype: torch.dtype) -> None:
    assert_same(noise(rows, width, dtype=dtype), silu=False, norm=False, residual=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("silu", "norm", "residual"),
    [(True, False, False), (False, True, False), (False, True, True), (True, True, True)],
)
def test_fused(silu: bool, norm: bool, residual: bool, dtype: torch.dtype) -> None:
    assert_same(noise(4, 74, dtype=dtype), silu=silu, norm=norm, residual=residual)


def test_the_kernel_on_nothing_and_on_zeros() -> None:
    assert ours.quantize_rows_triton(noise(0, 8)).codes_MK.shape == (0, 8)
    assert ours.quantize_rows_triton(noise(2, 0)).scale_M.tolist() == [1.0, 1.0]
    rows = ours.quantize_rows_triton(noise(2, 8) * 0, dtype=torch.float32)
    assert rows.codes_MK.abs().max() == 0
    assert bool((rows.scale_M > 0).all())


def test_shapes_that_disagree() -> None:
    with pytest.raises(InternalError, match="one width"):
        quantize_rows(noise(2, 9), silu=True)
    with pytest.raises(InternalError, match="one width"):
        ours.quantize_rows_triton(noise(2, 9), silu=True)
    with pytest.raises(InternalError, match="residual"):
        ours.quantize_rows_triton(noise(2, 8), residual_MK=noise(2, 9))


# ---------------------------------------------------------------------- on the card


@pytest.mark.gpu
@pytest.mark.skipif(not has_e4m3(torch.device(DEVICE)), reason="needs a GPU with e4m3")
class TestOnGpu:
    @pytest.mark.parametrize(("rows", "width"), [(1, 4096), (33, 4096), (257, 1000), (5, MAX_SIZE)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_rows(self, rows: int, width: int, dtype: torch.dtype) -> None:
        x = noise(rows, width, dtype=dtype)
        assert_rounded(quantize_rows(strided(x)), x)
        got, want = quantize_rows(x), quantize_rows_reference(x)
        assert (got.codes_MK.float() != want.codes_MK.float()).float().mean() < 1e-3
        assert_rounded(quantize_rows(x.T.contiguous().T), x)  # columns lie together

    @pytest.mark.parametrize("pdl", [False, True])
    def test_fused(self, pdl: bool) -> None:
        gate_up, x = noise(40, 28672, dtype=torch.bfloat16), noise(40, 4096, dtype=torch.bfloat16)
        norm = InputNorm(noise(4096, seed=3, dtype=torch.bfloat16), EPS)
        gate, up = gate_up.float().chunk(2, -1)
        got = quantize_rows(gate_up, silu=True, pdl=pdl)
        assert_rounded(got, functional.silu(gate) * up)
        mine, theirs = (noise(40, 4096, seed=5, dtype=torch.bfloat16) for _ in range(2))
        rows = quantize_rows(x, norm=norm, residual_MK=mine, pdl=pdl)
        want = quantize_rows_reference(x, norm=norm, residual_MK=theirs)
        assert torch.equal(mine, theirs)
        assert (rows.codes_MK.float() != want.codes_MK.float()).float().mean() < 1e-3
        torch.testing.assert_close(rows.scale_M, want.scale_M)

    def test_what_is_not_finite_and_what_is_zero(self) -> None:
        x = noise(4, 64, dtype=torch.bfloat16)
        x[0, 3], x[1, 4], x[2] = torch.nan, -torch.inf, 0.0
        rows = quantize_rows(x)
        assert value(rows).sum(-1).isnan().tolist() == [True, True, False, False]
        assert value(rows)[2].abs().max() == 0

    def test_rows_longer_than_a_program_holds(self) -> None:
        x = noise(3, MAX_SIZE + 16, dtype=torch.bfloat16)
        assert_rounded(quantize_rows(x), x)
