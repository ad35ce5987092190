"""How is a model spread over devices, what does each hold and do, and what is the price of talking?

Shares are those of `parts(layer)`, times those of the cost model: a message costs alpha, its
latency, and its bytes over the link. Figures are of one replica; replicas share nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Annotated, Literal

import msgspec

from ridgeline.architectures.parts import parts
from ridgeline.architectures.shares import Shard, own_share, shard
from ridgeline.cost.communication import ring_s, wire
from ridgeline.cost.fit_suggestions import Limits
from ridgeline.cost.memory import KV_CACHE, needed_items
from ridgeline.cost.memory_items import WEIGHTS as WEIGHT_ITEMS
from ridgeline.cost.ops import COLLECTIVES
from ridgeline.cost.pipeline import Pipeline, PipelineStep, micro_batches
from ridgeline.cost.roofline import OpCost
from ridgeline.cost.setup import Layout, Setup
from ridgeline.cost.steady_state import token_budget
from ridgeline.cost.throughput import decode_shape, pipeline_bubble
from ridgeline.errors import ConfigError
from ridgeline.figures import number, percent, scaled, seconds
from ridgeline.lab.machine import WEIGHTS, Device, Model, kind_of, pricer_of, spec_of
from ridgeline.lab.page import Answer, Figure, Guess, Page, Preset, Question, Table, control
from ridgeline.planner.question import Grid, layouts
from ridgeline.planner.spreads import SHARE, Spread, is_best, spreads
from ridgeline.step import StepShape

SIZES = (1, 2, 4, 8)
GRID = Grid(tp=SIZES, pp=(1, 2, 4))
PIPELINE = "ridgeline.cost.pipeline."
LINK = "ridgeline.cost.communication."


# fmt: off
class Inputs(msgspec.Struct, frozen=True):
    model: Model = "llama-3.1-70b"
    device: Device = "h100-sxm"
    tp: Annotated[
        int, control("tensor parallel", "devices that split every layer", choices=SIZES)] = 8
    pp: Annotated[
        int, control("pipeline stages", "that split the layers", choices=(1, 2, 4))] = 1
    ep: Annotated[
        int, control("expert parallel", "of the tensor-parallel devices", choices=SIZES)] = 1
    batch: Annotated[
        int, control("requests at once", "of one replica", ge=1, le=512, step=1, scale="log")] = 16
    context: Annotated[
        int, control("context", "of each", ge=1, le=65536, step=1, scale="log", unit="tokens",
                     is_folded=True)] = 1000
    step: Annotated[
        str, control("step", "a token for each, or whole prompts", choices=("decode", "prompts"),
                     is_folded=True)] = "decode"
    micro_batches: Annotated[
        int, control("micro-batches", "that follow each other", ge=1, le=32, step=1,
                     is_folded=True)] = 1
    replicas: Annotated[
        int, control("replicas", "data parallel", ge=1, le=64, step=1, is_folded=True)] = 1
    weights: Annotated[
        str, control("weights", "number format", choices=WEIGHTS, is_folded=True)] = "bf16"
    gpu: Annotated[int, control("device shown", ge=0, le=31, step=1, is_hidden=True)] = 0
# fmt: on


class Matrix(msgspec.Struct, frozen=True):
    """`shares` of it are made along `split`; with more devices than shares several hold the same.
    `first` and `last` are the part of the device that is shown, as shares of the whole. Of
    `copies` experts each device has `own`, from `expert` on."""

    role: str
    product: str
    rows: int
    columns: int
    split: str
    shares: int
    first: float
    last: float
    copies: int
    own: int
    expert: int
    own_bytes: float


class Piece(msgspec.Struct, frozen=True):
    """An operator of one layer on one device."""

    name: str
    kind: Literal["weights", "kv", "activations", "communication"]
    seconds: float
    bound: str


class Slot(msgspec.Struct, frozen=True):
    """A stage with one micro-batch."""

    stage: int
    micro_batch: int
    start: float
    work: float
    sent: float


class Drawing(msgspec.Struct, frozen=True):
    """Memory is that of the fullest device, `link` what its messages go over. `ways` are all."""

    tp: int
    pp: int
    gpu: int
    stage_layers: list[int]
    memory: dict[str, float]
    capacity: float
    matrices: list[Matrix]
    layer: list[Piece]
    slots: list[Slot]
    step_s: float
    bubble: float
    link: str
    ways: list[Spread]


class _Case:
    """What is asked, as a setup."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.layout = Layout(inputs.tp, inputs.pp, inputs.ep, inputs.replicas)
        one = replace(self.layout, replicas=1)
        self.names = (inputs.model, inputs.device, inputs.weights, one)
        self.pricer = pricer_of(*self.names[:3], layout=one)
        self.setup: Setup = self.pricer.setup
        # One before the last: the first few of some models have no experts, the last is cut short.
        self.shown = max(0, self.setup.spec.num_layers - 2)

    @property
    def pipeline(self) -> Pipeline:
        return _pipeline(*self.names)

    @property
    def shape(self) -> StepShape:
        inputs = self.inputs
        if inputs.step == "decode":
            return decode_shape(inputs.batch, inputs.context)
        return ((inputs.context, 0),) * inputs.batch

    @cached_property
    def memory(self) -> dict[str, float]:
        """Bytes of the fullest device by what they are, with the cache of all requests."""
        inputs, setup = self.inputs, self.setup
        budget = max(inputs.batch, token_budget(setup))
        limits = Limits(inputs.context + 1, inputs.batch, budget, min_sequences=inputs.batch)
        found = dict.fromkeys(("weights", "kv", "other"), 0.0)
        for item in needed_items(setup, limits):
            is_weights, is_cache = item.what in WEIGHT_ITEMS, item.what == KV_CACHE
            found["weights" if is_weights else "kv" if is_cache else "other"] += item.bytes
        return found

    @property
    def fits(self) -> bool:
        return sum(self.memory.values()) <= SHARE * self.setup.device.memory_bytes


