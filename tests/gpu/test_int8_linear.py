"""Products with int8 weights: equal to their reference, whatever they are fused with; and those of
rows that were rounded before to the last bit, by any kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgeline.kernels import nvrtc
from ridgeline.kernels.int8_layout import GpuInt8, InvariantGpuInt8, int8_rows, int8_rows_reference
from ridgeline.kernels.int8_linear import (
    Int8Matrix,
    has_int8,
    int8_linear,
    int8_product,
    invariant_int8_linear,
)
from ridgeline.kernels.quantize_rows import QuantizedRows, quantize_rows, quantize_rows_reference
from ridgeline.kernels.quantized_matrix import QuantizedMatrix
from ridgeline.kernels.small_linear import Fusion, InputNorm
from ridgeline.kernels.stream_linear import (
    ROOM_BYTES,
    Scales,
    can_stream,
    groups_of,
    multiprocessors,
    stream_linear,
)
from ridgeline.kernels.tile_linear import (
    can_tile,
    columns_of,
    tile_linear,
    tile_workspace,
)
from ridgeline.kernels.tiles import Tile
from tests.gpu.test_deterministic import assert_same_in_company
from tests.gpu.test_tile_linear import assert_surrounded, noise, spread
from tests.kernels.references import (
    dequantize_int8,
    int8_linear_reference,
    rounded_reference,
    small_linear_reference,
)

HAS_KERNELS = torch.cuda.is_available() and has_int8(torch.device("cuda", 0))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_KERNELS, reason="needs a GPU of the Hopper kind"),
]

INT8, E4M3 = torch.int8, torch.float8_e4m3fn
STREAMS = {
    "16": Tile(16, 64, warps=8, stages=2, stream=True),
    "16, cluster": Tile(16, 64, 2, warps=4, stages=3, stream=True),
    "32": Tile(32, 64, warps=8, stages=3, stream=True),
    "48": Tile(48, 64, warps=4, stages=2, stream=True),
    "64, two programs": Tile(64, 64, warps=4, stages=2, per_sm=2, stream=True),
    "128": Tile(128, 64, warps=4, stages=2, stream=True),
}
TILES = {
    "64": Tile(64, 128, stages=4, wgmma=True),
    "64, split": Tile(64, 128, stages=7, splits=2, block_m=128, wgmma=True),
    "64, in four": Tile(64, 128, stages=5, splits=4, block_m=128, wgmma=True),
    "128, all over": Tile(128, 128, warps=8, stages=4, per_sm=1, wgmma=True),
    "128, wide steps": Tile(128, 256, warps=8, stages=2, per_sm=1, block_m=192, wgmma=True),
    "128, pairs": Tile(128, 128, warps=8, stages=4, per_sm=1, cluster=2, wgmma=True),
    "256": Tile(256, 128, warps=8, stages=3, per_sm=1, block_m=128, wgmma=True),
}
KINDS = ["plain", "norm", "norm+gated", "residual", "bias"]
# Of the weights' rows, so that each is tried.
SCALE_OF_KIND = {"plain": torch.float32, "bias": torch.bfloat16, "residual": torch.float16}
OFF = {INT8: 5e-3, E4M3: 1e-2}  # numbers half way between two codes may go to either


def codes_of(outputs: int, inputs: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """With the smallest and largest that there are."""
    if dtype == E4M3:
        return (noise(outputs, inputs, seed=seed).float() * 100).clamp(-448, 448).to(E4M3)
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = outputs, inputs
    made = torch.randint(-128, 128, shape, generator=generator, device="cuda", dtype=INT8)
    made[0, :4] = torch.tensor([-128, 127, 0, 1])
    return made


def scales_of(outputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(7)
    made = torch.rand(outputs, generator=generator, device="cuda").add_(0.1) * 1e-3
    return made.to(dtype)


def int8_matrix(outputs: int, inputs: int, scale: torch.dtype = torch.float32) -> Int8Matrix:
    return Int8Matrix(codes_of(outputs, inputs, INT8), scales_of(outputs, scale))


def int8_of_rows(rows: int, inputs: int, seed: int = 2) -> QuantizedRows:
    return quantize_rows_reference(noise(rows, inputs, seed=seed), dtype=INT8)


# ---------------------------------------------------------------------- rounded in the product


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("dtype", [INT8, E4M3], ids=["int8", "e4m3"])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 20])
@pytest.mark.parametrize("outputs", [352, 8960])
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_in_the_product(
    name: str, dtype: torch.dtype, rows: int, outputs: int, kind: str
) -> None:
    """Of 8,960 outputs most programs have several groups, which take what the first has rounded."""
    tile, gated, inputs = STREAMS[name], "gated" in kind, 1152
    if gated and tile.block_n % 32:
        pytest.skip("gate and up are pairs of tiles")
    units = multiprocessors(torch.device("cuda", 0))
    cut = groups_of(tile, rows, outputs, inputs, units=units, gated=gated, rounds=True)
    if rows > 8 and not (outputs < 1000 and kind in ("plain", "norm+gated")):
        pytest.skip("layers have up to 8 such rows")
    if cut.shared_bytes > ROOM_BYTES:
        pytest.skip("more shared memory than there is")
    x, norm = spread(noise(rows, inputs, seed=2)), InputNorm(noise(inputs, seed=3), 1e-5)
    x[0, 128:256] = 0.0
    x[-1, 256:384] *= 1e4
    codes, scale = codes_of(outputs, inputs, dtype), scales_of(outputs)
    width = outputs // 2 if gated else outputs
    residual = noise(rows, width, seed=4) if kind == "residual" else None
    bias = noise(outputs, seed=5) if kind == "bias" else None
    taken = rounded_reference(x, dtype)
    if "norm" in kind:
        factor = torch.rsqrt(x.float().square().mean(1, keepdim=True) + norm.eps)
        taken = rounded_reference(x * norm.weight_K, dtype) * factor
    exact = codes.float() * scale[:, None]
    want = small_linear_reference(taken, exact, bias_N=bias, gated=gated, residual_MO=residual)
    assert can_stream(x, codes)
    runs = []
    for pdl in (True, kind != "norm", True):
        out = spread(x.new_full((rows, width), torch.nan) if residual is None else residual)
        stream_linear(
            x,
            codes,
            tile=tile,
            norm=norm if "norm" in kind else None,
            bias_N=bias,
            gated=gated,
            residual_MO=None if residual is None else out,
            out_MO=out,
            scales=Scales(scale),
            pdl=pdl,
        )
        assert_surrounded(out)
        runs.append(out.clone())
    assert (runs[0].float() - want).norm() <= OFF[dtype] * want.norm()
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_what_is_kept_for_later_groups_changes_nothing(rows: int) -> None:
    """The same rows of W by programs with one group each, and with several."""
    tile, x = STREAMS["16"], noise(rows, 2048, seed=1)
    codes, scale = codes_of(6400, 2048, INT8), scales_of(6400)
    whole = stream_linear(x, codes, tile=tile, scales=Scales(scale))
    units = multiprocessors(x.device)
    cut = groups_of(tile, rows, 6400, 2048, units=units, gated=False, rounds=True)
    assert cut.kept > 0
    for begin in range(0, 6400, 1600):
        part = slice(begin, begin + 1600)
        alone = stream_linear(x, codes[part], tile=tile, scales=Scales(scale[part]))
        assert torch.equal(alone, whole[:, part])


def test_a_row_with_nan_stays_one_and_harms_no_other() -> None:
    for rows in (3, 40):
        x = noise(rows, 512, seed=1)
        want = int8_linear(x.clone(), int8_matrix(320, 512))
        x[1, 5] = torch.nan
        x[2, 7] = torch.inf
        got = int8_linear(x, int8_matrix(320, 512))
        assert got[1].isnan().all()
        assert not got[2].isfinite().any()
        others = [row for row in range(rows) if row not in (1, 2)]
        assert torch.equal(got[others], want[others])


# ---------------------------------------------------------------------- rounded before


@pytest.mark.parametrize("rows", [1, 9, 30])
@pytest.mark.parametrize("kind", SCALE_OF_KIND)
@pytest.mark.parametrize("name", STREAMS)
def test_streams_of_whole_numbers(name: str, rows: int, kind: str) -> None:
    scale = SCALE_OF_KIND[kind]
    weight, given = int8_matrix(336, 1152, scale), int8_of_rows(rows, 1152)
    bias = noise(336, seed=5) if kind == "bias" else None
    residual = noise(rows, 336, seed=4) if kind == "residual" else None
    want = int8_linear_reference(
        given, weight, torch.bfloat16, bias_N=bias, residual_MO=residual
    )  # fmt: skip
    got = stream_linear(
        given.codes_MK,
        weight.codes_NK,
        tile=STREAMS[name],
        bias_N=bias,
        residual_MO=residual,
        scales=Scales(weight.scale_N, given.scale_M),
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("rows", [9, 100, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 512), (1008, 1040), (4144, 2048)])
@pytest.mark.parametrize("kind", SCALE_OF_KIND)
def test_tiles_of_whole_numbers(name: str, rows: int, outputs: int, inputs: int, kind: str) -> None:
    tile, scale = TILES[name], SCALE_OF_KIND[kind]
    if columns_of(rows, tile.block_m) % (8 * tile.splits):
        pytest.skip("each of a cluster finishes eights of rows")
    if -(-inputs // tile.block_k) < tile.splits:
        pytest.skip("a step of K for each of a cluster")
    weight, given = int8_matrix(outputs, inputs, scale), int8_of_rows(rows, inputs)
    bias = noise(outputs, seed=5) if kind == "bias" else None
    residual = noise(rows, outputs, seed=4) if kind == "residual" else None
    assert can_tile(given.codes_MK, weight.codes_NK)
    want = int8_linear_reference(
        given, weight, torch.bfloat16, bias_N=bias, residual_MO=residual
    )  # fmt: skip
    for pdl in (True, kind != "plain"):
        tile_workspace(given.codes_MK.device).partial_P.fill_(torch.nan)
        blank = want.new_full((rows, outputs), torch.nan)
        out = spread(blank if residual is None else residual)
        tile_linear(
            given.codes_MK,
            weight.codes_NK,
            tile=tile,
            bias_N=bias,
            residual_MO=None if residual is None else out,
            out_MO=out,
            scales=Scales(weight.scale_N, given.scale_M),
            pdl=pdl,
        )
        assert_surrounded(out)
        assert torch.equal(out, want)
    assert not tile_workspace(given.codes_MK.device).arrivals_A.any()


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gate_in_tiles(name: str, dtype: torch.dtype) -> None:
    rows, weight = 130, int8_matrix(672, 1024)
    given = int8_of_rows(rows, 1024)
    x = given.codes_MK.float() * given.scale_M[:, None]
    want = small_linear_reference(x, dequantize_int8(weight), gated=True)
    got = tile_linear(
        given.codes_MK,
        weight.codes_NK,
        tile=TILES[name],
        gated=True,
        scales=Scales(weight.scale_N, given.scale_M),
        dtype=dtype,
    )
    assert got.dtype == dtype
    assert (got.float() - want).norm() <= 4e-3 * want.norm()


@pytest.mark.parametrize("rows", [5, 60, 700, 8500])
def test_a_product_of_any_number_of_rows(rows: int) -> None:
    """More than one launch takes are several."""
    weight, given = int8_matrix(640, 512), int8_of_rows(rows, 512)
    want = int8_linear_reference(given, weight, torch.bfloat16)
    assert torch.equal(int8_product(given, weight, torch.bfloat16), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 9, 200])
def test_rows_depend_on_no_other(rows: int, dtype: torch.dtype) -> None:
    weight, x = int8_matrix(4128, 1024), noise(rows, 1024, seed=3, dtype=dtype)
    bias = noise(4128, seed=4, dtype=dtype)
    many = torch.cat([x, noise(333, 1024, seed=5, dtype=dtype) * 9])
    got = invariant_int8_linear(x, weight, bias_N=bias)
    assert torch.equal(got, invariant_int8_linear(many, weight, bias_N=bias)[:rows])
    one = invariant_int8_linear(x[-1:], weight, bias_N=bias)
    assert torch.equal(got[-1:], one)
    want = x.float() @ dequantize_int8(weight).T + bias.float()
    assert (got.float() - want).norm() <= 0.02 * want.norm()


# ---------------------------------------------------------------------- what layers ask for


def rows_taken(
    x: torch.Tensor, before: torch.Tensor | None, norm: InputNorm | None
) -> torch.Tensor:
    """What a product has to multiply, in float32: a few rows in pieces, more with one scale."""
    if len(x) > 8 or x.dtype != torch.bfloat16:
        rows = quantize_rows_reference(
            x, norm=norm, residual_MK=None if before is None else before.clone(), dtype=INT8
        )
        return rows.codes_MK.float() * rows.scale_M[:, None]
    if norm is None:
        return rounded_reference(x, INT8)
    whole = x if before is None else x + before
    factor = torch.rsqrt(whole.float().square().mean(1, keepdim=True) + norm.eps)
    if before is None:
        return rounded_reference(whole * norm.weight_K, INT8) * factor
    return rounded_reference((whole.float() * factor * norm.weight_K.float()).to(x.dtype), INT8)


@pytest.mark.parametrize("rows", [1, 4, 8, 9, 33, 300])
@pytest.mark.parametrize("kind", ["plain", "norm", "sum", "norm+gated", "residual", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_layer(rows: int, kind: str, dtype: torch.dtype) -> None:
    weight, gated = int8_matrix(1312, 1152), "gated" in kind
    x, norm = noise(rows, 1152, seed=2, dtype=dtype), InputNorm(noise(1152, seed=3).to(dtype), 1e-5)
    beside: dict[str, Any] = {"gated": gated}
    if kind == "bias":
        beside["bias_N"] = noise(1312, seed=5, dtype=dtype)
    if kind == "residual":
        beside["residual_MO"] = noise(rows, 1312, seed=4, dtype=dtype)
    total, before = noise(rows, 1152, seed=6, dtype=dtype), None
    if kind == "sum":
        before = total.clone()
    has_norm = kind in ("norm", "sum", "norm+gated")
    beside["norm"] = norm if has_norm else None
    taken = rows_taken(x, total if kind == "sum" else None, norm if has_norm else None)
    got = int8_linear(x, weight, sum_MK=before, **beside)
    want = small_linear_reference(taken, dequantize_int8(weight), **beside | {"norm": None})
    assert got.dtype == dtype
    assert (got.float() - want).norm() <= OFF[INT8] * want.norm()
    if before is not None:
        assert torch.equal(before, total + x)


@pytest.mark.parametrize("layout", [GpuInt8(), InvariantGpuInt8()], ids=["fast", "invariant"])
@pytest.mark.parametrize("rows", [1, 12, 80])
def test_a_home(layout: GpuInt8, rows: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    codes = torch.randint(0, 256, (512, 384), generator=generator, device="cuda", dtype=torch.uint8)
    matrix = QuantizedMatrix(codes, scales_of(512)[:, None], None, 384, 8, 0)
    assert layout.takes(matrix, torch.bfloat16)
    assert not layout.takes(matrix, torch.float32)
    kept = layout.keep(matrix)
    assert sum(t.nbytes for t in kept.values()) == matrix.nbytes
    back = layout.matrix(kept)
    assert torch.equal(back.codes, codes)
    assert torch.equal(back.scale, matrix.scale)
    x, exact = noise(rows, 384, seed=2), matrix.dequantize()
    want = x.float() @ exact.T
    got = layout.linear(x, kept, None)
    assert (got.float() - want).norm() <= 0.02 * want.norm()
    residual = noise(rows, 512, seed=3)
    added = layout.fused(x, kept, None, Fusion(residual_TO=(out := residual.clone())))
    if isinstance(layout, InvariantGpuInt8):
        assert added is None
    else:
        assert added is out
        assert (out.float() - residual.float() - want).norm() <= 0.02 * want.norm()
    for outputs in (512, 496, 509):
        logits = torch.full((rows, outputs), torch.nan, device="cuda")
        assert layout.linear_into(x, kept, logits) is logits
        assert torch.equal(logits.to(got.dtype), got[:, :outputs])
        assert not torch.equal(logits, got[:, :outputs].float())  # they were not rounded
    looked_up = torch.tensor([3, 511, 0, 3], device="cuda")
    rows_of = layout.rows(kept, looked_up, torch.bfloat16)
    assert torch.equal(rows_of, exact[looked_up].to(torch.bfloat16))
    assert torch.equal(layout.columns(kept, looked_up[:2] % 384), exact[:, looked_up[:2] % 384])


def test_looking_up_rows() -> None:
    for scale in (torch.float32, torch.bfloat16):
        weight = int8_matrix(1000, 2176, scale)
        ids = torch.tensor([999, 0, 5, 5], device="cuda")
        for dtype in (torch.bfloat16, torch.float32):
            got = int8_rows(weight.codes_NK, weight.scale_N, ids, dtype)
            assert torch.equal(
                got, int8_rows_reference(weight.codes_NK, weight.scale_N, ids, dtype)
            )


def test_rounding_rows() -> None:
    for size in (128, 4096, 14336):
        x, residual = noise(17, size, seed=1), noise(17, size, seed=2)
        norm = InputNorm(noise(size, seed=3), 1e-5)
        want = quantize_rows_reference(x, norm=norm, residual_MK=residual.clone(), dtype=INT8)
        got = quantize_rows(x, norm=norm, residual_MK=residual, dtype=INT8)
        assert (got.scale_M / want.scale_M - 1).abs().max() < 1e-5
        off = (got.codes_MK.int() - want.codes_MK.int()).abs()
        assert off.max() <= 1
        assert (off > 0).float().mean() < 1e-3


def test_layers_in_a_graph() -> None:
    """Products that wait for each other, a few rows and more, with all that stands beside them."""
    up, down = int8_matrix(1024, 512), int8_matrix(512, 512)
    norm = InputNorm(torch.ones(512, device="cuda", dtype=torch.bfloat16), 1e-5)
    for rows in (2, 40):
        start = noise(rows, 512, seed=1)

        def chain(states: torch.Tensor) -> None:
            for _ in range(8):
                inner = int8_linear(states, up, norm=norm, gated=True)
                int8_linear(inner, down, residual_MO=states, out_MO=states)

        want = start.clone()
        chain(want)
        torch.cuda.synchronize()
        states = start.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain(states)
        for _ in range(3):
            states.copy_(start)
            graph.replay()
            assert torch.equal(states, want)
        assert want.isfinite().all()


def test_kernels_are_found_on_the_disk_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x, codes, scale = noise(2, 256, seed=1), codes_of(64, 256, INT8), scales_of(64)

    def run() -> torch.Tensor:
        return stream_linear(x, codes, tile=STREAMS["16"], scales=Scales(scale))

    want = run()
    nvrtc._kernel.cache_clear()
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("compiled again"))
    assert torch.equal(run(), want)


@pytest.mark.parametrize("model", ["demo:chat"])
@pytest.mark.parametrize("weights", ["int8"])
def test_the_same_bits_in_any_company_captured_too(model: str, weights: str) -> None:
    assert_same_in_company(model, range(2), 1, dtype="bfloat16", weight_format=weights)
