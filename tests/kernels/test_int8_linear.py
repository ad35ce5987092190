"""The host's part of products with int8 weights: what is asked of which kernel, that it fits, and
the passes beside it, which run through Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.errors import InternalError
from ridgeline.kernels import int8_layout, int8_linear
from ridgeline.kernels.fp8_linear import DTYPE as FP8_DTYPE
from ridgeline.kernels.int8_layout import (
    GpuInt8,
    InvariantGpuInt8,
    WideInt8,
    int8_rows,
    int8_rows_reference,
)
from ridgeline.kernels.int8_linear import (
    DTYPE,
    MAX_FEW,
    Int8Matrix,
    fits_int8,
    untuned_stream,
    untuned_tile,
)
from ridgeline.kernels.quantize_rows import QuantizedRows, quantize_rows, quantize_rows_reference
from ridgeline.kernels.quantized_matrix import QuantizedMatrix, outline
from ridgeline.kernels.small_linear import Fusion, InputNorm
from ridgeline.kernels.stream_linear import INT8, ROOM_BYTES, groups_of, kept_bytes, shared_bytes
from ridgeline.kernels.tile_linear import COUNTERS, PARTIALS, cut_of
from ridgeline.kernels.tiles import FILE, Tile, read_tiles
from tests.kernels.references import dequantize_int8, int8_linear_reference, rounded_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")
rounding = pytest.importorskip("ridgeline.kernels.quantize_rows_triton")
looking_up = pytest.importorskip("ridgeline.kernels.int8_rows_triton")

H200 = 132
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3}  # of the largest number: a rounding or two
# Of 0.6B, 1B, 8B and 70B models, and odd ones; gate and up are one matrix.
SHAPES = [
    (4096, 1024, False),
    (1024, 2048, False),
    (6144, 1024, True),
    (1024, 3072, False),
    (151936, 1024, False),
    (6144, 4096, False),
    (4096, 4096, False),
    (28672, 4096, True),
    (4096, 14336, False),
    (128256, 4096, False),
    (57344, 8192, True),
    (8192, 28672, False),
    (16, 128, True),
    (48, 256, False),
]
# NumPy, which the interpreter computes with, warns where a GPU gives infinity or NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, dtype)


def canonical(outputs: int, inputs: int, seed: int = 3) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scale = torch.rand(outputs, 1, generator=generator) * 1e-3 + 1e-4
    return QuantizedMatrix(codes.to(DEVICE), scale.to(DEVICE), None, inputs, 8, 0)


# ---------------------------------------------------------------------- which kernel


@pytest.mark.parametrize(("outputs", "inputs", "gated"), SHAPES)
def test_guesses_fit(outputs: int, inputs: int, gated: bool) -> None:
    assert fits_int8(outputs, inputs)
    tile = untuned_stream(outputs, inputs, H200, gated=gated)
    for rows, rounds in ((1, True), (8, True), (3, False), (16, False)):
        cut = groups_of(tile, rows, outputs, inputs, units=H200, gated=gated, rounds=rounds)
        assert cut.shared_bytes <= ROOM_BYTES
        assert -(-cut.count // cut.each) <= H200
    for rows in (17, 32, 33, 64, 65, 100, 128, 129, 200, 256, 300, 1024, 8192):
        tile = untuned_tile(rows, outputs, inputs, H200, gated=gated)
        whole = cut_of(tile, rows, outputs, inputs, item=1, units=H200, gated=gated)
        assert whole.shared_bytes <= ROOM_BYTES
        assert tile.stages >= 3
        if whole.programs != whole.tiles:
            assert whole.programs * tile.cluster * tile.block_n * whole.columns <= PARTIALS
            assert whole.tiles * tile.cluster * tile.warps // 4 <= COUNTERS


def test_guesses_keep_the_device_busy() -> None:
    """The busiest program has little more than its share of the rows of W."""
    for outputs, inputs, gated in SHAPES[:12]:
        tile = untuned_stream(outputs, inputs, H200, gated=gated)
        cut = groups_of(tile, 1, outputs, inputs, units=H200, gated=gated, rounds=True)
        share = outputs / H200
        assert cut.each * tile.block_n <= max(1.6 * share, 32)
    assert untuned_tile(64, 4096, 4096, H200, gated=False).splits == 2
    assert untuned_tile(64, 1024, 2048, H200, gated=False).splits == 4
    assert untuned_tile(256, 28672, 4096, H200, gated=True).per_sm == 1
    assert untuned_tile(4096, 28672, 4096, H200, gated=True).per_sm == 0


def test_what_the_table_asks_of_streams_fits() -> None:
    path = Path(int8_linear.__file__).with_name(FILE)
    table = read_tiles(path.read_text(encoding="utf-8"))
    ours = (DTYPE, FP8_DTYPE, "bfloat16")  # int4 has a kernel of its own
    known = [(place, tile) for place, tile in table.items() if place.dtype in ours]
    asked = [(place, tile) for place, tile in known if tile is not None and tile.stream]
    assert any(place.dtype == DTYPE for place, _ in asked)
    for place, tile in asked:
        is_coded = place.dtype in (DTYPE, FP8_DTYPE)
        for rows in range(place.rows // 2 + 1, place.rows + 1):
            cut = groups_of(
                tile,
                rows,
                place.outputs,
                place.inputs * (1 if is_coded else 2),
                units=H200,
                gated="gated" in place.kind,
                rounds=is_coded and rows <= MAX_FEW,
            )
            assert cut.shared_bytes <= ROOM_BYTES, (place, rows)


def test_shapes_that_do_not_fit() -> None:
    assert not fits_int8(0, 128)
    assert not fits_int8(24, 128)  # gate and up of 12 outputs
    assert not fits_int8(32, 96)
    assert not fits_int8(32, 1 << 18)  # sums that 32 bits do not hold


@pytest.mark.parametrize("rows", [1, 8])
def test_what_a_program_keeps(rows: int) -> None:
    tile = Tile(32, 64, warps=8, stages=3, stream=True)
    few = groups_of(tile, rows, 4096, 4096, units=H200, gated=False, rounds=True)
    assert (few.each, few.kept) == (1, 0)
    many = groups_of(tile, rows, 28672, 4096, units=H200, gated=True, rounds=True)
    assert (many.count, many.each) == (896, 7)
    assert many.kept == kept_bytes(tile, rows, 4096) == rows * 4096 // 128 * 132
    sums = 8 * 32 * 9 * 4
    assert many.shared_bytes == shared_bytes(tile, rows, pieces=2) + sums + many.kept
    before = groups_of(tile, rows, 28672, 4096, units=H200, gated=True, rounds=False)
    assert before.kept == 0
    # Nothing is kept where a second program would not fit beside it any more.
    half = Tile(64, 64, warps=4, stages=2, per_sm=2, stream=True)
    cut = groups_of(half, rows, 28672, 4096, units=H200, gated=True, rounds=True)
    assert (cut.kept > 0) is (rows == 1)
    assert 2 * cut.shared_bytes <= ROOM_BYTES
    with pytest.raises(InternalError, match="pairs"):
        groups_of(Tile(48, 64, stream=True), 1, 96, 128, units=H200, gated=True, rounds=True)


class Asked:
    """Stands for both kernels; remembers what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        self.calls: list[tuple[str, torch.Tensor, dict[str, Any]]] = []
        for name in ("stream_linear", "tile_linear"):
            monkeypatch.setattr(module, name, self.taking(name))
        monkeypatch.setattr(module, "multiprocessors", lambda _: H200)
        monkeypatch.setattr(module, "_device_name", lambda _: "card")

    def taking(self, name: str) -> Any:
        def take(x: torch.Tensor, codes: torch.Tensor, **given: Any) -> torch.Tensor:
            self.calls.append((name, x, given))
            out = given.get("out_MO")
            return x.new_zeros(x.shape[0], codes.shape[0]) if out is None else out

        return take


