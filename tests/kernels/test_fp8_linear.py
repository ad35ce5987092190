"""Products with e4m3 weights equal their reference; in bfloat16 they err as little as PyTorch does.

Without a GPU the kernel for few rows runs through Triton's interpreter, in float32 and float16
(which reads finite e4m3 rightly); products of e4m3 with e4m3 run in PyTorch's own code.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.nn import functional

from ridgeline.errors import InternalError
from ridgeline.kernels import fp8_linear as module
from ridgeline.kernels.fp8_linear import (
    MAX_UNTUNED_ROWS,
    Fp8Matrix,
    choose_tile,
    dequantize_rows,
    fp8_linear,
    fp8_product,
    library_product,
    takes_e4m3,
    untuned_tile,
)
from ridgeline.kernels.launching import make_workspace
from ridgeline.kernels.quantize_rows import has_e4m3, quantize_rows, quantize_rows_reference
from ridgeline.kernels.rms_norm import rms_norm
from ridgeline.kernels.silu_mul import silu_mul
from ridgeline.kernels.small_linear import InputNorm
from ridgeline.kernels.tiles import MAX_ROWS, Place, Tile, bucket
from tests.kernels.references import fp8_linear_reference

# A GPU if there is one, else the interpreter, which is chosen when the kernels are decorated.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")
ours = pytest.importorskip("ridgeline.kernels.fp8_linear_triton")

HAS_E4M3 = has_e4m3(torch.device(DEVICE))
EPS = 1e-5
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3}  # of the largest number: a rounding or two
# NumPy, which the interpreter computes with, warns where a GPU gives infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

VECTOR = Tile(8, 32, dot=False, stages=1)
DOT = Tile(16, 32)
TILES = {
    "vector": VECTOR,
    "vector, pipelined": Tile(4, 32, dot=False),
    "vector, split": Tile(8, 32, 3, dot=False, stages=1),
    "vector, shared": Tile(8, 32, dot=False, stages=1, per_sm=1),
    "dot": DOT,
    "dot, split": Tile(16, 32, 2),
    "dot, shared": Tile(16, 32, per_sm=1),
}
ROUNDED_TILES = {
    **{name: tile for name, tile in TILES.items() if tile.dot},
    "rows apart": Tile(16, 32, 2, block_m=16),
    "rows apart, shared": Tile(16, 32, per_sm=1, block_m=32),
    "TMA": Tile(16, 32, tma=True),
    "TMA, rows apart": Tile(16, 32, per_sm=1, tma=True, block_m=16),
}


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, dtype)


def matrix(outputs: int, inputs: int, seed: int = 7) -> Fp8Matrix:
    rows = quantize_rows_reference(noise(outputs, inputs, seed=seed) / inputs**0.5)
    return Fp8Matrix(rows.codes_MK, rows.scale_M)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same rows, further apart, with NaN between them."""
    wide = x.new_full((x.shape[0], x.shape[1] + 5), torch.nan)
    wide[:, 2:-3] = x
    return wide[:, 2:-3]


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact.double()).abs().max())


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert error(got, want) <= BOUND[dtype] * max(1.0, float(want.abs().max()))


# ---------------------------------------------------------------------- few rows, x as it is


@pytest.mark.every_value
@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("tile", list(TILES.values()), ids=list(TILES))
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (37, 100), (9, 150)])
def test_few_rows(outputs: int, inputs: int, tile: Tile, dtype: torch.dtype) -> None:
    weight = matrix(outputs, inputs)
    for rows in (1, 5) if tile.dot else (1,):
        x = strided(noise(rows, inputs, dtype=dtype))
        got = ours.fp8_linear_triton(x, weight, tile=tile)
        assert_near(got, fp8_linear_reference(x, weight), dtype)


