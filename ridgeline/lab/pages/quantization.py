"""What is lost when a weight has 8 or 4 bits, what is won, and from which batch on no more?

The weights are the bundled model's, and the engine's own formats round them. Sizes and speeds are
of a model of the catalogue on a device, as the cost model has them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

import msgspec

from ridgeline import demo
from ridgeline.architectures.counts import weight_bytes
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Precision
from ridgeline.cost.throughput import decode_shape
from ridgeline.figures import number, percent
from ridgeline.formats import weight_line
from ridgeline.lab.machine import Device, Model, kind_of, pricer_of, spec_of
from ridgeline.lab.page import Answer, Figure, Guess, Page, Preset, Question, Table, control

if TYPE_CHECKING:
    import torch

FORMATS = ("fp8", "int8", "int4", "int4-g64", "int4-g32", "int4-asym", "int4-g32-asym")
COMPARED = ("plain", "fp8", "int8", "int4")
MATRICES = {
    **{role: f"self_attn.{role}_proj" for role in ("q", "k", "v", "o")},
    **{role: f"mlp.{role}_proj" for role in ("gate", "up", "down")},
}
BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
BINS = 96
ROUNDING = "ridgeline.quantization.rounding_error."
# A teaching text's row, with the figures it prints.
TEXTBOOK = (0.12, -0.83, 0.45, -0.21)


# fmt: off
class Inputs(msgspec.Struct, frozen=True):
    format: Annotated[str, control("format", choices=FORMATS)] = "int4"
    matrix: Annotated[str, control("matrix", "of the bundled model", choices=tuple(MATRICES))] = (
        "down"
    )
    layer: Annotated[int, control("layer", ge=0, le=5, step=1)] = 3
    outlier: Annotated[
        float,
        control(
            "largest weight, times",
            "what one outlier does to its neighbours",
            ge=1,
            le=10,
            step=0.1,
        ),
    ] = 1.0
    model: Model = "llama-3.1-8b"
    device: Device = "h100-sxm"
    context: Annotated[
        int,
        control(
            "context", "of each request, for the speed",
            ge=1, le=65536, step=1, scale="log", unit="tokens", is_folded=True,
        ),
    ] = 1024
    row: Annotated[int, control("row", ge=0, le=127, step=1, is_folded=True)] = 5
# fmt: on


class Curve(msgspec.Struct, frozen=True):
    """Tokens a second at each of the batches."""

    format: str
    tokens_per_s: list[float]


class Drawing(msgspec.Struct, frozen=True):
    """`weights` share one scale; `rounded` is what becomes of each, of the numbers in `levels`.
    `bins` count the weights of the whole matrix from `low` to `high`. `outlier` is the place of the
    largest. `crossover`: from this batch on fp8 beats `four`, of 4 bits; 0: nowhere here."""

    format: str
    weights: list[float]
    rounded: list[float]
    levels: list[float]
    outlier: int
    bins: list[int]
    low: float
    high: float
    batches: list[int]
    curves: list[Curve]
    four: str
    crossover: int
    sizes: list[float]
    errors: list[float]


class Rounded(msgspec.Struct, frozen=True):
    """What rounding made of a matrix; `errors` by format of `compared`, relative to the weights."""

    weights: list[float]
    rounded: list[float]
    levels: list[float]
    outlier: int
    bins: list[int]
    low: float
    high: float
    shared_error: float
    error: float
    largest_error: float


# ------------------------------------------------------------------------ the tensor


@lru_cache(maxsize=32)
def _matrix(layer: int, matrix: str) -> torch.Tensor:
    from ridgeline.loader import open_checkpoint

    name = f"model.layers.{layer}.{MATRICES[matrix]}.weight"
    return open_checkpoint(demo.folder()).tensor(name).float()


@lru_cache(maxsize=256)
def _error(layer: int, matrix: str, name: str) -> float:
    """Of the whole matrix as it is."""
    from ridgeline.quantization.rounding_error import relative_rms, rounded

    weight_OI = _matrix(layer, matrix)
    return relative_rms(weight_OI, rounded(weight_OI, name))


@lru_cache(maxsize=256)
def _round(layer: int, matrix: str, row: int, outlier: float, name: str) -> Rounded:
    from ridgeline.quantization.rounding_error import levels, relative_rms, rounded, sharing

    row_I = _matrix(layer, matrix)[row].clone()
    place = int(row_I.abs().argmax())
    row_I[place] *= outlier
    part = sharing(row_I, name)
    shared_g, back_g = row_I[part], rounded(row_I[None], name)[0, part]
    limit = float(shared_g.abs().max())
    whole = _matrix(layer, matrix)
    bins = whole.histc(BINS, -limit, limit).int().tolist()
    return Rounded(
        _short(shared_g),
        _short(back_g),
        _short(levels(row_I, name)),
        place - part.start,
        bins,
        -limit,
        limit,
        relative_rms(shared_g, back_g),
        _error(layer, matrix, name),
        float((shared_g - back_g).abs().max()),
    )


def _short(values: torch.Tensor) -> list[float]:
    """Fine enough for a drawing."""
    return [float(f"{value:.5g}") for value in values.tolist()]


# ------------------------------------------------------------------------ size and speed


def _pricer(inputs: Inputs, name: str) -> Pricer:
    return pricer_of(inputs.model, inputs.device, "bf16" if name == "plain" else name)


def _tokens_per_s(pricer: Pricer, batch: int, context: int) -> float:
    return batch / pricer.seconds(decode_shape(batch, context))


def first_slower(mine: Pricer, other: Pricer, context: int) -> int:
    """The smallest batch from which `other` decodes faster than `mine`, 0: none up to the largest.
    Once faster it stays so here: what it saves grows with the batch."""

    def is_slower(batch: int) -> bool:
        shape = decode_shape(batch, context)
        return mine.seconds(shape) > other.seconds(shape)

    low, high = 1, BATCHES[-1]
    if not is_slower(high):
        return 0
    while low < high:
        middle = (low + high) // 2
        if is_slower(middle):
            high = middle
        else:
            low = middle + 1
    return low


@lru_cache(maxsize=64)
def _gigabytes(model: str, name: str) -> float:
    return weight_bytes(spec_of(model), Precision().dtype_bytes, name) / 1e9


# ------------------------------------------------------------------------ the answer


def answer(inputs: Inputs) -> Answer[Drawing]:
    found = _round(inputs.layer, inputs.matrix, inputs.row, inputs.outlier, inputs.format)
    names = (*COMPARED, *(() if inputs.format in COMPARED else (inputs.format,)))
    curves = [
        Curve(
            name,
            [_tokens_per_s(_pricer(inputs, name), batch, inputs.context) for batch in BATCHES],
        )
        for name in names
    ]
    four = inputs.format if weight_line(inputs.format).bits == 4 else "int4"
    crossover = first_slower(_pricer(inputs, four), _pricer(inputs, "fp8"), inputs.context)
    drawing = Drawing(
        inputs.format,
        found.weights,
        found.rounded,
        found.levels,
        found.outlier,
        found.bins,
        found.low,
        found.high,
        list(BATCHES),
        curves,
        four,
        crossover,
        [_gigabytes(inputs.model, name) for name in names],
        [_error(inputs.layer, inputs.matrix, name) for name in names],
    )
    return Answer(
        _sentence(inputs, found, drawing),
        drawing,
        _figures(inputs, found, drawing),
        [_formats_table(inputs, drawing), _speed_table(drawing), _textbook_table()],
        _questions(inputs, found, drawing),
        Guess(
            f"From how many requests at once is fp8 faster than {four}? (0: never here)",
            "requests",
            crossover,
        ),
    )


def _curve(drawing: Drawing, name: str) -> list[float]:
    return next(one.tokens_per_s for one in drawing.curves if one.format == name)


def _gain(drawing: Drawing) -> float:
    """Tokens a second of one request, over those of 16 bits."""
    return _curve(drawing, drawing.format)[0] / _curve(drawing, "plain")[0]


def _sentence(inputs: Inputs, found: Rounded, drawing: Drawing) -> str:
    plain, mine = drawing.sizes[0], _gigabytes(inputs.model, inputs.format)
    end = (
        f"but from batch {drawing.crossover} on fp8 beats {drawing.four}: it multiplies in 8 bits,"
        f" {drawing.four} in 16"
        if drawing.crossover
        else f"and fp8 beats {drawing.four} at no batch here"
    )
    bits = weight_line(inputs.format).bits or 0
    return (
        f"{len(found.weights)} weights share one scale, and between their smallest and their"
        f" largest lie {len(found.levels)} levels ({bits} bits have {1 << bits} codes), which is"
        f" off by {percent(found.shared_error)}; {inputs.model} shrinks from {number(plain)} to"
        f" {number(mine)} GB and one request runs {number(_gain(drawing))} times as fast on"
        f" {inputs.device}; {end}."
    )


# fmt: off
def _figures(inputs: Inputs, found: Rounded, drawing: Drawing) -> list[Figure]:
    from ridgeline.quantization.rounding_error import signal_to_noise_db

    line, kind = weight_line(inputs.format), kind_of(_pricer(inputs, "fp8").setup.constants.origin)
    bits = line.bits_per_weight(Precision().dtype_bytes)
    scales = f" + {8 * line.scale_bytes} / {line.group}" if line.group else ""
    step = drawing.curves[0]
    plain_s, mine_s = 1 / step.tokens_per_s[0], 1 / _curve(drawing, inputs.format)[0]
    return [
        Figure("error of weights with this scale", 100 * found.shared_error, "%", "measured",
            f"root of the mean squared difference / root of the mean square, {len(found.weights)}"
            " weights",
            ROUNDING + "relative_rms"),
        Figure("error of the whole matrix as it is", 100 * found.error, "%", "measured",
            f"the same of all weights of layer {inputs.layer}, {inputs.matrix}",
            ROUNDING + "relative_rms"),
        Figure("signal to noise", signal_to_noise_db(found.error), "dB", "measured",
            f"-20 log10({number(found.error)})", ROUNDING + "signal_to_noise_db"),
        Figure("largest error here", found.largest_error, "", "measured",
            f"of weights from {number(min(found.weights))} to {number(max(found.weights))}",
            ROUNDING + "rounded"),
        Figure("bits of a weight", bits, "bit", "ideal", f"{line.bits}{scales}",
            "ridgeline.formats.WeightFormatLine.bits_per_weight"),
        Figure(f"weights of {inputs.model}", _gigabytes(inputs.model, inputs.format), "GB", "ideal",
            f"matrices x {number(bits)} bit / 8, the vocabulary in {line.vocabulary}, norms in 16"
            " bit",
            "ridgeline.architectures.counts.weight_bytes"),
        Figure("speed of one request over 16 bits", plain_s / mine_s, "x", kind,
            f"{number(plain_s * 1e3)} ms / {number(mine_s * 1e3)} ms",
            "ridgeline.cost.pricer.Pricer.seconds"),
        Figure(f"fp8 beats {drawing.four} from batch", drawing.crossover, "requests", kind,
            f"the first batch whose step takes longer in {drawing.four} than in fp8 (0: none up to"
            f" {BATCHES[-1]})",
            "ridgeline.cost.pricer.Pricer.seconds"),
    ]
# fmt: on


# fmt: off
def _formats_table(inputs: Inputs, drawing: Drawing) -> Table:
    from ridgeline.quantization.rounding_error import signal_to_noise_db

    device = _pricer(inputs, "plain").setup.device
    rows: list[list[str | float]] = []
    for curve, size, error in zip(drawing.curves, drawing.sizes, drawing.errors, strict=True):
        precision = Precision(weights=curve.format)
        rows.append(
            [
                "bf16" if curve.format == "plain" else curve.format,
                precision.weight_bits,
                size,
                100 * error,
                signal_to_noise_db(error) if error else "exact",
                curve.tokens_per_s[0],
                curve.tokens_per_s[-1],
                "yes" if precision.fast_on(*device.traits) else "no",
            ]
        )
    columns = [
        "format", "bit", "GB", "error %", "dB", "tokens/s, 1 request",
        f"tokens/s, {BATCHES[-1]}", f"kernels of this version on {device.name}",
    ]
    return Table(
        f"Formats: {inputs.model}, error of layer {inputs.layer} {inputs.matrix}", columns, rows
    )
# fmt: on


def _speed_table(drawing: Drawing) -> Table:
    names = ["bf16" if one.format == "plain" else one.format for one in drawing.curves]
    rows: list[list[str | float]] = [
        [batch, *(one.tokens_per_s[place] for one in drawing.curves)]
        for place, batch in enumerate(drawing.batches)
    ]
    return Table("Tokens a second of all requests", ["requests", *names], rows)


def _textbook_table() -> Table:
    """Four weights that a teaching text rounds to 4 bits by hand."""
    import torch

    from ridgeline.quantization.algorithms.grid import Grid, round_to_nearest

    found = round_to_nearest(torch.tensor([TEXTBOOK]), Grid(4))
    scale = float(found.scales.scale_OG)
    back = found.dequantize()[0].tolist()
    rows: list[list[str | float]] = [
        [weight, round(scale, 5), code, round(value, 4), round(abs(value - weight), 4)]
        for weight, code, value in zip(TEXTBOOK, found.codes_OI[0].tolist(), back, strict=True)
    ]
    columns = ["weight", "scale = largest / 7", "code", "becomes", "off by"]
    return Table("By hand: four weights in 4 bits", columns, rows)


# fmt: off
def _questions(inputs: Inputs, found: Rounded, drawing: Drawing) -> list[Question]:
    int4, plain = _curve(drawing, "int4"), _curve(drawing, "plain")
    last = BATCHES[-1]
    quarter = drawing.sizes[_place(drawing, "int4")] / drawing.sizes[0]
    return [
        Question("Why is int4 not four times as small and four times as fast as 16 bits?",
            f"Scales, vocabulary and norms leave {percent(quarter)} of the bytes instead of 25 %;"
            f" the cache and the fixed times of a step stay, so one request is"
            f" {number(int4[0] / plain[0])} times as fast."),
        Question("Why does int4 lose at large batches?",
            "It saves reading, but each weight becomes 16 bits before it is multiplied. At"
            f" {last} requests the arithmetic decides: int4 makes {number(int4[-1])} tokens/s, bf16"
            f" {number(plain[-1])}, fp8 {number(_curve(drawing, 'fp8')[-1])}."),
        Question("What does one large weight do to the others?",
            f"The levels are spread up to it. With it {number(inputs.outlier)} times as large the"
            f" weights that share its scale are off by {percent(found.shared_error)}; set it to 10"
            " and look, then let fewer weights share a scale (int4-g32)."),
    ]
# fmt: on


def _place(drawing: Drawing, name: str) -> int:
    """The place of a format among the curves, sizes and errors."""
    return [one.format for one in drawing.curves].index(name)


PAGE = Page(
    "quantization",
    "Quantization",
    "Fewer bits: fewer bytes to read, coarser weights, and no gain where arithmetic binds.",
    "What helps",
    Inputs,
    answer,
    needs_model=True,
    presets=(
        Preset("4 bits in groups of 128", {}),
        Preset("An outlier", {"outlier": 6.0}),
        Preset("An outlier, groups of 32", {"outlier": 6.0, "format": "int4-g32"}),
        Preset("8-bit floats", {"format": "fp8"}),
        Preset("70B on an H200", {"model": "llama-3.1-70b", "device": "h200-sxm", "format": "fp8"}),
        Preset("A card without fp8", {"device": "a100-80-sxm", "format": "int8"}),
    ),
)
