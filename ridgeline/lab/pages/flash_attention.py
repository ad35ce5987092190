"""How is attention exact although nobody ever holds a whole row of scores?

The small example is computed here tile by tile, with every number on the table; the traffic of a
head of real size is `cost.attention_traffic`.
"""

from __future__ import annotations

from math import exp, inf
from random import Random
from typing import Annotated

import msgspec

from ridgeline.cost.attention_traffic import TiledAttention
from ridgeline.cost.hardware import find_device
from ridgeline.figures import memory, number, scaled, seconds
from ridgeline.lab.machine import FoldedDevice
from ridgeline.lab.page import Answer, Figure, Guess, Page, Preset, Question, Table, control

SMALL, TILE, WIDTH = 16, 4, 2  # tokens, rows and columns of a tile, numbers of a value
SPREAD = 3.0  # standard deviation of the small example's scores
WHERE = "ridgeline.cost.attention_traffic.TiledAttention."
TILES = (16, 32, 64, 128, 256)


class Inputs(msgspec.Struct, frozen=True):
    step: Annotated[
        int, control("step", "tiles that are done in the small example", ge=0, le=17)
    ] = 3
    tokens: Annotated[
        int, control("tokens", ge=64, le=131072, step=1, unit="tokens", scale="log")
    ] = 8192
    head_dim: Annotated[int, control("head size", choices=(64, 128, 256))] = 128
    rows: Annotated[int, control("queries in a tile", choices=TILES)] = 128
    columns: Annotated[int, control("keys in a tile", choices=TILES)] = 64
    causal: Annotated[bool, control("causal mask", "a token sees itself and those before")] = True
    device: FoldedDevice = "h100-sxm"
    chip_kib: Annotated[
        int,
        control(
            "shared memory",
            "of one multiprocessor: A100 164, H100 228",
            ge=48,
            le=256,
            step=4,
            unit="KiB",
            is_folded=True,
        ),
    ] = 228
    seed: Annotated[int, control("seed", "of the small example", ge=0, le=999, is_folded=True)] = 7


class Visit(msgspec.Struct, frozen=True):
    """A tile of queries meets a tile of keys. Of its rows: the maximum before and after, by what
    the sum and the output so far are multiplied, the weights, the sum, and the output, not yet
    divided."""

    row_tile: int
    column_tile: int
    old_max: list[float | None]
    new_max: list[float]
    factor: list[float]
    weights: list[list[float]]
    sums: list[float]
    output: list[list[float]]


class Drawing(msgspec.Struct, frozen=True):
    """The small example: scores (None: masked), all its steps, and the outputs both ways. Of the
    real size: bytes moved, and what a tile takes on the chip."""

    tile: int
    scores: list[list[float | None]]
    values: list[list[float]]
    visits: list[Visit]
    exact: list[list[float]]
    tiled: list[list[float]]
    error: float
    error_without_factor: float
    unfused_bytes: int
    tiled_bytes: int
    score_bytes: int
    chip_bytes: int
    chip_limit: int
    row_tiles: int
    column_tiles: int
    curve: list[tuple[int, int, int]]


def answer(inputs: Inputs) -> Answer[Drawing]:
    device = find_device(inputs.device)
    real = TiledAttention(
        inputs.tokens, inputs.head_dim, inputs.rows, inputs.columns, inputs.causal
    )
    scores, values = _example(inputs)
    exact = [_softmax_row(row, values) for row in scores]
    visits, tiled = _tiles(scores, values, inputs.causal)
    _, broken = _tiles(scores, values, inputs.causal, corrects=False)
    lengths = [64 << i for i in range(12)]
    drawing = Drawing(
        TILE,
        [[None if score == -inf else score for score in row] for row in scores],
        values,
        visits,
        exact,
        tiled,
        _error(exact, tiled),
        _error(exact, broken),
        real.unfused_bytes,
        real.tiled_bytes,
        real.score_bytes,
        real.chip_bytes,
        inputs.chip_kib << 10,
        real.num_row_tiles,
        real.num_column_tiles,
        [(one.num_tokens, one.unfused_bytes, one.tiled_bytes) for one in _of(real, lengths)],
    )
    return Answer(
        _sentence(inputs, drawing),
        drawing,
        _figures(inputs, real, drawing, device.bandwidth),
        _tables(drawing),
        _questions(inputs, real, drawing),
        Guess(
            "How many times fewer bytes do tiles move here?",
            "times",
            round(real.unfused_bytes / real.tiled_bytes, 1),
        ),
    )