def test_a_few_rows_are_rounded_in_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, int8_linear)
    weight = Int8Matrix(torch.zeros(256, 128, dtype=INT8), torch.ones(256))
    x, norm = noise(4, 128, dtype=torch.bfloat16).cpu(), InputNorm(torch.ones(128), 1e-5)
    residual = torch.zeros(4, 128)
    int8_linear.int8_linear(x, weight, norm=norm, gated=True, residual_MO=residual, out_MO=residual)
    ((name, given, beside),) = asked.calls
    assert (name, given is x, beside["norm"] is norm) == ("stream_linear", True, True)
    assert beside["gated"]
    assert beside["residual_MO"] is beside["out_MO"] is residual
    assert beside["scales"].x_M is None


@pytest.mark.parametrize(
    ("rows", "dtype", "kernel", "launches"),
    [
        (4, torch.float16, "stream_linear", 1),
        (12, torch.bfloat16, "stream_linear", 1),
        (40, torch.bfloat16, "tile_linear", 1),
        (9000, torch.bfloat16, "tile_linear", 2),
    ],
)
def test_more_rows_are_rounded_before(
    monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype, kernel: str, launches: int
) -> None:
    asked = Asked(monkeypatch, int8_linear)
    weight = Int8Matrix(torch.zeros(256, 128, dtype=INT8), torch.ones(256))
    x = noise(rows, 128, dtype=dtype).cpu()
    total = torch.ones_like(x)
    norm = InputNorm(torch.ones(128), 1e-5)
    y = int8_linear.int8_linear(x, weight, norm=norm, sum_MK=total)
    assert (y.shape, y.dtype) == ((rows, 256), dtype)
    assert torch.equal(total, 1 + x)
    want = quantize_rows_reference(total, norm=norm, dtype=INT8)
    assert [name for name, _, _ in asked.calls] == [kernel] * launches
    got = torch.cat([codes for _, codes, _ in asked.calls])
    assert torch.equal(got, want.codes_MK)
    scales = torch.cat([beside["scales"].x_M for _, _, beside in asked.calls])
    assert torch.equal(scales, want.scale_M)
    assert sum(beside["out_MO"].shape[0] for _, _, beside in asked.calls) == rows


