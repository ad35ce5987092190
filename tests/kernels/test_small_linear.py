"""Small linear layers equal their reference for every way of cutting the work; in bfloat16 they err
at most twice as much as PyTorch.

Without a GPU they run through Triton's interpreter, in float32 and float16 and small shapes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from ridgeline.errors import ConfigError, InternalError
from ridgeline.kernels.launching import Workspace, make_workspace
from ridgeline.kernels.rms_norm import rms_norm
from ridgeline.kernels.small_linear import InputNorm, small_linear
from ridgeline.kernels.tile_linear import MOST_ROWS
from ridgeline.kernels.tiles import (
    FILE,
    MAX_TILED,
    Place,
    Tile,
    bucket,
    find_tile,
    kind_of,
    read_tiles,
    write_tiles,
)
from tests.kernels.references import small_linear_reference
from tests.thinning import SELDOM

# A GPU if there is one, else the interpreter, which is chosen when the kernels are decorated.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")
ours = pytest.importorskip("ridgeline.kernels.small_linear_triton")

EPS = 1e-5
DTYPES = [torch.float32, torch.float16]
BOUND = {torch.float32: 2e-6, torch.float16: 1e-3}  # of the largest number: a rounding or two
NORMED = 4  # times as much where normed rows are rounded and then weighed by a gate
# NumPy, which the interpreter computes with, warns where a GPU gives infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VECTOR = Tile(8, 32, dot=False)
DOT = Tile(16, 16)
TILES = {
    "vector": VECTOR,
    "vector in registers": dataclasses.replace(VECTOR, stages=1),
    "vector, split": dataclasses.replace(VECTOR, splits=3),
    "vector, all over": dataclasses.replace(VECTOR, per_sm=1, stages=1),
    "dot": DOT,
    "dot, 8 rows": dataclasses.replace(DOT, least_rows=8, stages=1),
    "dot, split": dataclasses.replace(DOT, splits=3),
    "dot, more splits than steps": dataclasses.replace(DOT, splits=32),
    "dot, all over": dataclasses.replace(DOT, per_sm=1),
    "dot, all over and many": dataclasses.replace(DOT, per_sm=4),
    "copy engine": dataclasses.replace(DOT, tma=True),
    "copy engine, all over": dataclasses.replace(DOT, tma=True, per_sm=2),
    "vector by copy engine": dataclasses.replace(VECTOR, tma=True, splits=2),
}


def noise(
    *shape: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return made.to(DEVICE, dtype)


def strided(x: torch.Tensor, gap: int = 5) -> torch.Tensor:
    """The same rows, further apart, with NaN between them."""
    wide = x.new_full((x.shape[0], x.shape[1] + gap), torch.nan)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def aligned(x: torch.Tensor) -> torch.Tensor:
    """The same, with rows that begin at multiples of 16 bytes, as the copy engine wants them."""
    return strided(x, 16 + -x.shape[1] % 8)


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact.double()).abs().max())


def assert_near(got: torch.Tensor, want: torch.Tensor, times: int = 1) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert error(got, want) <= times * BOUND[got.dtype] * max(1.0, float(want.abs().max()))


def assert_as_good(got: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """Twice their error in the worst place, and in the mean."""
    assert error(got, exact) <= 2 * error(theirs, exact)
    assert (got - exact).norm() <= 1.1 * (theirs - exact).norm()


def poisoned(partials: int = 1 << 16, tiles: int = 64) -> Workspace:
    space = make_workspace(torch.device(DEVICE), partials, tiles)
    space.partial_P.fill_(torch.nan)
    return space


def arguments(
    rows: int, outputs: int, inputs: int, *, fused: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Of small_linear; `fused` says what there is beside the product."""
    made: dict[str, Any] = {
        "x_MK": strided(noise(rows, inputs, dtype=dtype)),
        "weight_NK": aligned(noise(outputs, inputs, seed=1, dtype=dtype, scale=2 * inputs**-0.5)),
        "gated": "gated" in fused,
    }
    width = outputs // 2 if made["gated"] else outputs
    if "norm" in fused:
        made["norm"] = InputNorm(noise(inputs, seed=2, dtype=dtype), EPS)
    if "residual" in fused:
        made["residual_MO"] = strided(noise(rows, width, seed=3, dtype=dtype))
    if "bias" in fused:
        made["bias_N"] = noise(outputs, seed=4, dtype=dtype)
    return made


# ---------------------------------------------------------------------- every cut


ALL = "norm gated bias residual"


CASES: list[Any] = [
    (1, 38, 70, ALL, torch.float32),
    (1, 16, 128, "", torch.float16),
    (3, 22, 70, ALL, torch.float16),
    (17, 32, 64, "", torch.float32),
]
FAST = {name: CASES[2 if tile.dot else 0] for name, tile in TILES.items()}
FAST |= {"vector": CASES[1], "dot, all over": CASES[3], "dot": CASES[0]}


