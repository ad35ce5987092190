"""The host's part of the kernel for some rows: cuts, the copy engine's maps, what goes where."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.errors import EngineFault, InternalError
from ridgeline.kernels import fp8_linear as fp8
from ridgeline.kernels import int8_linear as int8
from ridgeline.kernels import nvrtc, small_linear, tile_linear
from ridgeline.kernels.quantize_rows import quantize_rows_reference
from ridgeline.kernels.stream_linear import Scales
from ridgeline.kernels.tile_linear import (
    COLUMNS,
    COUNTERS,
    MOST_SHARED_BYTES,
    PARTIALS,
    columns_of,
    cut_of,
    part_of,
    shared_bytes,
    threads,
)
from ridgeline.kernels.tiles import (
    FILE,
    MAX_TILED,
    Place,
    Tile,
    bucket,
    find_tile,
    read_tiles,
    write_tiles,
)

H200 = 132
WIDE = Tile(128, 64, warps=8, stages=4, per_sm=1, cluster=2, wgmma=True)


class Driver:
    """Takes a tensor map's arguments as the driver does, and fills the map with sevens."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[dict[str, Any]] = []

    def cuTensorMapEncodeTiled(self, made: Any, kind: int, rank: int, *more: Any) -> int:
        address, sizes, strides, box, steps, interleave, swizzle, promotion, fill = more
        place = ctypes.cast(made, ctypes.c_void_p).value
        assert place is not None
        assert place % 64 == 0
        ctypes.memset(place, 7, 128)
        assert list(steps) == [1] * rank
        assert (interleave, swizzle, promotion, fill) == (0, 3, 2, 0)
        said = {"kind": kind, "at": address.value, "sizes": [*sizes], "strides": [*strides]}
        self.calls.append(said | {"box": [*box]})
        return self.code

    def cuGetErrorString(self, code: int, text: Any) -> int:
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(nvrtc, "cuda_driver", lambda: made)
    nvrtc.tensor_map.cache_clear()
    yield made
    nvrtc.tensor_map.cache_clear()


def test_a_map_of_rows_is_made_once_and_passed_by_value(driver: Driver) -> None:
    x = torch.zeros(40, 96, dtype=torch.float16)[:, :72]
    made = tile_linear.rows_map(x, 32)
    assert tile_linear.rows_map(x, 32) is made
    assert bytes(made) == b"\x07" * 128
    assert nvrtc._value(made) is made
    assert driver.calls == [
        {"kind": 6, "at": x.data_ptr(), "sizes": [72, 40], "strides": [192], "box": [64, 32]}
    ]