@pytest.mark.every_pair
@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tile", list(TILES.values()), ids=list(TILES))
def test_what_stands_beside_the_product(tile: Tile, gated: bool, dtype: torch.dtype) -> None:
    rows, weight, width = (6 if tile.dot else 1), matrix(36, 96), 18 if gated else 36
    x, bias = noise(rows, 96, dtype=dtype) * 3, noise(36, seed=1, dtype=dtype)
    norm = None if tile.dot else InputNorm(noise(96, seed=2, dtype=dtype), EPS)
    kept = noise(rows, width, seed=3, dtype=dtype)
    residual = strided(kept)
    got = ours.fp8_linear_triton(
        x, weight, norm=norm, bias_N=bias, gated=gated, residual_MO=residual, tile=tile
    )
    beside: dict[str, Any] = {"bias_N": bias, "gated": gated, "residual_MO": kept}
    assert_near(got, fp8_linear_reference(x, weight, norm=norm, **beside), dtype)
    back = ours.fp8_linear_triton(
        x, weight, gated=gated, residual_MO=residual, out_MO=residual, tile=tile
    )
    assert back is residual
    want = fp8_linear_reference(x, weight, gated=gated, residual_MO=kept)
    assert_near(residual, want, dtype)


def test_rows_that_a_dot_pads_and_columns_that_lie_together() -> None:
    weight = matrix(16, 32)
    x = noise(32, 17).T
    assert not x.is_contiguous()
    assert_near(
        ours.fp8_linear_triton(x, weight, tile=DOT),
        fp8_linear_reference(x, weight),
        torch.float32,
    )


def test_the_workspace_is_clean_afterwards() -> None:
    room, weight = make_workspace(torch.device(DEVICE)), matrix(37, 100)
    for seed in range(3):
        x = noise(4, 100, seed=seed)
        tile = TILES["dot, split"]
        got = ours.fp8_linear_triton(x, weight, tile=tile, workspace=room)
        assert_near(got, fp8_linear_reference(x, weight), torch.float32)
        assert int(room.arrivals_A.abs().max()) == 0


def test_the_same_input_gives_the_same_bits() -> None:
    x, weight = noise(4, 150), matrix(37, 150)
    one, two = (ours.fp8_linear_triton(x, weight, tile=TILES["dot, split"]) for _ in range(2))
    assert torch.equal(one, two)


def test_what_the_kernel_refuses() -> None:
    weight = matrix(16, 32)
    norm = InputNorm(noise(32), EPS)
    with pytest.raises(InternalError, match="few rows"):
        ours.fp8_linear_triton(noise(257, 32), weight, tile=DOT)
    with pytest.raises(InternalError, match="agree"):
        ours.fp8_linear_triton(noise(2, 33), weight, tile=DOT)
    with pytest.raises(InternalError, match="without tensor cores"):
        ours.fp8_linear_triton(noise(2, 32), weight, tile=VECTOR)
    with pytest.raises(InternalError, match="of tensor cores"):
        ours.fp8_linear_triton(noise(2, 32), weight, tile=DOT, norm=norm)
    with pytest.raises(InternalError, match="has scales"):
        ours.fp8_linear_triton(noise(2, 32), weight, tile=DOT, x_scale_M=noise(2))
    with pytest.raises(InternalError, match="both in e4m3"):
        ours.fp8_linear_triton(noise(2, 32), weight, tile=ROUNDED_TILES["TMA"])
    both = {"tile": ROUNDED_TILES["TMA"], "gated": True}
    with pytest.raises(InternalError, match="no TMA"):
        ours.fp8_linear_triton(noise(2, 32), weight, **both)


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_untuned_tiles_fit_the_usual_workspace(shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    for rows in (1, 2, 16, 64):
        tile = untuned_tile(rows, outputs, inputs)
        assert tile.dot == (rows > 1)
        cut = ours.cut_fp8(tile, rows, outputs, inputs, 132)
        if cut.merges:
            needed = cut.slots * ours._slot_size(cut, tile)
            make_workspace(torch.device("cpu")).check_room(needed, cut.tiles)


def test_a_tile_is_what_was_measured_or_else_untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        Place("card", module.DTYPE, 64, 32, 128, "plain"): DOT,
        Place("card", module.DTYPE, 64, 32, 16, "plain"): None,
    }
    monkeypatch.setattr("ridgeline.kernels.tiles._table", lambda: known)
    assert choose_tile(100, 64, 32, "card", "plain") == DOT
    assert choose_tile(16, 64, 32, "card", "plain") is None
    assert choose_tile(MAX_UNTUNED_ROWS, 64, 32, "card", "plain") == untuned_tile(
        MAX_UNTUNED_ROWS, 64, 32
    )
    assert choose_tile(129, 64, 32, "card", "plain") is None
    assert choose_tile(1, 64, 32, "card", "norm") == untuned_tile(1, 64, 32)
    assert bucket(MAX_ROWS) == MAX_ROWS