def _of(real: TiledAttention, lengths: list[int]) -> list[TiledAttention]:
    return [
        TiledAttention(n, real.head_dim, real.rows, real.columns, real.is_causal) for n in lengths
    ]


# ------------------------------------------------------------------------ the small example

Rows = list[list[float]]


def _example(inputs: Inputs) -> tuple[Rows, Rows]:
    """Scores, -inf where the mask hides them, and values."""
    rng = Random(inputs.seed)
    scores = [[round(rng.gauss(0, SPREAD), 1) for _ in range(SMALL)] for _ in range(SMALL)]
    if inputs.causal:
        scores = [[s if k <= q else -inf for k, s in enumerate(r)] for q, r in enumerate(scores)]
    return scores, [[round(rng.gauss(0, 1), 1) for _ in range(WIDTH)] for _ in range(SMALL)]


def _softmax_row(scores: list[float], values: Rows) -> list[float]:
    """With the whole row in hand."""
    largest = max(scores)
    weights = [exp(score - largest) for score in scores]
    total = sum(weights)
    columns = zip(*values, strict=True)
    return [sum(w * v for w, v in zip(weights, one, strict=True)) / total for one in columns]


def _tiles(
    scores: Rows, values: Rows, is_causal: bool, *, corrects: bool = True
) -> tuple[list[Visit], Rows]:
    """Tile by tile. Of each row a maximum m, a sum l and an output o are kept:

      m' = max(m, scores)      f = exp(m - m')      p = exp(scores - m')
      l' = f l + sum(p)        o' = f o + p v       at last o / l

    Without `corrects`, f is left out, as in a common mistake."""
    plan, visits, done = TiledAttention(SMALL, WIDTH, TILE, TILE, is_causal), list[Visit](), Rows()
    maxima, sums = [-inf] * SMALL, [0.0] * SMALL
    outputs = [[0.0] * WIDTH for _ in range(SMALL)]
    for i, j in plan.visits():
        rows, keys = range(i * TILE, (i + 1) * TILE), range(j * TILE, (j + 1) * TILE)
        old = [maxima[q] for q in rows]
        factors, weights = list[float](), Rows()
        for q in rows:
            largest = max(maxima[q], *(scores[q][k] for k in keys))
            factor = exp(maxima[q] - largest) if corrects else 1.0
            p = [exp(scores[q][k] - largest) for k in keys]
            sums[q] = factor * sums[q] + sum(p)
            outputs[q] = [
                factor * o + sum(w * values[k][d] for w, k in zip(p, keys, strict=True))
                for d, o in enumerate(outputs[q])
            ]
            maxima[q] = largest
            factors.append(factor)
            weights.append(p)
        visits.append(
            Visit(
                i, j, [None if one == -inf else one for one in old], [maxima[q] for q in rows],
                factors, weights, [sums[q] for q in rows], [list(outputs[q]) for q in rows],
            )
        )  # fmt: skip
    done = [[o / total for o in row] for row, total in zip(outputs, sums, strict=True)]
    return visits, done


def _error(exact: Rows, other: Rows) -> float:
    pairs = zip(exact, other, strict=True)
    return max(abs(a - b) for left, right in pairs for a, b in zip(left, right, strict=True))


# ------------------------------------------------------------------------ in words


def _sentence(inputs: Inputs, drawing: Drawing) -> str:
    saved = drawing.unfused_bytes / drawing.tiled_bytes
    if drawing.chip_bytes > drawing.chip_limit:
        return (
            f"A tile of {inputs.rows} queries and {inputs.columns} keys takes "
            f"{memory(drawing.chip_bytes)} on the chip and there are {memory(drawing.chip_limit)}: "
            "take fewer queries or keys."
        )
    more = f"{number(saved)} times less" if saved > 1 else f"{number(1 / saved)} times more"
    return (
        f"At {inputs.tokens:,} tokens, one head moves {memory(drawing.tiled_bytes)} with tiles, "
        f"{more} than the {memory(drawing.unfused_bytes)} with its scores in memory, and the "
        f"result is the same (largest error of the example {drawing.error:.0e})."
    )