def test_no_rows_are_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, int8_linear)
    weight = Int8Matrix(torch.zeros(256, 128, dtype=INT8), torch.ones(256))
    x = torch.zeros(0, 128, dtype=torch.bfloat16)
    assert int8_linear.int8_linear(x, weight, gated=True).shape == (0, 128)
    assert int8_linear.invariant_int8_linear(x, weight).shape == (0, 256)
    assert not asked.calls


def test_rows_that_kernels_cannot_read_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, int8_linear)
    weight = Int8Matrix(torch.zeros(256, 128, dtype=INT8), torch.ones(256))
    odd = torch.randn(128, 3).to(torch.bfloat16).T
    int8_linear.int8_linear(odd, weight)
    ((_, given, _),) = asked.calls
    assert given.is_contiguous()
    assert torch.equal(given, odd)


# ---------------------------------------------------------------------- the numbers


def test_the_reference_rounds_each_operation() -> None:
    matrix = canonical(64, 384)
    weight = Int8Matrix((matrix.codes ^ 128).view(INT8), matrix.scale.flatten())
    assert torch.equal(dequantize_int8(weight), matrix.dequantize())
    rows = quantize_rows_reference(noise(5, 384), dtype=INT8)
    bias = noise(64, seed=4)
    got = int8_linear_reference(rows, weight, torch.float32, bias_N=bias)
    x = rows.codes_MK.double() * rows.scale_M.double()[:, None]
    want = x @ (weight.codes_NK.double() * weight.scale_N.double()[:, None]).T + bias.double()
    assert (got - want).abs().max() <= 1e-6 * want.abs().max()