def test_gate_and_up_stand_in_eights(driver: Driver) -> None:
    w = torch.zeros(96, 64, dtype=torch.bfloat16)
    tile_linear.weight_map(w, WIDE, gated=False)
    tile_linear.weight_map(w, WIDE, gated=True)
    codes = w.to(torch.float8_e4m3fn)
    tile_linear.weight_map(codes, WIDE, gated=False)
    plain, gated, bytes_ = driver.calls
    assert (plain["kind"], plain["sizes"], plain["box"]) == (9, [64, 96], [64, 128])
    assert gated["sizes"] == [64, 8, 2, 6]
    assert gated["strides"] == [128, 48 * 128, 8 * 128]
    assert gated["box"] == [64, 8, 2, 8]
    assert (bytes_["kind"], bytes_["box"], bytes_["strides"]) == (0, [128, 128], [64])
    # Which row of W the rows of two boxes are, by the strides of the map.
    inside, half, group = (stride // 128 for stride in gated["strides"])
    rows = [g * group + h * half + i * inside for g in range(6) for h in (0, 1) for i in range(8)]
    assert sorted(rows) == list(range(96))
    assert rows[:16] == [*range(8), *range(48, 56)]


def test_a_map_that_the_driver_refuses(driver: Driver) -> None:
    driver.code = 1
    with pytest.raises(EngineFault, match="tensor map"):
        nvrtc.tensor_map(16, torch.bfloat16, (64, 8), (128,), (64, 8))


@pytest.mark.parametrize(
    ("rows", "block_m", "columns", "x_tiles"),
    [
        (1, 0, 16, 1),
        (17, 0, 32, 1),
        (65, 0, 96, 1),
        (200, 0, 256, 1),
        (300, 0, 192, 2),
        (512, 0, 256, 2),
        (256, 128, 128, 2),
        (130, 128, 96, 2),
        (40, 128, 64, 1),
    ],
)
def test_rows_of_x_in_a_tile(rows: int, block_m: int, columns: int, x_tiles: int) -> None:
    assert columns_of(rows, block_m) == columns
    tile = Tile(128, 64, warps=8, block_m=block_m, wgmma=True)
    cut = cut_of(tile, rows, 1000, 512, item=2, units=H200)
    assert (cut.columns, cut.x_tiles, cut.tiles) == (columns, x_tiles, 8 * x_tiles)


def test_how_steps_are_shared() -> None:
    def programs(**fields: Any) -> int:
        tile = Tile(128, 64, warps=8, wgmma=True, **fields)
        return cut_of(tile, 16, 4096, 4096, item=2, units=H200).programs

    assert programs() == programs(splits=2) == 32
    assert programs(per_sm=1) == H200
    assert programs(per_sm=2, cluster=2) == H200
    assert programs(cluster=2) == 16
    odd = cut_of(WIDE, 16, 100, 72, item=2, units=H200)
    assert (odd.tiles, odd.steps, odd.programs) == (1, 2, 2)
    assert cut_of(WIDE, 16, 4096, 4096, item=2, units=11).programs == 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"warps": 2}, "warpgroups"),
        ({"block_n": 64}, "bands"),
        ({"block_n": 512}, "bands"),
        ({"block_k": 32}, "blocks"),
        ({"block_k": 96}, "blocks"),
        ({"cluster": 4}, "eights"),
        ({"splits": 3}, "cluster along K"),
        ({"splits": 2, "per_sm": 1}, "cluster along K"),
        ({"splits": 2, "cluster": 2}, "cluster along K"),
        ({"splits": 2, "block_k": 512}, "a step of K"),
    ],
)
def test_tiles_that_cannot_be(wrong: dict[str, int], message: str) -> None:
    tile = Tile(**{"block_n": 128, "block_k": 64, "warps": 8, "wgmma": True} | wrong)  # type: ignore[arg-type]
    with pytest.raises(InternalError, match=message):
        cut_of(tile, 16, 1000, 512, item=2, units=H200)


def test_blocks_along_k_finish_eights_of_rows() -> None:
    def cut(rows: int, splits: int, stages: int = 8) -> Any:
        tile = Tile(64, 64, splits, stages=stages, wgmma=True)
        return cut_of(tile, rows, 1024, 3072, item=2, units=H200)

    assert cut(256, 8).columns == 8 * part_of(Tile(64, 64, 8), 256) == 256
    assert part_of(Tile(64, 64, 8), 32) == part_of(Tile(64, 64, 4), 16) == 8  # some finish none
    assert cut(32, 8).programs == 16
    with pytest.raises(InternalError, match="eights"):
        cut(96, 8)
    with pytest.raises(InternalError, match="fit into the ring"):
        cut(16, 8, stages=1)


def test_threads_and_memory_follow_the_tile() -> None:
    assert threads(WIDE, 256) == 384  # registers change hands
    assert threads(WIDE, 192) == 320
    assert threads(Tile(64, 64, warps=4), 256) == 192
    assert threads(Tile(256, 64, warps=8), 128) == 384
    ring, staging = 4 * (128 + 256) * 128, 2 * 32 * 68 * 4
    assert shared_bytes(WIDE, 256, 1, gated=False) == ring + staging + 4 * 16 + 16
    assert shared_bytes(WIDE, 256, 1, gated=True) < shared_bytes(WIDE, 256, 1, gated=False)
    split = Tile(128, 64, warps=8, stages=4, splits=2)
    assert shared_bytes(WIDE, 96, 1, gated=False) > shared_bytes(split, 96, 1, gated=False)
    assert shared_bytes(WIDE, 16, 1, gated=False) == 4 * 144 * 128 + staging // 2 + 80