# ---------------------------------------------------------------------- where there is no e4m3


@pytest.mark.parametrize("numbers", [1 << 18, 100])
def test_by_tiles(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.TILE_NUMBERS, "cpu", numbers)
    weight = matrix(21, 34)
    weight = Fp8Matrix(weight.codes_NK.cpu(), weight.scale_N.cpu())
    x, gate_up, bias = (noise(*s).cpu() for s in ((3, 34), (3, 68), (21,)))
    exact = x @ dequantize_rows(weight).T
    torch.testing.assert_close(fp8_linear(x, weight), exact)
    torch.testing.assert_close(fp8_linear(x, weight, bias_N=bias), exact + bias)
    norm = InputNorm(noise(34, seed=2).cpu(), EPS)
    got = fp8_linear(x, weight, norm=norm, residual_MO=exact)
    wanted = rms_norm(x, norm.weight_K, EPS) @ dequantize_rows(weight).T + exact
    torch.testing.assert_close(got, wanted)
    wanted = silu_mul(gate_up) @ dequantize_rows(weight).T
    torch.testing.assert_close(fp8_linear(gate_up, weight, silu=True), wanted)
    kept = exact.clone()
    assert fp8_linear(x, weight, residual_MO=kept, out_MO=kept) is kept
    torch.testing.assert_close(kept, 2 * exact)
    total = noise(3, 34, seed=4).cpu()
    wanted = rms_norm(x + total, norm.weight_K, EPS) @ dequantize_rows(weight).T
    together = x + total
    torch.testing.assert_close(fp8_linear(x, weight, norm=norm, sum_MK=total), wanted)
    assert torch.equal(total, together)
    with pytest.raises(InternalError, match="not both"):
        fp8_linear(gate_up, weight, silu=True, norm=norm)
    with pytest.raises(InternalError, match="is normed"):
        fp8_linear(x, weight, sum_MK=total)


def test_gated_by_tiles() -> None:
    weight, x = matrix(20, 34), noise(3, 34).cpu()
    weight = Fp8Matrix(weight.codes_NK.cpu(), weight.scale_N.cpu())
    got = fp8_linear(x, weight, gated=True)
    torch.testing.assert_close(got, fp8_linear_reference(x, weight, gated=True))


def test_what_takes_e4m3() -> None:
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    assert not takes_e4m3(x, Fp8Matrix(torch.zeros(16, 32), torch.zeros(16)))  # on a CPU


# ---------------------------------------------------------------------- both in e4m3


@pytest.mark.every_value
@pytest.mark.skipif(DEVICE == "cuda" and not HAS_E4M3, reason="needs a GPU with e4m3, or none")
@pytest.mark.parametrize("tile", list(ROUNDED_TILES.values()), ids=list(ROUNDED_TILES))
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 48, 96), (35, 40, 112)])
def test_both_in_e4m3_by_our_kernel(rows: int, outputs: int, inputs: int, tile: Tile) -> None:
    room, weight = make_workspace(torch.device(DEVICE)), matrix(outputs, inputs)
    made = quantize_rows_reference(noise(rows, inputs))
    bias, residual = noise(outputs, seed=1), noise(rows, outputs, seed=2)
    exact = (made.codes_MK.float() * made.scale_M[:, None]) @ dequantize_rows(weight).T
    for kept in (None, residual):
        got = ours.fp8_linear_triton(
            made.codes_MK,
            weight,
            tile=tile,
            x_scale_M=made.scale_M,
            dtype=torch.float32,
            bias_N=bias,
            residual_MO=kept,
            workspace=room,
        )
        want = exact + bias if kept is None else exact + bias + kept
        bound = 2.0**-10 if DEVICE == "cuda" else 2e-6  # fast accumulation keeps fewer bits
        assert error(got, want) <= bound * float(want.abs().max())
        assert int(room.arrivals_A.abs().max()) == 0