@pytest.mark.parametrize(
    ("name", "rows", "outputs", "inputs", "fused", "dtype"),
    [
        pytest.param(name, *case, marks=() if case == FAST[name] else SELDOM)
        for case in CASES
        for name, tile in TILES.items()
        if case[0] == 1 or tile.dot
    ],
)
def test_every_cut(
    name: str, rows: int, outputs: int, inputs: int, fused: str, dtype: torch.dtype
) -> None:
    tile = TILES[name]
    given = arguments(rows, outputs, inputs, fused=fused, dtype=dtype)
    want = small_linear_reference(**given)
    space, runs = poisoned(), []
    for _ in range(2):  # the second time on what the first has left
        out = torch.full_like(want, torch.nan)
        ours.small_linear_triton(**given, out_MO=out, workspace=space, tile=tile)
        assert_near(out, want, NORMED if "norm" in fused else 1)
        runs.append(out)
    assert torch.equal(*runs)
    assert not space.arrivals_A.any()


@pytest.mark.parametrize("fused", ["norm", "bias", "residual", "gated", "norm residual"])
@pytest.mark.parametrize("tile", [VECTOR, TILES["vector, split"], TILES["dot, all over"]])
def test_each_option_alone(fused: str, tile: Tile) -> None:
    given = arguments(1, 24, 96, fused=fused, dtype=torch.float32)
    want = small_linear_reference(**given)
    assert_near(ours.small_linear_triton(**given, tile=tile), want)
    assert_near(small_linear(**given), want)


def test_programs_share_all_steps_evenly() -> None:
    for tile, rows, outputs, inputs in cuts():
        cut = ours.cut_work(tile, rows, outputs, inputs, 7)
        total = cut.tiles * cut.steps
        assert (cut.tiles - 1) * tile.block_n < outputs <= cut.tiles * tile.block_n
        if tile.per_sm:
            assert (cut.programs - 1) * cut.share < total <= cut.programs * cut.share
            assert cut.programs <= 7 * tile.per_sm
        else:
            assert cut.programs % cut.tiles == 0
            splits = cut.programs // cut.tiles
            assert (splits - 1) * cut.share < cut.steps <= splits * cut.share
            assert splits <= tile.splits
        assert cut.merges or cut.steps <= cut.share


def cuts() -> Iterator[tuple[Tile, int, int, int]]:
    for tile in TILES.values():
        for outputs, inputs in [(1, 1), (33, 70), (1024, 3072), (300, 16)]:
            yield tile, 1, outputs, inputs


def test_in_place_and_to_another_dtype() -> None:
    x, weight = noise(2, 40, dtype=torch.float16), noise(9, 40, seed=1, dtype=torch.float16)
    residual = noise(2, 9, seed=2, dtype=torch.float16)
    want = small_linear_reference(x, weight, residual_MO=residual)
    run = ours.small_linear_triton
    wide = run(x, weight, out_MO=torch.full((2, 9), torch.nan, device=DEVICE), tile=DOT)
    assert_near(wide, x.float() @ weight.float().T)
    assert run(x, weight, residual_MO=residual, out_MO=residual, tile=DOT) is residual
    assert_near(residual, want)
    assert run(x[:0], weight, tile=DOT).shape == (0, 9)


def test_gate_that_is_far_below_zero() -> None:
    x, weight = torch.full_like(noise(1, 16), 10.0), torch.full_like(noise(4, 16), -100.0)
    weight[2:] = 1.0  # silu(-16000) * 160
    for tile in (VECTOR, DOT):
        assert not ours.small_linear_triton(x, weight, gated=True, tile=tile).any()


def test_norm_of_large_numbers_fits_float16() -> None:
    x = noise(2, 32, dtype=torch.float16, scale=1e4)
    weight, gain = noise(5, 32, seed=1).half(), torch.full_like(x[0], 30.0)
    norm = InputNorm(gain, EPS)
    got = ours.small_linear_triton(x, weight, norm=norm, tile=DOT)
    assert_near(got, small_linear_reference(x, weight, norm=norm), NORMED)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tile": TILES["vector, split"], "workspace": "small"}, "workspace"),
        ({"x_MK": "two rows"}, "tensor cores"),
        ({"gated": True, "weight_NK": "odd"}, "one height"),
        ({"bias_N": "short"}, "bias"),
        ({"out_MO": "short"}, "shape of y"),
        ({"x_MK": "narrow"}, "agree"),
    ],
)
def test_refuses(changes: dict[str, Any], reason: str) -> None:
    made = {
        "small": make_workspace(torch.device(DEVICE), 8, 8),
        "two rows": noise(2, 96),
        "odd": noise(25, 96),
        "short": noise(1, 3),
        "narrow": noise(1, 95),
    }
    given: dict[str, Any] = {"x_MK": noise(1, 96), "weight_NK": noise(24, 96), "tile": VECTOR}
    given |= {name: made[v] if isinstance(v, str) else v for name, v in changes.items()}
    with pytest.raises(InternalError, match=reason):
        ours.small_linear_triton(**given)