def _figures(
    inputs: Inputs, real: TiledAttention, drawing: Drawing, bandwidth: float
) -> list[Figure]:
    n, d, rate = inputs.tokens, inputs.head_dim, scaled(bandwidth, "B/s")
    return [
        Figure(
            "Scores in memory", real.unfused_bytes, "B", "ideal",
            f"(4 x {n:,} x {d} + 4 x {n:,}^2) x 2 B; at {rate}: "
            f"{seconds(real.unfused_bytes / bandwidth)}", f"{WHERE}unfused_bytes",
        ),
        Figure(
            "Tiles", real.tiled_bytes, "B", "ideal",
            f"(2 x {n:,} x {d} + 2 x {d} x {real.keys_read:,} keys read by {real.num_row_tiles:,} "
            f"tiles of queries) x 2 B; at {rate}: {seconds(real.tiled_bytes / bandwidth)}",
            f"{WHERE}tiled_bytes",
        ),
        Figure(
            "The scores alone", real.score_bytes, "B", "ideal",
            f"{n:,}^2 x 2 B of one head; with tiles nobody holds them", f"{WHERE}score_bytes",
        ),
        Figure(
            "On the chip for a tile", real.chip_bytes, "B", "ideal",
            f"({inputs.rows} + 2 x {inputs.columns}) x {d} x 2 B of q, k, v, "
            f"{inputs.rows} x ({d} + 2) x 4 B of output, maximum and sum, "
            f"{inputs.rows} x {inputs.columns} x 4 B of scores", f"{WHERE}chip_bytes",
        ),
        Figure(
            "Error without the factor", drawing.error_without_factor, "", "ideal",
            "largest difference of the small example where exp(old maximum - new maximum) is left "
            f"out; with it {drawing.error:.1e}", "ridgeline.lab.pages.flash_attention._tiles",
        ),
    ]  # fmt: skip


def _tables(drawing: Drawing) -> list[Table]:
    steps: list[list[str | float]] = [
        [f"queries {v.row_tile * TILE + 1}-{(v.row_tile + 1) * TILE}, "
         f"keys {v.column_tile * TILE + 1}-{(v.column_tile + 1) * TILE}",
         _list(v.new_max), _list(v.factor), _list(v.sums)]
        for v in drawing.visits
    ]  # fmt: skip
    return [
        Table("The small example", ["tile", "maximum", "factor", "sum"], steps),
        Table(
            "By length",
            ["tokens", "scores in memory, B", "tiles, B"],
            [list(row) for row in drawing.curve],
        ),
    ]


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _questions(inputs: Inputs, real: TiledAttention, drawing: Drawing) -> list[Question]:
    half = TiledAttention(
        inputs.tokens, inputs.head_dim, max(8, inputs.rows // 2), inputs.columns, inputs.causal
    )
    return [
        Question(
            "What happens with tiles half as tall?",
            f"All keys and values are read twice as often: {memory(half.tiled_bytes)} instead of "
            f"{memory(real.tiled_bytes)}. Traffic falls as the chip's memory grows.",
        ),
        Question(
            "Does it take fewer operations?",
            "No: as many products, and a few more for the corrections. What the mask hides is left "
            f"out by whole tiles: {real.num_visits:,} of "
            f"{real.num_row_tiles * real.num_column_tiles:,} are met.",
        ),
        Question(
            "Is it an approximation?",
            "No. The factor exp(old maximum - new maximum) makes up for each maximum that was too "
            "small. Without it the example is wrong by up to "
            f"{number(drawing.error_without_factor)}; with it by {drawing.error:.0e}, the rounding "
            "of 64-bit numbers.",
        ),
    ]


PAGE = Page(
    name="flash_attention",
    title="FlashAttention, tile by tile",
    idea="A row of attention can be summed up piece by piece, if what was summed is corrected each "
    "time that a larger score turns up.",
    group="Kernels",
    inputs=Inputs,
    answer=answer,
    presets=(
        Preset("8,192 tokens", {}),
        Preset("128K tokens", {"tokens": 131072}),
        Preset("Tiles that are too small", {"rows": 16, "columns": 16, "causal": False}),
        Preset("Without a mask", {"causal": False}),
    ),
)