def test_what_the_table_asks_for_fits() -> None:
    path = Path(tile_linear.__file__).with_name(FILE)
    for place, tile in read_tiles(path.read_text(encoding="utf-8")).items():
        if tile is None or not tile.wgmma or place.dtype == "int4":  # see test_int4_linear
            continue
        is_coded = place.dtype in (fp8.DTYPE, int8.DTYPE)
        item, gated = (1 if is_coded else 2), "gated" in place.kind
        assert "norm" not in place.kind
        for rows in range(place.rows // 2 + 1, place.rows + 1):
            cut = cut_of(
                tile, rows, place.outputs, place.inputs, item=item, units=H200, gated=gated
            )
            assert cut.columns in COLUMNS
            assert cut.shared_bytes <= MOST_SHARED_BYTES
            if cut.programs != cut.tiles:
                assert cut.programs * tile.cluster * tile.block_n * cut.columns <= PARTIALS
                assert cut.tiles * tile.cluster * tile.warps // 4 <= COUNTERS


def test_the_table_keeps_such_tiles() -> None:
    place = Place("card", "bfloat16", 4096, 4096, 512, "residual")
    text = write_tiles({place: WIDE}, {})
    assert read_tiles(text) == {place: WIDE}
    assert json.loads(text)["entries"][0]["tile"]["cluster"] == 2
    assert bucket(MAX_TILED) == MAX_TILED


def test_products_go_where_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is asked for, with all that stands beside the product."""
    asked: list[dict[str, Any]] = []

    def record(x: torch.Tensor, weight: torch.Tensor, **given: Any) -> torch.Tensor:
        asked.append(given)
        return x.new_zeros((x.shape[0], weight.shape[0]), dtype=torch.float32)

    monkeypatch.setattr(tile_linear, "tile_linear", record)
    x, w = torch.zeros(100, 64), torch.zeros(48, 64)
    small_linear.linear_by_tile(x, w, WIDE, gated=True, out_MO=x, pdl=False)
    given = {"tile": WIDE, "bias_N": None, "gated": True, "residual_MO": None, "pdl": False}
    assert len(asked) == 1
    assert asked[0].pop("out_MO") is x
    assert asked[0] == given
    norm = small_linear.InputNorm(torch.ones(64), 1e-6)
    with pytest.raises(InternalError, match="no norm"):
        small_linear.linear_by_tile(x, w, WIDE, norm=norm)


@pytest.mark.parametrize("fits", [True, False])
def test_e4m3_goes_where_the_table_says(monkeypatch: pytest.MonkeyPatch, fits: bool) -> None:
    rows = quantize_rows_reference(torch.randn(100, 64))
    weight = fp8.Fp8Matrix(torch.zeros(48, 64).to(torch.float8_e4m3fn), torch.ones(48))
    monkeypatch.setattr(fp8, "_own_tile", lambda *_: WIDE)
    monkeypatch.setattr(fp8, "can_tile", lambda *_, **__: fits)
    monkeypatch.setattr(fp8, "library_product", lambda *_: torch.ones(100, 48))
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(fp8, "tile_linear", lambda *_, **given: asked.append(given))
    residual = torch.full((100, 48), 2.0)
    y = fp8.fp8_product(rows, weight, torch.bfloat16, residual_MO=residual)
    assert len(asked) == int(fits)
    if fits:
        assert asked[0]["scales"] == Scales(weight.scale_N, rows.scale_M)
        assert asked[0]["residual_MO"] is residual
    else:
        assert torch.equal(y, torch.full_like(y, 3.0))


def test_a_cpu_has_no_such_kernel() -> None:
    x, w = (torch.zeros(n, 64, dtype=torch.bfloat16) for n in (16, 128))
    assert not tile_linear.can_tile(x, w)
    assert find_tile(Place("cpu", "bfloat16", 128, 64, 16, "plain")) is None