# ---------------------------------------------------------------------- the table


PLACE = Place("A Card", "bfloat16", 64, 32, 8, "norm+gated")


def test_buckets_and_kinds() -> None:
    assert [bucket(rows) for rows in (1, 2, 3, 33, 64)] == [1, 2, 4, 64, 64]
    assert kind_of() == "plain"
    assert kind_of(residual=True, norm=True) == "norm+residual"
    assert kind_of(gated=True) == "gated"


def test_the_table_is_read_as_written() -> None:
    other = dataclasses.replace(PLACE, rows=16)
    table = {PLACE: TILES["dot, all over"], other: None}
    text = write_tiles(table, {other: '"us": 1.5'})
    assert read_tiles(text) == table
    assert [line.count('"us"') for line in text.splitlines()] == [0, 0, 1, 0]
    assert text == write_tiles(dict(reversed(table.items())), {other: '"us": 1.5'})


def test_the_table_of_the_package_is_sound() -> None:
    text = Path(ours.__file__).with_name(FILE).read_text(encoding="utf-8")
    for place, tile in read_tiles(text).items():
        most = MOST_ROWS if place.dtype == "int8" else MAX_TILED
        assert place.rows == bucket(place.rows) <= most
        assert tile is None or tile.dot or place.rows == 1
        assert find_tile(place) == tile
    assert find_tile(PLACE) is None


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"entries": [{}]}', '{"entries": [{"tile": {"block": 1}}]}', '{"entries": [3]}'],
)
def test_a_broken_table_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="here"):
        read_tiles(text, "here")


# ---------------------------------------------------------------------- the tuner


def test_the_tuner_runs_dry(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "bench" / "gpu" / "tune_linear.py"
    command = [sys.executable, str(script), "--dry", "--out", str(tmp_path), "--budget-s", "60"]
    command += ["--jobs", "1"]
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" in done.stdout  # the candidate that is planted there
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["what"] for row in rows} >= {"library", "ours"}
    assert read_tiles((tmp_path / FILE).read_text(encoding="utf-8"))


# ---------------------------------------------------------------------- bfloat16 on a GPU


@pytest.mark.usefixtures("exact_float32")
class TestBfloat16:
    """Large shapes; the exact result is float32 of the same bfloat16 inputs."""

    pytestmark = gpu

    LARGE = (
        Tile(8, 1024, dot=False, stages=1),
        Tile(8, 1024, dot=False, splits=2),
        Tile(16, 512, dot=False, warps=2, per_sm=4),
        Tile(64, 128, stages=4, per_sm=2),
        Tile(64, 128, stages=4, splits=2, least_rows=8, early=False),
        Tile(64, 128, stages=4, splits=2, tma=True),
        Tile(128, 64, stages=4, per_sm=1, tma=True, ahead=2),
    )

    @staticmethod
    def made(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
        return noise(*shape, seed=seed, dtype=torch.bfloat16, scale=scale)

    @pytest.mark.parametrize("tile", LARGE)
    @pytest.mark.parametrize("rows", [1, 2, 8, 16, 33, 64])
    @pytest.mark.parametrize(
        ("outputs", "inputs"), [(6144, 4096), (1024, 3072), (24576, 1024), (998, 1000)]
    )
    def test_small_linear(self, rows: int, outputs: int, inputs: int, tile: Tile) -> None:
        if rows > 1 and not tile.dot:
            pytest.skip("for one row")
        x, weight = self.made(rows, inputs), self.made(outputs, inputs, seed=1, scale=0.02)
        norm = InputNorm(self.made(inputs, seed=2), EPS)
        residual = self.made(rows, outputs, seed=3)
        space, run = make_workspace(torch.device("cuda")), ours.small_linear_triton
        exact = x.float() @ weight.float().T
        got = run(x, weight, workspace=space, tile=tile)
        assert_as_good(got, functional.linear(x, weight), exact)
        exact = functional.linear(rms_norm(x.float(), norm.weight_K.float(), EPS), weight.float())
        theirs = functional.linear(rms_norm(x, norm.weight_K, EPS), weight) + residual
        runs = [
            run(x, weight, norm=norm, residual_MO=residual, workspace=space, tile=tile, pdl=pdl)
            for pdl in (False, True, True)
        ]
        assert_as_good(runs[0], theirs, exact + residual)
        assert torch.equal(runs[0], runs[1])
        assert torch.equal(runs[0], runs[2])
        gate, up = functional.linear(x.float(), weight.float()).chunk(2, -1)
        theirs = torch.mul(*self.halves(functional.linear(x, weight)))
        got = run(x, weight, gated=True, workspace=space, tile=tile, pdl=True)
        assert_as_good(got, theirs, functional.silu(gate) * up)
        assert not space.arrivals_A.any()

    @staticmethod
    def halves(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = y.chunk(2, -1)
        return functional.silu(gate), up