@lru_cache(maxsize=64)
def _pipeline(model: str, device: str, weights: str, layout: Layout) -> Pipeline:
    return Pipeline(pricer_of(model, device, weights, layout=layout).setup)


@lru_cache(maxsize=64)
def _layouts(model: str, device: str) -> tuple[Layout, ...]:
    return tuple(layouts(spec_of(model), pricer_of(model, device).setup.device, GRID))


def answer(inputs: Inputs) -> Answer[Drawing]:
    case = _Case(inputs)
    if inputs.gpu >= (devices := case.layout.devices):
        raise ConfigError(f"gpu is {inputs.gpu}; this replica has devices 0 to {devices - 1}")
    shapes = micro_batches(case.shape, inputs.micro_batches)
    run, costs = case.pipeline.step(shapes), case.pipeline.layer(case.shown, shapes[0])
    layout, num_layers = case.layout, case.setup.spec.num_layers
    link = wire(case.setup.device, inputs.tp).kind if inputs.tp > 1 else ""
    grid = _grid(inputs.model, inputs.device, inputs.weights, inputs.batch, inputs.context)
    drawing = Drawing(
        inputs.tp,
        inputs.pp,
        inputs.gpu,
        [len(layout.stage_layers(num_layers, stage)) for stage in range(inputs.pp)],
        case.memory,
        case.setup.device.memory_bytes,
        list(_matrices(case)),
        [_piece(one) for one in costs],
        [Slot(b.stage, b.micro_batch, b.start_s, b.work_s, b.sent_s) for b in run.busy],
        run.total_s,
        run.bubble,
        link,
        list(grid),
    )
    sums = sum(one.expected_s for one in costs if one.op.kind in COLLECTIVES)
    return Answer(
        _sentence(case, run, drawing),
        drawing,
        _figures(case, run, costs),
        [_grid_table(inputs, grid), _matrix_table(drawing), _layer_table(costs)],
        _questions(case, run, grid, sums / sum(one.expected_s for one in costs)),
        Guess(
            f"What share of the step do {inputs.tp} devices spend on messages?",
            "%",
            100 * run.sent_s / (run.num_stages * run.total_s),
        ),
    )


# ------------------------------------------------------------------------ who holds what


