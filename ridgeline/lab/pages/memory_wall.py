"""Why does a device that could do so much arithmetic wait for its memory while it decodes?"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ridgeline.architectures.counts import weight_bytes
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.roofline import OpCost, StepCost
from ridgeline.cost.setup import Setup
from ridgeline.figures import number, percent, scaled, seconds
from ridgeline.lab.machine import Cache, Device, Model, Weights, kind_of, pricer_of
from ridgeline.lab.page import Answer, Figure, Guess, Page, Preset, Question, Table, control
from ridgeline.step import StepShape

MAX_BATCH = 1024
TRAIL = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
GUESS_BATCH = 32
COST = "ridgeline.cost.roofline.step_cost"


class Inputs(msgspec.Struct, frozen=True):
    model: Model = "llama-3-70b"
    device: Device = "a100-80-sxm"
    weights: Weights = "bf16"
    batch: Annotated[
        int,
        control("batch", "requests in one step", ge=1, le=MAX_BATCH, scale="log"),
    ] = 1
    context: Annotated[
        int,
        control("context", "tokens of each request", ge=1, le=131072, scale="log", unit="tokens"),
    ] = 1024
    mode: Annotated[
        str,
        control("step", "one new token each, or whole prompts", choices=("decode", "prefill")),
    ] = "decode"
    kv: Cache = "auto"
    bandwidth_gb_s: Annotated[
        float,
        control(
            "bandwidth", "0: the data sheet's", ge=0, le=20000, step=10, unit="GB/s", is_folded=True
        ),
    ] = 0.0
    peak_tflops: Annotated[
        float,
        control(
            "peak", "0: the data sheet's", ge=0, le=20000, step=1, unit="TFLOP/s", is_folded=True
        ),
    ] = 0.0


class Point(msgspec.Struct, frozen=True):
    """An operator, or the whole step: `intensity` in FLOP/byte, `rate` in FLOP/s as expected."""

    name: str
    intensity: float
    rate: float
    seconds: float
    share: float
    bound: str
    holds: Literal["weights", "kv", "activations"]  # what most of its bytes are


class Stop(msgspec.Struct, frozen=True):
    """The whole step at another batch."""

    batch: int
    intensity: float
    rate: float


class Drawing(msgspec.Struct, frozen=True):
    """`memory_s` and `compute_s` are what one step would take if the other cost nothing."""

    device: str
    peak: float
    bandwidth: float
    ridge: float
    operators: list[Point]
    step: Stop
    trail: list[Stop]
    memory_s: float
    compute_s: float
    weights_bytes: float
    kv_bytes: float
    other_bytes: float


def answer(inputs: Inputs) -> Answer[Drawing]:
    pricer = pricer_of(
        inputs.model, inputs.device, inputs.weights, inputs.kv,
        peak_tflops=inputs.peak_tflops, bandwidth_gb_s=inputs.bandwidth_gb_s,
    )  # fmt: skip
    setup, cost = pricer.setup, pricer.cost(_shape(inputs, inputs.batch))
    dtype = setup.precision.compute_dtype
    peak, bandwidth = setup.device.peak(dtype), setup.device.bandwidth
    trail = [_stop(pricer, inputs, batch) for batch in TRAIL]
    weights = sum(one.op.count * one.op.weight_bytes for one in cost.ops)
    kv = sum(one.op.count * one.op.kv_bytes for one in cost.ops)
    drawing = Drawing(
        setup.device.label,
        peak,
        bandwidth,
        setup.device.ridge(dtype),
        [_point(one, cost) for one in cost.ops if one.op.flops],
        Stop(inputs.batch, cost.flops / cost.bytes, cost.flops / cost.expected_s),
        trail,
        cost.bytes / bandwidth,
        cost.flops / peak,
        weights,
        kv,
        cost.bytes - weights - kv,
    )
    return Answer(
        _sentence(inputs, setup, cost, drawing),
        drawing,
        _figures(inputs, setup, cost, drawing),
        [_operators(cost), _batches(trail, inputs, drawing)],
        _questions(setup, drawing, trail),
        _guess(pricer, inputs),
    )


def _shape(inputs: Inputs, batch: int) -> StepShape:
    one = (1, inputs.context) if inputs.mode == "decode" else (inputs.context, 0)
    return (one,) * batch


def _stop(pricer: Pricer, inputs: Inputs, batch: int) -> Stop:
    price = pricer.price(_shape(inputs, batch), batch)
    return Stop(batch, price.flops / price.bytes, price.flops / price.expected_s)


def _point(one: OpCost, cost: StepCost) -> Point:
    op = one.op
    sizes = {"weights": op.weight_bytes, "kv": op.kv_bytes}
    sizes["activations"] = op.bytes - sum(sizes.values())
    return Point(
        op.name,
        op.flops / op.bytes,
        op.count * op.flops / one.expected_s,
        one.expected_s,
        one.expected_s / sum(each.expected_s for each in cost.ops),
        one.bound,
        max(sizes, key=lambda name: sizes[name]),  # type: ignore[arg-type]
    )


def _sentence(inputs: Inputs, setup: Setup, cost: StepCost, drawing: Drawing) -> str:
    memory_s, compute_s = drawing.memory_s, drawing.compute_s
    times = f"memory needs {seconds(memory_s)}, arithmetic {seconds(compute_s)}"
    who = "1 request" if inputs.batch == 1 else f"{inputs.batch:,} requests"
    if memory_s > compute_s:
        said = f"the arithmetic units wait {percent(1 - compute_s / memory_s)} of the step"
    else:
        said = f"the memory waits {percent(1 - memory_s / compute_s)} of the step"
    end = f"balance comes at {number(drawing.ridge)} FLOP for each byte"
    size = weight_bytes(setup.spec, setup.precision.dtype_bytes, setup.precision.weights)
    if size > setup.device.memory_bytes:
        sizes = f"{scaled(size, 'B')} of weights, {scaled(setup.device.memory_bytes, 'B')} there"
        end += f" (one such device could not hold it: {sizes})"
    return f"With {who} {times}: {said}; {end}."


def _figures(inputs: Inputs, setup: Setup, cost: StepCost, drawing: Drawing) -> list[Figure]:
    dtype, bits = setup.precision.compute_dtype, setup.precision.weight_bits
    peak, bandwidth = scaled(drawing.peak, "FLOP/s"), scaled(drawing.bandwidth, "B/s")
    flops, moved = scaled(cost.flops, "FLOP"), scaled(cost.bytes, "B")
    ridge = "ridgeline.cost.hardware.Device.ridge"
    critical = setup.device.critical_batch(dtype, bits)
    badge, tokens = kind_of(cost.origin), inputs.batch
    busy = min(1.0, drawing.compute_s / drawing.memory_s)
    both = [
        Figure("time of memory", drawing.memory_s, "s", "ideal", f"{moved} / {bandwidth}", COST),
        Figure("time of arithmetic", drawing.compute_s, "s", "ideal", f"{flops} / {peak}", COST),
        Figure(
            "arithmetic waits", 100 * (1 - busy), "%", "ideal",
            f"1 - {seconds(drawing.compute_s)} / {seconds(drawing.memory_s)}", COST,
        ),
        Figure(
            "intensity of the step", cost.flops / cost.bytes, "FLOP/B", "ideal",
            f"{flops} / {moved}", COST,
        ),
        Figure("ridge", drawing.ridge, "FLOP/B", "ideal", f"{peak} / {bandwidth}", ridge),
        Figure(
            "critical batch", critical, "requests", "ideal",
            f"{number(drawing.ridge)} FLOP/B x {bits:g} bit / (8 bit/B x 2 FLOP)",
            "ridgeline.cost.hardware.Device.critical_batch",
        ),
        Figure(
            "step, expected", cost.expected_s, "s", badge,
            "sum of the operators in the table, each with its efficiency", COST,
        ),
    ]  # fmt: skip
    if inputs.mode == "prefill":
        return both
    per_user = 1 / cost.expected_s
    rates = [
        Figure(
            "at best", 1 / cost.ideal_s, "tok/s per user", "ideal",
            f"1 / {seconds(cost.ideal_s)}", COST,
        ),
        Figure(
            "expected", per_user, "tok/s per user", badge, f"1 / {seconds(cost.expected_s)}", COST
        ),
        Figure(
            "expected in all", tokens * per_user, "tok/s", badge,
            f"{tokens} / {seconds(cost.expected_s)}", COST,
        ),
    ]  # fmt: skip
    return [*rates, *both]


def _operators(cost: StepCost) -> Table:
    rows: list[list[str | float]] = [
        [
            one.op.name, one.op.count, one.op.count * one.op.flops / 1e9,
            one.op.count * one.op.bytes / 1e6, one.op.flops / one.op.bytes if one.op.bytes else 0.0,
            1e3 * one.ideal_s, 1e3 * one.expected_s, one.bound,
        ]
        for one in cost.ops
    ]  # fmt: skip
    columns = ["operator", "times", "GFLOP", "MB", "FLOP/B", "ideal ms", "expected ms", "bound by"]
    return Table("operators of the step", columns, rows)


def _batches(trail: list[Stop], inputs: Inputs, drawing: Drawing) -> Table:
    rows: list[list[str | float]] = [
        [one.batch, one.intensity, one.rate / 1e12, 100 * one.rate / drawing.peak] for one in trail
    ]
    columns = ["requests", "FLOP/B", "TFLOP/s", "% of peak"]
    return Table(f"the whole step by batch, {inputs.context:,} tokens each", columns, rows)


def _questions(setup: Setup, drawing: Drawing, trail: list[Stop]) -> list[Question]:
    precision = setup.precision
    critical = setup.device.critical_batch(precision.compute_dtype, precision.weight_bits)
    reach = next((one.batch for one in trail if one.intensity >= drawing.ridge), None)
    grown = trail[-1].intensity / trail[0].intensity
    many = f"batch {reach:,} reaches it" if reach else f"even batch {trail[-1].batch:,} does not"
    return [
        Question(
            "From which batch on do products of weights keep the arithmetic busy?",
            f"From {number(critical)} requests: each weight of {precision.weight_bits:g} bit gives "
            "2 operations for each request, and is read once for all of them.",
        ),
        Question(
            "Does the whole step reach the ridge when the batch grows?",
            f"{many[0].upper()}{many[1:]}: {trail[-1].batch:,} times the requests make its "
            f"intensity {number(grown)} times as large. Each request reads its own keys and "
            "values, which nobody shares.",
        ),
        Question(
            "Would twice the arithmetic make a decode step faster?",
            f"Not while memory takes {seconds(drawing.memory_s)} and arithmetic "
            f"{seconds(drawing.compute_s)}."
            if drawing.memory_s > drawing.compute_s
            else "Here it would: arithmetic takes longer than memory.",
        ),
    ]


def _guess(pricer: Pricer, inputs: Inputs) -> Guess:
    setup, price = pricer.setup, pricer.price(_shape(inputs, GUESS_BATCH), GUESS_BATCH)
    dtype = setup.precision.compute_dtype
    compute_s = price.flops / setup.device.peak(dtype)
    share = compute_s / max(compute_s, price.bytes / setup.device.bandwidth)
    ask = f"With {GUESS_BATCH} requests in the step, how much of the time is arithmetic busy?"
    return Guess(ask, "%", 100 * share)


PAGE = Page(
    "memory_wall",
    "The memory wall",
    "A decode step reads every weight to do two operations with each: it waits for memory.",
    "Why it is slow",
    Inputs,
    answer,
    presets=(
        Preset("70B on an A100", {}),
        Preset("A textbook's A100", {"bandwidth_gb_s": 2000.0, "context": 1}),
        Preset("8B on an H100", {"model": "llama-3.1-8b", "device": "h100-sxm"}),
        Preset("8B at batch 256", {"model": "llama-3.1-8b", "device": "h100-sxm", "batch": 256}),
        Preset("A prompt", {"model": "llama-3.1-8b", "device": "h100-sxm", "mode": "prefill"}),
    ),
)