@pytest.mark.parametrize("beside", ["nothing", "norm", "sum and norm", "silu"])
@pytest.mark.parametrize(("rows", "size"), [(1, 128), (5, 200)])
def test_rounding_to_int8(beside: str, rows: int, size: int) -> None:
    silu = beside == "silu"
    x = noise(rows, size * (2 if silu else 1), seed=1)
    norm = InputNorm(noise(size, seed=2), 1e-5) if "norm" in beside else None
    states = [noise(rows, size, seed=3) if "sum" in beside else None for _ in range(2)]
    given: dict[str, Any] = {"silu": silu, "norm": norm, "dtype": INT8}
    want = quantize_rows_reference(x, residual_MK=states[0], **given)
    got = rounding.quantize_rows_triton(x, residual_MK=states[1], **given)
    assert got.codes_MK.dtype == INT8
    assert torch.allclose(got.scale_M, want.scale_M, rtol=1e-5)
    off = (got.codes_MK.int() - want.codes_MK.int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() <= 0.02
    assert got.codes_MK.int().abs().amax(1).eq(127).all()
    if states[0] is not None and states[1] is not None:
        assert torch.equal(states[0], states[1])


@pytest.mark.parametrize("run", [quantize_rows_reference, rounding.quantize_rows_triton])
def test_broken_rows_have_scales_that_say_so(run: Any) -> None:
    x = noise(4, 64)
    x[0, 3], x[1, 5], x[2] = torch.nan, -torch.inf, 0.0
    got = run(x, dtype=INT8)
    assert got.scale_M[0].isnan()
    assert got.scale_M[1].isinf()
    assert not got.codes_MK[2].any()
    assert got.scale_M[2] > 0
    assert got.scale_M[3].isfinite()


def test_rounding_finds_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x = noise(3, 64)
    rows = quantize_rows(x, dtype=INT8)
    assert isinstance(rows, QuantizedRows)
    assert rows.codes_MK.dtype == INT8
    back = rows.codes_MK.float() * rows.scale_M[:, None]
    assert (back - x).abs().max() <= 0.51 * rows.scale_M.max()


def test_pieces_are_rounded_apart() -> None:
    x = noise(3, 256)
    x[1, :128] *= 1e4
    x[2, 128:] = 0.0
    back = rounded_reference(x, INT8)
    for begin in (0, 128):
        part = slice(begin, begin + 128)
        limit = x[:, part].abs().amax(1, keepdim=True) / 254 * 1.001
        assert ((back - x)[:, part].abs() <= limit).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_looking_up_rows(dtype: torch.dtype) -> None:
    matrix = canonical(40, 144)
    codes, scale = (matrix.codes ^ 128).view(INT8), matrix.scale.flatten()
    ids = torch.tensor([39, 0, 7, 7], device=DEVICE)
    want = matrix.dequantize()[ids].to(dtype)
    assert torch.equal(int8_rows_reference(codes, scale, ids, dtype), want)
    assert torch.equal(looking_up.int8_rows_triton(codes, scale, ids, dtype, pdl=False), want)
    assert torch.equal(int8_rows(codes, scale, ids, dtype), want)
    assert looking_up.int8_rows_triton(codes, scale, ids[:0], dtype).shape == (0, 144)


# ---------------------------------------------------------------------- the layout


def test_what_a_home_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def like(bits: int = 8, group: int = 0, *, zero: bool = False, inputs: int = 256) -> Any:
        return outline(
            64,
            inputs,
            bits=bits,
            group=group,
            scale_dtype=torch.bfloat16,
            has_zero=zero,
            device=torch.device("cpu"),
        )

    for layout in (GpuInt8(), InvariantGpuInt8()):
        assert not layout.takes(like(), torch.bfloat16)  # no such GPU here
        monkeypatch.setattr(int8_layout, "has_int8", lambda _: True)
        assert layout.takes(like(), torch.bfloat16)
        assert layout.takes(like(), torch.float16)
        assert not layout.takes(like(), torch.float32)
        assert not layout.takes(like(bits=4), torch.bfloat16)
        assert not layout.takes(like(group=128), torch.bfloat16)
        assert not layout.takes(like(zero=True), torch.bfloat16)
        assert not layout.takes(like(inputs=200), torch.bfloat16)
        monkeypatch.undo()


@pytest.mark.parametrize("layout", [GpuInt8(), InvariantGpuInt8()], ids=["fast", "invariant"])
def test_a_home_keeps_every_bit(layout: GpuInt8) -> None:
    matrix = canonical(48, 128)
    kept = layout.keep(matrix)
    assert sum(t.nbytes for t in kept.values()) == matrix.nbytes
    back = layout.matrix(kept)
    assert torch.equal(back.codes, matrix.codes)
    assert torch.equal(back.scale, matrix.scale)
    assert torch.equal(back.dequantize(), matrix.dequantize())
    ids = torch.tensor([5, 47], device=DEVICE)
    exact = matrix.dequantize()
    assert torch.equal(layout.rows(kept, ids, torch.float32), exact[ids])
    assert torch.equal(layout.columns(kept, ids), exact[:, ids])


def test_a_home_asks_for_what_kernels_can_store(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def record(x: torch.Tensor, weight: Int8Matrix, **given: Any) -> torch.Tensor:
        asked.append({"outputs": weight.codes_NK.shape[0], **given})
        y = x.float() @ dequantize_int8(weight).T
        out = given.get("out_MO")
        return y.to(x.dtype) if out is None else out.copy_(y)

    monkeypatch.setattr(int8_layout, "int8_linear", record)
    layout, matrix = GpuInt8(), canonical(48, 128)
    kept, x = layout.keep(matrix), noise(3, 128)
    want = x @ matrix.dequantize().T
    for outputs, whole in ((48, False), (40, False), (45, True)):
        out = x.new_full((3, outputs), torch.nan)
        assert layout.linear_into(x, kept, out) is out
        assert torch.allclose(out, want[:, :outputs], rtol=1e-5, atol=1e-6)
        assert asked[-1]["outputs"] == (48 if whole else outputs)
        assert (asked[-1]["out_MO"] is out) is not whole
    residual = torch.zeros(3, 48, dtype=torch.bfloat16, device=DEVICE)
    half = x.to(torch.bfloat16)
    assert layout.fused(half, kept, None, Fusion(residual_TO=residual)) is residual
    odd = torch.zeros(3, 49, dtype=torch.bfloat16, device=DEVICE)[:, :48]
    assert layout.fused(half, kept, None, Fusion(residual_TO=odd)) is None
    assert layout.fused(half, kept, None, Fusion(of_gated=True)) is None
    assert layout.fused(half[:0], kept, None, Fusion()) is None
    assert InvariantGpuInt8().fused(half, kept, None, Fusion()) is None


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_become_wide(rows: int, dtype: torch.dtype) -> None:
    """Of other GPUs: x is not rounded."""
    layout, matrix = WideInt8(), canonical(48, 96)
    assert DEVICE == "cuda" or not layout.takes(matrix, torch.bfloat16)
    kept, x, bias = (
        layout.keep(matrix),
        noise(rows, 96, dtype=dtype),
        noise(48, seed=2, dtype=dtype),
    )
    want = x.float() @ matrix.dequantize().T
    limit = BOUND[dtype] * max(1.0, float(want.abs().max()))
    assert (layout.linear(x, kept, bias).float() - want - bias.float()).abs().max() <= limit
    for outputs in (48, 45):
        out = torch.full((rows, outputs), torch.nan, device=DEVICE)
        assert layout.linear_into(x, kept, out) is out
        assert (out.float() - want[:, :outputs]).abs().max() <= limit
    assert layout.fused(x, kept, None, Fusion()) is None