@pytest.mark.skipif(DEVICE == "cuda" and not HAS_E4M3, reason="needs a GPU with e4m3, or none")
def test_a_product_of_both_roundings() -> None:
    """Off by what bfloat16 rounds, and no more."""
    weight, rows = matrix(48, 96), quantize_rows_reference(noise(17, 96))
    bias, residual = noise(48, seed=1), noise(17, 48, seed=2)
    exact = (rows.codes_MK.float() * rows.scale_M[:, None]) @ dequantize_rows(weight).T
    try:
        got = fp8_product(rows, weight, torch.float32)
    except RuntimeError as fault:  # torch 2.11 with AVX-512; the engine takes it on GPUs only
        if "per-tensor scaling for CPU" not in str(fault):
            raise
        pytest.skip("this torch has no product with scales of rows on this CPU")
    assert bool(((got - exact).abs() <= 2.0**-8 * exact.abs() + 1e-3).all())
    got = fp8_product(rows, weight, torch.float32, bias_N=bias, residual_MO=residual)
    near = exact + bias + residual
    assert error(got, near) <= 2.0**-8 * float(exact.abs().max()) + 1e-3


# ---------------------------------------------------------------------- on the card


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_E4M3, reason="needs a GPU with e4m3")
class TestOnGpu:
    SHAPES = ((4096, 4096), (6144, 1024), (1040, 14336), (48, 80))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
    def test_one_row_is_as_good_as_pytorch(
        self, outputs: int, inputs: int, dtype: torch.dtype
    ) -> None:
        weight, x = matrix(outputs, inputs), noise(1, inputs, dtype=dtype)
        exact = x.double() @ dequantize_rows(weight).double().T
        theirs = functional.linear(x, dequantize_rows(weight).to(dtype))
        got = fp8_linear(strided(x), weight)
        assert got.dtype == dtype
        assert error(got, exact) <= 2 * error(theirs, exact)
        assert (got - exact).norm() <= 1.1 * (theirs - exact).norm()

    @pytest.mark.parametrize("pdl", [False, True])
    @pytest.mark.parametrize("gated", [False, True])
    def test_what_stands_beside_one_row(self, gated: bool, pdl: bool) -> None:
        dtype, weight = torch.bfloat16, matrix(8192, 4096)
        x, bias = noise(1, 4096, dtype=dtype), noise(8192, seed=1, dtype=dtype)
        norm = InputNorm(noise(4096, seed=2, dtype=dtype), EPS)
        residual = noise(1, 4096 if gated else 8192, seed=3, dtype=dtype)
        room = make_workspace(x.device)
        beside: dict[str, Any] = {"bias_N": bias, "gated": gated, "residual_MO": residual}
        got = fp8_linear(x, weight, norm=norm, workspace=room, pdl=pdl, **beside)
        wide = InputNorm(norm.weight_K.float(), EPS)
        want = fp8_linear_reference(x.float(), weight, norm=wide, **beside)
        assert (got - want).norm() <= 0.01 * want.norm()
        assert int(room.arrivals_A.abs().max()) == 0

    VECTORS = (
        Tile(4, 512, warps=1, stages=1, dot=False),
        Tile(4, 2048, splits=2, stages=1, dot=False),
        Tile(8, 1024, warps=2, stages=3, dot=False),
        Tile(8, 512, warps=1, stages=3, dot=False, per_sm=12),
        Tile(8, 512, warps=2, stages=1, dot=False),
    )

    @pytest.mark.parametrize("tile", VECTORS, ids=str)
    @pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
    def test_tiles_for_one_row(self, outputs: int, inputs: int, tile: Tile) -> None:
        dtype, weight = torch.bfloat16, matrix(outputs, inputs)
        x, norm = noise(1, inputs, dtype=dtype), InputNorm(noise(inputs, seed=2, dtype=dtype), EPS)
        for gated in (False, True):
            got = ours.fp8_linear_triton(x, weight, tile=tile, norm=norm, gated=gated)
            wide = InputNorm(norm.weight_K.float(), EPS)
            want = fp8_linear_reference(x.float(), weight, norm=wide, gated=gated)
            assert (got - want).norm() <= 0.005 * want.norm()

    DOTS = (
        Tile(64, 256, 2, block_m=64),
        Tile(64, 256, stages=4, per_sm=2, tma=True, block_m=64),
        Tile(128, 128, 2, warps=8, stages=4, tma=True, block_m=128),
        Tile(128, 128, warps=8, stages=4, tma=True),
        Tile(64, 128, stages=5, per_sm=1, tma=True, block_m=64),
        Tile(256, 128, 4, warps=8, stages=3, tma=True, block_m=128),
    )

    @pytest.mark.parametrize("tile", DOTS, ids=str)
    @pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
    @pytest.mark.parametrize("rows", [8, 100, 256])
    def test_tiles_of_both_in_e4m3(self, rows: int, outputs: int, inputs: int, tile: Tile) -> None:
        """Fast accumulation keeps about 14 bits of the sum."""
        weight, dtype = matrix(outputs, inputs), torch.bfloat16
        made = quantize_rows(noise(rows, inputs, dtype=dtype))
        residual = noise(rows, outputs, seed=3, dtype=dtype)
        exact = made.codes_MK.double() * made.scale_M[:, None] @ dequantize_rows(weight).double().T
        want, room = exact + residual, make_workspace(residual.device, 1 << 23)
        room.partial_P.fill_(torch.nan)
        states = residual.clone()
        ours.fp8_linear_triton(
            made.codes_MK,
            weight,
            tile=tile,
            x_scale_M=made.scale_M,
            residual_MO=states,
            out_MO=states,
            workspace=room,
        )
        assert (states - want).norm() <= 0.006 * want.norm()
        assert int(room.arrivals_A.abs().max()) == 0

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
    @pytest.mark.parametrize("rows", [2, 8, 17, 33, 64, 100, 257])
    def test_both_in_e4m3(self, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        weight = matrix(outputs, inputs)
        made = quantize_rows_reference(noise(rows, inputs, dtype=dtype))
        exact = made.codes_MK.double() * made.scale_M[:, None] @ dequantize_rows(weight).double().T
        got = fp8_product(made, weight, dtype)
        assert got.dtype == dtype
        assert (got - exact).norm() <= 0.005 * exact.norm()
        slow = library_product(made, weight, use_fast_accum=False)
        assert (slow - exact).norm() <= 0.005 * exact.norm()

    @pytest.mark.parametrize("rows", [2, 17, 256])
    def test_many_rows_are_rounded(self, rows: int) -> None:
        """Two independent roundings of 2.6 % each are averaged out by neither."""
        weight, dtype = matrix(4096, 4096), torch.bfloat16
        x, norm = noise(rows, 4096, dtype=dtype), InputNorm(noise(4096, seed=2, dtype=dtype), EPS)
        residual, bias = noise(rows, 4096, seed=3, dtype=dtype), noise(4096, seed=1, dtype=dtype)
        got = fp8_linear(x, weight, norm=norm, bias_N=bias, residual_MO=residual)
        want = fp8_linear_reference(x, weight, norm=norm, bias_N=bias, residual_MO=residual)
        assert (got.float() - want.float()).norm() <= 0.04 * want.float().norm()
        gate_up = noise(rows, 8192, seed=5, dtype=dtype)
        got = fp8_linear(gate_up, weight, silu=True)
        want = fp8_linear_reference(silu_mul(gate_up), weight)
        assert (got.float() - want.float()).norm() <= 0.04 * want.float().norm()
        total = residual.clone()
        got = fp8_linear(x, weight, norm=norm, sum_MK=total)
        assert torch.equal(total, x + residual)
        want = fp8_linear_reference(x + residual, weight, norm=norm)
        assert (got.float() - want.float()).norm() <= 0.04 * want.float().norm()

    def test_sizes_and_dtypes_without_products_in_e4m3(self) -> None:
        for rows, outputs, inputs, dtype in (
            (3, 21, 34, torch.bfloat16),
            (40, 24, 32, torch.bfloat16),
            (3, 32, 32, torch.float32),
            (0, 32, 32, torch.bfloat16),
        ):
            weight, x = matrix(outputs, inputs), noise(rows, inputs, dtype=dtype)
            got = fp8_linear(x, weight)
            want = fp8_linear_reference(x, weight)
            assert got.shape == (rows, outputs)
            torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)

    def test_captured(self) -> None:
        weight = matrix(4096, 4096)
        for rows in (1, 8, 32):
            x = noise(rows, 4096, dtype=torch.bfloat16)
            room = make_workspace(x.device)
            want = fp8_linear(x, weight, workspace=room)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = fp8_linear(x, weight, workspace=room)
            for _ in range(3):
                graph.replay()
            assert torch.equal(got, want)

    def test_nan_is_not_hidden(self) -> None:
        weight = matrix(64, 64)
        for rows in (1, 4, 32):
            x = noise(rows, 64, dtype=torch.bfloat16)
            x[0, 5] = torch.nan
            assert bool(fp8_linear(x, weight)[0].isnan().all())
            assert bool(fp8_linear(x, weight)[1:].isfinite().all())
