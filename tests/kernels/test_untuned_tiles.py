"""Which tile do products get that nobody has tuned, and does it fit?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline.kernels import small_linear as ours
from ridgeline.kernels.stream_linear import ROOM_BYTES, groups_of
from ridgeline.kernels.stream_linear import shared_bytes as streamed_bytes
from ridgeline.kernels.tile_linear import columns_of, cut_of, shared_bytes
from ridgeline.kernels.tiles import Place, Tile, bucket, find_tile, is_measured
from ridgeline.kernels.untuned_tiles import LEAST, MOST_OUTPUTS, STREAM, untuned_tile

UNITS = 132
SIZES = (
    *((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),  # Llama-3.2-1B
    *((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)),  # Qwen3-4B
    *((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),  # Qwen2.5-7B
    *((1024, 2048), (1024, 1024), (10240, 8192), (57344, 8192), (8192, 28672), (32000, 4096)),
)


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_what_is_guessed_can_run(outputs: int, inputs: int) -> None:
    for rows in (1, 2, 4, 8, 16, 32, 64):
        for gated in (False, True):
            tile = untuned_tile(rows, outputs, inputs, gated=gated)
            assert tile is not None
            if tile.stream:
                groups = groups_of(
                    tile, rows, outputs, 2 * inputs, units=UNITS, gated=gated, rounds=False
                )
                assert groups.shared_bytes <= ROOM_BYTES
                continue
            assert tile.wgmma
            columns = columns_of(rows)
            programs = 2 if tile.per_sm else -(-outputs // 64) * tile.splits / UNITS
            assert programs <= 2
            room = ROOM_BYTES if programs <= 1 else ROOM_BYTES // 2
            assert shared_bytes(tile, columns, 1, gated=gated) <= room
            cut = cut_of(tile, rows, outputs, inputs, item=2, units=UNITS, gated=gated)
            assert cut.steps * 64 == inputs


def test_few_rows_take_one_tile_and_their_norm_along() -> None:
    for rows in (1, 8, 16):
        assert untuned_tile(rows, 6144, 2560, norm=True) == untuned_tile(rows, 2560, 9728) == STREAM
    assert streamed_bytes(STREAM, 16, pieces=1) <= ROOM_BYTES
    assert untuned_tile(32, 6144, 2560, norm=True) is None


def test_programs_meet_where_there_would_be_few() -> None:
    """As they were found to be the fastest, product by product, but for what one rule costs."""
    assert untuned_tile(32, 2048, 2048) == Tile(64, 64, splits=2, stages=16, wgmma=True)
    assert untuned_tile(64, 2048, 2048) == Tile(64, 64, splits=2, stages=13, wgmma=True)
    assert untuned_tile(32, 6144, 2560) == Tile(64, 64, splits=2, stages=8, wgmma=True)
    assert untuned_tile(32, 16384, 2048, gated=True) == Tile(64, 64, stages=8, wgmma=True)
    assert untuned_tile(64, 2560, 9728) == Tile(64, 64, stages=6, per_sm=2, wgmma=True)
    few = untuned_tile(64, 1024, 2048)
    assert few is not None
    assert few.splits == 4


def test_what_nobody_has_measured_is_the_librarys() -> None:
    assert untuned_tile(128, 6144, 2560) is None
    assert untuned_tile(1, LEAST - 64, 2048) is untuned_tile(1, 2048, LEAST - 64) is None
    assert untuned_tile(1, 2048, 2048 + 32) is None  # no whole steps
    logits = MOST_OUTPUTS + 8
    assert untuned_tile(8, logits, 2048) == STREAM
    assert untuned_tile(8, logits, 2048, norm=True) is untuned_tile(16, logits, 2048) is None


class OnCard:
    """A tensor of these sizes on a card, as far as a choice looks at it."""

    is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda")

    def __init__(self, *shape: int) -> None:
        self.shape = shape


@pytest.mark.parametrize("capable", [True, False])
def test_the_table_is_asked_first(monkeypatch: pytest.MonkeyPatch, capable: bool) -> None:
    """Also where it says that the library is faster; another generation has no rule."""
    monkeypatch.setattr(ours, "_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(ours, "has_warpgroup_products", lambda device: capable)
    monkeypatch.setattr("ridgeline.kernels.stream_linear.can_stream", lambda x, weight: True)

    def found(rows: int, outputs: int, inputs: int, **beside: bool) -> Tile | None:
        x: Any = OnCard(rows, inputs)
        weight: Any = OnCard(outputs, inputs)
        asked = (beside.get(name, False) for name in ("norm", "gated", "residual"))
        return ours._tile(x, weight, *asked)

    tuned = Place("NVIDIA H200", "bfloat16", 6144, 1024, bucket(16), "norm+gated")
    assert is_measured(tuned)
    assert untuned_tile(16, 6144, 1024, norm=True, gated=True) == STREAM
    assert found(16, 6144, 1024, norm=True, gated=True) is None
    assert found(5, 6144, 1024, norm=True, gated=True) == find_tile(replace(tuned, rows=8))
    guessed = found(5, 6144, 2560, norm=True)
    assert guessed == (STREAM if capable else None)
    assert found(5, 2560, 2560, norm=True, residual=True) is None  # nobody asks for this