def _matrices(case: _Case) -> Iterator[Matrix]:
    """Of the layer that is shown, as the device that is shown holds them."""
    layout, setup = case.layout, case.setup
    rank, layer = case.inputs.gpu % layout.tp, setup.spec.layers[case.shown]
    for part in parts(layer, setup.spec.hidden_size):
        if not part.product:
            continue
        ranks = layout.tp // (layout.ep if part.is_experts else 1)
        experts = shard(part.copies, rank // ranks, layout.ep) if part.is_experts else Shard(0, 1)
        (height, width), total = part.shape, part.shape[part.split == "columns"]
        own = Shard(0, total)
        if part.split:
            own = own_share(part, layer, setup.precision.weights, rank % ranks, ranks)
        bits = setup.precision.weight_bits if part.is_packed else 8 * setup.precision.dtype_bytes
        numbers = experts.length * height * width * own.length // total
        yield Matrix(
            part.role, part.product, height, width, part.split, min(ranks, part.units),
            own.start / total, (own.start + own.length) / total,
            part.copies, experts.length, experts.start, numbers * bits / 8,
        )  # fmt: skip


def _piece(cost: OpCost) -> Piece:
    op = cost.op
    sizes = {"weights": op.weight_bytes, "kv": op.kv_bytes}
    kind = max(sizes, key=lambda name: sizes[name]) if any(sizes.values()) else "activations"
    if op.kind in COLLECTIVES:
        kind = "communication"
    return Piece(op.name, kind, cost.expected_s, cost.bound)  # type: ignore[arg-type]


# ------------------------------------------------------------------------ all ways


@lru_cache(maxsize=64)
def _grid(model: str, device: str, weights: str, batch: int, context: int) -> tuple[Spread, ...]:
    whole = pricer_of(model, device, weights)
    found = _layouts(model, device)
    pricers = (pricer_of(model, device, weights, layout=layout) for layout in found)
    return spreads(pricers, batch, context, token_budget(whole.setup))


def _grid_table(inputs: Inputs, grid: tuple[Spread, ...]) -> Table:
    rows: list[list[str | float]] = [
        [
            way.layout.text, way.layout.devices, way.memory_bytes / 1e9,
            "yes" if way.fits else "no", 1e3 * way.tpot_s, 1e3 * way.ttft_s, way.tokens_per_s,
            way.tokens_a_device, "*" if is_best(way, grid) else "",
        ]
        for way in grid
    ]  # fmt: skip
    columns = [
        "spread", "devices", "GB each", "fits", "ms a token", "ms a prompt", "tokens/s",
        "tokens/s a device", "nothing better in both",
    ]  # fmt: skip
    title = f"Ways to spread one replica, {inputs.batch} requests of {inputs.context} tokens"
    return Table(title, columns, rows)


def _matrix_table(drawing: Drawing) -> Table:
    rows: list[list[str | float]] = [
        [
            one.role, f"{one.rows} x {one.columns}" + f" x {one.copies}" * (one.copies > 1),
            one.split or "whole", one.shares,
            f"{percent(one.first, 0)} to {percent(one.last, 0)}", one.own_bytes / 1e6,
        ]
        for one in drawing.matrices
    ]  # fmt: skip
    columns = ["matrix", "shape", "split by", "shares", "of this device", "MB here"]
    return Table(f"What device {drawing.gpu} holds of one layer", columns, rows)


def _layer_table(costs: tuple[OpCost, ...]) -> Table:
    rows: list[list[str | float]] = [
        [one.op.name, 1e6 * one.expected_s, one.bound, one.op.bytes / 1e6, one.op.sent_bytes / 1e3]
        for one in costs
    ]
    return Table("One layer on one device", ["operator", "us", "bound by", "MB", "kB sent"], rows)


# ------------------------------------------------------------------------ words


def _sentence(case: _Case, run: PipelineStep, drawing: Drawing) -> str:
    inputs, layout = case.inputs, case.layout
    used = sum(drawing.memory.values())
    every = run.num_stages * run.total_s
    holds = f"each holds {number(used / 1e9)} of {number(drawing.capacity / 1e9)} GB"
    if not case.fits:
        holds = f"each would need {number(used / 1e9)} of {number(drawing.capacity / 1e9)} GB: no"
    what = "token for each" if inputs.step == "decode" else "first token for each"
    parts_s = [f"{percent(run.sent_s / every)} of it messages"] if layout.devices > 1 else []
    if layout.pp > 1:
        parts_s.append(f"{percent(run.bubble)} waiting for other stages")
    return (
        f"{layout.devices} x {inputs.device} ({replace(layout, replicas=1).text}): {holds}; a"
        f" {what} of {inputs.batch} requests takes {seconds(run.total_s)}"
        + (f", {' and '.join(parts_s)}" if parts_s else "")
        + "."
    )


# fmt: off
def _figures(case: _Case, run: PipelineStep, costs: tuple[OpCost, ...]) -> list[Figure]:
    inputs, layout, setup = case.inputs, case.layout, case.setup
    kind, memory = kind_of(setup.constants.origin), case.memory
    tokens = len(case.shape) if inputs.step == "decode" else inputs.batch
    found = [
        Figure("step", run.total_s, "s", kind,
            f"{inputs.micro_batches} micro-batches over {layout.pp} stages, the longest way",
            PIPELINE + "Pipeline.step"),
        Figure("tokens of all replicas", layout.replicas * tokens / run.total_s, "tokens/s", kind,
            f"{layout.replicas} x {tokens} / {seconds(run.total_s)}",
            PIPELINE + "Pipeline.step"),
        Figure("weights on each device", memory["weights"] / 1e9, "GB", "ideal",
            "its share of every matrix and all of what cannot be split, of the fullest stage",
            "ridgeline.cost.memory.needed_items"),
        Figure(f"{KV_CACHE} on each device", memory["kv"] / 1e9, "GB", "ideal",
            f"{inputs.batch} requests of {inputs.context + 1} tokens, in blocks of 16",
            "ridgeline.cost.memory.needed_items"),
    ]
    if layout.pp > 1:
        m, p = inputs.micro_batches, layout.pp
        found += [
            Figure("bubble", 100 * run.bubble, "%", kind,
                "1 - working time of all stages / (stages x step)",
                PIPELINE + "PipelineStep.bubble"),
            Figure("bubble of equal stages", 100 * pipeline_bubble(p, m), "%", "ideal",
                f"({p} - 1) / ({m} + {p} - 1)", "ridgeline.cost.throughput.pipeline_bubble"),
        ]
    if layout.tp > 1:
        found += _message_figures(case, costs)
    return found


def _message_figures(case: _Case, costs: tuple[OpCost, ...]) -> list[Figure]:
    """Of one sum over devices: by the bytes alone, and with its latency."""
    tp, setup = case.layout.tp, case.setup
    way = wire(setup.device, tp)
    one = next(cost for cost in costs if cost.op.kind == "all_reduce")
    whole = one.op.sent_bytes * tp / (2 * (tp - 1))
    bare_s = ring_s(whole, tp, way.bytes_per_s, 0.0)
    sums = 2 * setup.spec.num_layers + 1
    return [
        Figure("a sum over devices, bytes alone", bare_s, "s", "ideal",
            f"2 ({tp} - 1) / {tp} x {scaled(whole, 'B')} / {scaled(way.bytes_per_s, 'B/s')}",
            LINK + "ring_s"),
        Figure("with latency", one.expected_s, "s", kind_of(setup.constants.origin),
            f"the best of ring, one-shot and two-shot with {seconds(way.latency_s)} a message over"
            f" {way.kind}",
            LINK + "all_reduce_s"),
        Figure("sums in a step", sums, "", "ideal",
            f"2 x {setup.spec.num_layers} layers + 1 of the embedding",
            "ridgeline.cost.ops.layer_ops"),
    ]


def _questions(
    case: _Case, run: PipelineStep, grid: tuple[Spread, ...], sums: float
) -> list[Question]:
    inputs = case.inputs
    found = [
        Question("Why two sums a layer and not one for each matrix?",
            "The first matrix of each pair is split by rows of its output, so that every device"
            " goes on with its own part; the second is split by columns, so that each has a part of"
            f" the sum. Messages are {percent(sums)} of this layer.")
    ]
    tensor = [way for way in grid if way.layout.pp == way.layout.ep == 1]
    if len(tensor) > 1:
        one, most = tensor[0], tensor[-1]
        found.append(Question(f"Are {most.layout.devices} devices as many times as fast as one?",
            f"{number(one.tpot_s / most.tpot_s)} times: {seconds(one.tpot_s)} a token become"
            f" {seconds(most.tpot_s)}. Each device makes {number(most.tokens_a_device)} tokens/s"
            f" instead of {number(one.tokens_a_device)}."))
    if case.layout.pp > 1:
        found.append(Question("Do stages make a token come sooner?",
            "No: a token passes all of them, one after the other. They make room for weights and,"
            f" with enough micro-batches, fill the bubble, here {percent(run.bubble)} with"
            f" {inputs.micro_batches}."))
    return found
# fmt: on


PAGE = Page(
    "parallelism",
    "Parallelism",
    "Devices share the weights and pay with messages, whose latency outweighs their bytes.",
    "What helps",
    Inputs,
    answer,
    presets=(
        Preset("70B on one node", {}),
        Preset("70B over two nodes", {"pp": 2, "micro_batches": 4, "batch": 64}),
        Preset("Stages instead of tensors", {"tp": 1, "pp": 4, "batch": 16}),
        Preset("Experts spread", {"model": "mixtral-8x7b", "ep": 8, "batch": 64}),
        Preset("DeepSeek-V3", {"model": "deepseek-v3", "pp": 2, "ep": 8, "weights": "fp8"}),
        Preset("A prompt", {"step": "prompts", "batch": 1, "context": 8000}),
        Preset("Cards without a link", {"model": "llama-3.1-8b", "device": "rtx-4090", "tp": 4}),
    ),
)
