"""The search for tiles in whole steps takes what is faster there, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from bench.gpu import tune_chain
from bench.gpu.tune_chain import Choice, Search, Table, choices
from bench.gpu.tune_linear import LAYERS
from ridgeline.kernels.tile_linear import MOST_SHARED_BYTES, cut_of
from ridgeline.kernels.tiles import Place, Tile

OF_06B = {layer.name: layer for layer in LAYERS if layer.model == "0.6B"}
SLOW, FAST = Tile(64, 64, stages=3, wgmma=True), Tile(64, 64, stages=5, wgmma=True)


class PretendedStep:
    """A step that is the faster the more stages the tiles of its table have; each stage of a norm
    inside counts twice."""

    rows = 32

    def __init__(self, table: Table) -> None:
        self.table = table

    def seconds(self) -> float:
        total = 1.0
        for place, tile in self.table.items():
            if tile is not None:
                total -= 0.01 * tile.stages * (2 if "norm" in place.kind else 1)
        return total


def search(table: Table) -> Search:
    step: Any = PretendedStep(table)
    return Search(step, "a GPU", OF_06B, table, float("inf"), [])


def place_of(name: str, kind: str) -> Place:
    layer = OF_06B[name]
    return Place("a GPU", "bfloat16", layer.outputs, layer.inputs, 32, kind)


def test_the_fastest_of_each_product_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    table: Table = {place_of("o", "residual"): FAST}
    found = search(table)
    with_norm = Tile(64, 64, stages=4, stream=True)
    found.run(
        {
            "o": [Choice("o", None), Choice("o", SLOW)],
            "qkv": [Choice("qkv", None), Choice("qkv", FAST), Choice("qkv", with_norm, norm=True)],
            "down": [Choice("down", SLOW), Choice("down", FAST)],
        }
    )
    assert table[place_of("o", "residual")] == FAST
    assert table[place_of("qkv", "norm")] == with_norm
    assert table[place_of("down", "residual")] == FAST
    assert {row["turn"] for row in found.rows} == set(range(tune_chain.PASSES))
    assert "us with qkv" in capsys.readouterr().out


def test_a_norm_apart_takes_the_place_of_one_inside() -> None:
    table: Table = {place_of("qkv", "norm"): None}
    before = search(table).put(Choice("qkv", FAST))
    assert table[place_of("qkv", "norm")] is None
    assert table[place_of("qkv", "plain")] == FAST
    assert before == {place_of("qkv", "norm"): None, place_of("qkv", "plain"): None}


def test_a_candidate_that_fails_leaves_the_table_as_it_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table: Table = {place_of("o", "residual"): SLOW}
    found = search(table)

    def fails() -> float:
        if table[place_of("o", "residual")] == FAST:
            raise RuntimeError("no room")
        return 1.0

    found.step.seconds = fails  # type: ignore[method-assign]
    found.run({"o": [Choice("o", FAST)]})
    assert table == {place_of("o", "residual"): SLOW}
    assert "no room" in capsys.readouterr().out


@pytest.mark.parametrize("rows", [8, 32, 64, 128, 256])
def test_candidates_can_be_cut(rows: int) -> None:
    for layer in OF_06B.values():
        some = list(choices(layer, rows))
        assert some
        assert len(set(some)) == len(some)
        for kind, tile in some:
            if tile.wgmma:
                cut = cut_of(
                    tile, rows, kind.outputs, kind.inputs, item=2, units=132, gated=kind.gated
                )
                assert cut.shared_bytes <= MOST_SHARED_BYTES
                assert not kind.norm
