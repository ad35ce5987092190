"""How fast would this model be on that hardware, what would it need, what would a token cost?"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ridgeline.cost.memory_items import WEIGHTS
from ridgeline.cost.money import (
    Band,
    fixed_price,
    per_million_tokens,
    rent_band,
    tokens_per_dollar,
)
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Setup
from ridgeline.cost.steady_state import SteadyState, context_limit, steady_state, token_budget
from ridgeline.cost.throughput import Load, throughput
from ridgeline.errors import DoesNotFit, RequestFault
from ridgeline.figures import memory, number, percent, seconds
from ridgeline.lab.machine import (
    Cache,
    Config,
    Device,
    Devices,
    Model,
    Weights,
    described,
    kind_of,
    setup_with,
)
from ridgeline.lab.page import Answer, Figure, Guess, Page, Preset, Question, Table, control

STEADY = "ridgeline.cost.steady_state.steady_state"
MEANS = {"KV cache": "kv", "working space": "activations", "graphs": "activations"}


class Inputs(msgspec.Struct, frozen=True):
    model: Model = "llama-3.1-8b"
    device: Device = "h100-sxm"
    weights: Weights = "bf16"
    requests: Annotated[int, control("requests at once", ge=1, le=512, step=1, scale="log")] = 16
    prompt: Annotated[
        int, control("prompt", ge=1, le=32768, step=1, unit="tokens", scale="log")
    ] = 1000
    output: Annotated[int, control("answer", ge=2, le=8192, step=1, unit="tokens", scale="log")] = (
        300
    )
    devices: Devices = 1
    kv: Cache = "auto"
    price: Annotated[
        float,
        control(
            "price of a device",
            "0: that of the catalogue",
            ge=0,
            le=100,
            step=0.01,
            unit="$/h",
            is_folded=True,
        ),
    ] = 0.0
    config: Config = ""


class Item(msgspec.Struct, frozen=True):
    name: str
    bytes: int
    means: Literal["weights", "kv", "activations", "waiting"]


class Part(msgspec.Struct, frozen=True):
    what: str
    seconds: float


class Point(msgspec.Struct, frozen=True):
    """With so many requests in flight: tokens a second of each, and of all; dollars a million."""

    requests: int
    each: float
    all: float
    dollars: float | None


class Drawing(msgspec.Struct, frozen=True):
    """Without speed (`points` empty) where it does not fit; `ways` say what would."""

    device: str
    devices: int
    requests: int
    capacity_bytes: int
    items: list[Item]
    ways: list[str]
    max_requests: int
    points: list[Point]
    ttft_s: float
    whole_s: float
    token_parts: list[Part]
    each: float
    all: float
    dollars: Band | None


def answer(inputs: Inputs) -> Answer[Drawing]:
    spec = described(inputs.model, inputs.config)
    setup = setup_with(spec, inputs.device, inputs.weights, inputs.kv, inputs.devices)
    longest = context_limit(spec)
    if inputs.prompt + inputs.output > longest:
        raise RequestFault(
            f"prompt and output are {inputs.prompt + inputs.output:,} tokens; the model has "
            f"positions for {longest:,}. Take shorter ones",
            param="prompt",
        )
    try:
        found = steady_state(
            setup, batch=inputs.requests, num_input=inputs.prompt, num_output=inputs.output
        )
    except DoesNotFit as fault:
        return _no_room(inputs, setup, fault)
    price = fixed_price(inputs.price) if inputs.price else rent_band(setup.device)
    points = _points(setup, inputs, found, price)
    dollars = None if price is None else price.map(lambda p: _million(p, found.tokens_per_s, setup))
    drawing = Drawing(
        setup.device.label,
        setup.layout.devices,
        inputs.requests,
        found.memory.capacity_bytes,
        [_item(item.what, item.bytes) for item in found.memory.items],
        [],
        found.max_batch,
        points,
        found.ttft_s,
        found.throughput.e2e_s,
        [Part(part.what, max(0.0, part.seconds)) for part in found.tpot_parts],
        found.tokens_per_s_per_user,
        found.tokens_per_s,
        dollars,
    )
    return Answer(
        _sentence(inputs, found, drawing),
        drawing,
        _figures(inputs, found, drawing, price),
        _tables(drawing),
        _questions(inputs, found, drawing),
        Guess(
            f"How many tokens a second do all {inputs.requests} requests get together?",
            "tok/s",
            float(f"{found.tokens_per_s:.3g}"),
        ),
    )


def _million(dollars: float, rate: float, setup: Setup) -> float:
    return per_million_tokens(dollars, rate, num_devices=setup.layout.devices)


def _points(setup: Setup, inputs: Inputs, found: SteadyState, price: Band | None) -> list[Point]:
    """Fewer and more requests at once, as far as memory goes."""
    pricer, budget, points = Pricer(setup), token_budget(setup), []
    sizes = {1 << n for n in range(10)} | {inputs.requests, min(found.max_batch, 512)}
    for size in sorted(size for size in sizes if size <= found.max_batch):
        one = throughput(pricer, Load(size, inputs.prompt, inputs.output, budget))
        rate = one.tokens_per_s
        dollars = None if price is None else _million(price.mid, rate, setup)
        points.append(Point(size, one.tokens_per_s_per_user, rate, dollars))
    return points


def _item(name: str, num_bytes: int) -> Item:
    means = MEANS.get(name, "weights" if name in WEIGHTS else "waiting")
    if means == "waiting" and name != "reserve":
        means = "activations"
    return Item(name, num_bytes, means)  # type: ignore[arg-type]


def _no_room(inputs: Inputs, setup: Setup, fault: DoesNotFit) -> Answer[Drawing]:
    """What was asked for does not fit: its memory, and the changes that would."""
    items = [_item(name, num_bytes) for name, num_bytes in fault.items]
    needed = sum(item.bytes for item in items)
    drawing = Drawing(
        setup.device.label, setup.layout.devices, inputs.requests,
        int(setup.device.memory_bytes * 0.9), items, list(fault.changes), 0, [], 0, 0, [], 0, 0,
        None,
    )  # fmt: skip
    weights = sum(item.bytes for item in items if item.means == "weights")
    asked = [
        Question("What would fit?", "; ".join(fault.changes) or "nothing in the catalogue."),
        Question(
            "How much of it are weights?",
            f"{memory(weights)} of {memory(needed)}, {percent(weights / needed, 0)}.",
        ),
    ]
    told = Figure(
        "Memory needed", needed, "B", "assumed",
        " + ".join(f"{memory(item.bytes)} {item.name}" for item in items if item.bytes > 1e8),
        "ridgeline.cost.memory.memory_plan",
    )  # fmt: skip
    return Answer(
        f"It does not fit: {memory(needed)} are needed on each device, and "
        f"{memory(drawing.capacity_bytes)} may be taken. What would: "
        f"{fault.changes[0] if fault.changes else 'a larger device'}.",
        drawing,
        [told],
        [_memory_table(drawing)],
        asked,
    )


# ------------------------------------------------------------------------ in words


def _sentence(inputs: Inputs, found: SteadyState, drawing: Drawing) -> str:
    cost = "" if drawing.dollars is None else f", at ${drawing.dollars.mid:.2f} a million"
    return (
        f"{inputs.requests} {'request gets' if inputs.requests == 1 else 'requests get'} "
        f"{number(drawing.each)} tokens a second each and {number(drawing.all)} in all{cost}; the "
        f"first comes after {seconds(drawing.ttft_s)}. What binds is {found.bound}; "
        f"{found.max_batch:,} requests have room."
    )


def _figures(
    inputs: Inputs, found: SteadyState, drawing: Drawing, price: Band | None
) -> list[Figure]:
    setup, kind = found.setup, kind_of(found.origin)
    tpot, weights = found.tpot_s, found.memory.weight_bytes
    bandwidth = setup.device.bandwidth
    rows = [
        Figure(
            "Tokens a second of one request", drawing.each, "tok/s", kind,
            f"1 / {seconds(tpot)} between two of them",
            STEADY,
        ),
        Figure(
            "Tokens a second of all", drawing.all, "tok/s", kind,
            f"{inputs.requests} requests x {inputs.output} tokens / "
            f"{seconds(found.throughput.e2e_s)} from arrival to end", STEADY,
        ),
        Figure(
            "Between two tokens", tpot * 1e3, "ms", kind,
            " + ".join(f"{seconds(part.seconds)} {part.what}" for part in drawing.token_parts),
            "ridgeline.cost.steady_state.SteadyState.tpot_parts",
        ),
        Figure(
            "Floor of that: weights alone", weights / bandwidth * 1e3, "ms", "ideal",
            f"{memory(weights)} / {bandwidth / 1e9:,.0f} GB/s: {number(bandwidth / weights)} "
            "tok/s of one request at most",
            "ridgeline.cost.memory.MemoryPlan.weight_bytes",
        ),
        Figure(
            "First token", found.ttft_s * 1e3, "ms", kind,
            " + ".join(f"{seconds(p.seconds)} {p.what}" for p in found.ttft_parts if p.seconds > 0),
            "ridgeline.cost.steady_state.SteadyState.ttft_parts",
        ),
    ]  # fmt: skip
    if price is None or drawing.dollars is None:
        return rows
    return [
        *rows,
        Figure(
            "A million answer tokens", drawing.dollars.mid, "$", kind,
            f"${price.mid:.2f} an hour x {setup.layout.devices} / ({number(drawing.all)} tok/s x "
            f"3,600 s) x 1,000,000; from ${drawing.dollars.low:.2f} to ${drawing.dollars.high:.2f} "
            "by the price", "ridgeline.cost.money.per_million_tokens",
        ),
        Figure(
            "Tokens for a dollar", tokens_per_dollar(
                price.mid, drawing.all, num_devices=setup.layout.devices
            ), "", kind, f"1,000,000 / ${drawing.dollars.mid:.3g}",
            "ridgeline.cost.money.tokens_per_dollar",
        ),
    ]  # fmt: skip


def _memory_table(drawing: Drawing) -> Table:
    rows: list[list[str | float]] = [[item.name, item.bytes] for item in drawing.items]
    return Table("Memory of one device", ["item", "bytes"], rows)


def _tables(drawing: Drawing) -> list[Table]:
    return [
        Table(
            "By requests at once",
            ["requests", "tok/s of each", "tok/s of all", "$ a million"],
            [[p.requests, p.each, p.all, "" if p.dollars is None else p.dollars]
             for p in drawing.points],
        ),
        _memory_table(drawing),
        Table(
            "Between two tokens",
            ["part", "seconds"],
            [[part.what, part.seconds] for part in drawing.token_parts],
        ),
    ]  # fmt: skip


def _questions(inputs: Inputs, found: SteadyState, drawing: Drawing) -> list[Question]:
    one, most = drawing.points[0], max(drawing.points, key=lambda point: point.all)
    ideal, whole = found.decode.ideal_s, found.tpot_s
    asked = [
        Question(
            "What do more requests at once change?",
            f"One alone gets {number(one.each)} tok/s. With {most.requests} each gets "
            f"{number(most.each)}, and all together {number(most.all)}: "
            f"{number(most.all / one.all)} times as many for the same hour.",
        ),
        Question(
            "How far is a token from what the data sheet allows?",
            f"{seconds(ideal)} at the data sheet's rates, {seconds(whole)} expected: "
            f"{percent(ideal / whole, 0)}. The rest are kernels below their peak, the host, and "
            "the prompts of others in between.",
        ),
    ]
    if inputs.requests > 1:
        each = whole / inputs.requests
        asked.append(
            Question(
                "Is the time between tokens the total rate turned over?",
                f"No. A token comes every {seconds(each)} from somebody, but each request waits "
                f"{seconds(whole)} for its next one. Who divides by the batch promises "
                f"{inputs.requests} times too much.",
            )
        )
    return asked


PAGE = Page(
    name="estimator",
    title="Estimator",
    idea="A model, a device, a number of people: speed, memory and price on one page.",
    group="Plan",
    inputs=Inputs,
    answer=answer,
    presets=(
        Preset("8B on an H100, 16 at once", {}),
        Preset("70B on four H100, fp8", {
            "model": "llama-3.1-70b", "devices": 4, "weights": "fp8", "requests": 64,
        }),
        Preset("8B in 4 bits on a 4090", {
            "device": "rtx-4090", "weights": "int4", "requests": 1, "prompt": 500,
        }),
        Preset("70B on one 80 GB card", {"model": "llama-3.1-70b"}),
    ),
)  # fmt: skip
