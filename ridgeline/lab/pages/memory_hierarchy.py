"""Which memories feed the arithmetic, how large and how fast are they, and what lives in each?"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ridgeline.architectures.counts import kv_bytes, kv_bytes_per_token
from ridgeline.cost.hierarchy import (
    DISK,
    HOST,
    LAST_CACHE,
    MEMORY,
    SRAM,
    Amount,
    Placed,
    Tier,
    place,
    read_seconds,
    tiers,
)
from ridgeline.cost.memory_items import weight_items
from ridgeline.cost.ops import step_ops
from ridgeline.cost.setup import Setup
from ridgeline.cost.throughput import decode_shape
from ridgeline.figures import memory, number, scaled, seconds
from ridgeline.lab.machine import Cache, Device, Model, Weights, pricer_of
from ridgeline.lab.page import Answer, Figure, Guess, Page, Preset, Question, Table, control

TILE_ROWS = 128  # of queries, of keys and of values, in a kernel of attention
UTILIZATION = 0.9  # of the device's memory, as the engine takes
PLACE = "ridgeline.cost.hierarchy."
Means = Literal["weights", "kv", "activations"]


class Inputs(msgspec.Struct, frozen=True):
    model: Model = "llama-3.1-8b"
    device: Device = "h100-sxm"
    weights: Weights = "bf16"
    users: Annotated[int, control("requests", ge=1, le=256, step=1, scale="log")] = 8
    context: Annotated[
        int, control("context", ge=16, le=131072, step=1, unit="tokens", scale="log")
    ] = 4096
    host_gb: Annotated[
        int, control("host memory", ge=16, le=4096, step=16, unit="GB", scale="log")
    ] = 1024
    disk_gb_s: Annotated[
        float,
        control(
            "disk", "how fast it is read", ge=0.1, le=60, step=0.1, unit="GB/s", is_folded=True
        ),
    ] = 7.0
    kv: Cache = "auto"


class Item(msgspec.Struct, frozen=True):
    """What one may ask the size of. `home`: the tier in which it lives while a token is made."""

    name: str
    means: Means
    bytes: float
    home: str


class Level(msgspec.Struct, frozen=True):
    """`bytes` None: as large as one likes. `bytes_per_s` None: no data sheet says. `read_s`: the
    weights of the model once at this speed. `held` of what lies here for long."""

    name: str
    bytes: float | None
    bytes_per_s: float | None
    read_s: float | None
    held: list[Item]


class Drawing(msgspec.Struct, frozen=True):
    """`step_s` by tier: reading what a token needs from where it lies."""

    device: str
    levels: list[Level]
    items: list[Item]
    weights_bytes: float
    step_s: dict[str, float]


def answer(inputs: Inputs) -> Answer[Drawing]:
    setup = pricer_of(inputs.model, inputs.device, inputs.weights, inputs.kv).setup
    levels = tiers(setup.device, inputs.host_gb * 1e9, inputs.disk_gb_s * 1e9)
    amounts = _amounts(setup, inputs)
    placed = place(amounts, levels, UTILIZATION)
    step_s = read_seconds(placed, levels)
    weights = amounts[0].bytes
    drawing = Drawing(
        setup.device.label,
        [_level(level, placed, weights) for level in levels],
        _items(setup, inputs, amounts, placed, levels),
        weights,
        {name: value for name, value in step_s.items() if value},
    )
    total = sum(step_s.values())
    return Answer(
        _sentence(drawing, total, inputs),
        drawing,
        _figures(drawing, levels, amounts, step_s, total),
        _tables(drawing, levels),
        _questions(setup, inputs, drawing, amounts, total),
        Guess(
            "How many times longer does it take to read the weights from the host's memory than "
            "from the device's?",
            "times",
            round(_ratio(drawing, HOST) or _ratio(drawing, DISK) or 1.0, 1),
        ),
    )


# ------------------------------------------------------------------------ what is kept and read


def _amounts(setup: Setup, inputs: Inputs) -> list[Amount]:
    """Weights, then keys and values of all requests; and how much of each a step reads."""
    spec, precision = setup.spec, setup.precision
    ops = step_ops(spec, decode_shape(inputs.users, inputs.context - 1), precision=precision)
    read = sum(op.count * op.weight_bytes for op in ops)
    kept = inputs.users * kv_bytes(spec, inputs.context, precision.dtype_bytes, precision.kv)
    attended = sum(op.count * op.kv_bytes for op in ops if op.kind == "decode_attention")
    held = _weight_bytes(setup)
    return [Amount("weights", held, min(read, held)), Amount("KV cache", kept, attended)]


def _weight_bytes(setup: Setup) -> float:
    return sum(item.bytes for item in weight_items(setup.spec, setup.layout, setup.precision))


def _items(
    setup: Setup,
    inputs: Inputs,
    amounts: list[Amount],
    placed: list[Placed],
    levels: tuple[Tier, ...],
) -> list[Item]:
    """From the smallest to the largest; what a kernel works on lives where it fits at once."""
    spec, size = setup.spec, setup.precision.dtype_bytes
    head = spec.layers[0].attention.head_dim
    on_chip = [level for level in levels if level.name in (SRAM, LAST_CACHE)]

    def worked_on(name: str, num_bytes: float) -> Item:
        home = next((one.name for one in on_chip if num_bytes <= one.bytes), MEMORY)
        return Item(name, "activations", num_bytes, home)

    def stays(name: str, means: Means, num_bytes: float, of: str) -> Item:
        return Item(name, means, num_bytes, next(p.tier for p in placed[::-1] if p.name == of))

    per_token = kv_bytes_per_token(spec, size, setup.precision.kv)
    return [
        worked_on("a tile of attention", 3 * TILE_ROWS * head * size),
        worked_on("hidden states of a step", inputs.users * spec.hidden_size * size),
        stays("KV of one token", "kv", per_token, "KV cache"),
        stays("one layer's weights", "weights", amounts[0].bytes / spec.num_layers, "weights"),
        stays("KV of one request", "kv", amounts[1].bytes / inputs.users, "KV cache"),
        stays("KV of all requests", "kv", amounts[1].bytes, "KV cache"),
        stays("all weights", "weights", amounts[0].bytes, "weights"),
    ]


def _level(level: Tier, placed: list[Placed], weights: float) -> Level:
    return Level(
        level.name,
        None if level.name == DISK else level.bytes,
        level.bytes_per_s,
        None if level.bytes_per_s is None else weights / level.bytes_per_s,
        [
            Item(one.name, "weights" if one.name == "weights" else "kv", one.bytes, level.name)
            for one in placed
            if one.tier == level.name
        ],
    )


def _find(drawing: Drawing, name: str) -> Level | None:
    return next((level for level in drawing.levels if level.name == name), None)


def _ratio(drawing: Drawing, name: str) -> float | None:
    """How many times slower than the device's memory this tier is."""
    own, other = _find(drawing, MEMORY), _find(drawing, name)
    if own is None or other is None or not own.bytes_per_s or not other.bytes_per_s:
        return None
    return own.bytes_per_s / other.bytes_per_s


# ------------------------------------------------------------------------ in words


def _sentence(drawing: Drawing, total: float, inputs: Inputs) -> str:
    far = [level for level in drawing.levels if level.held and level.name in (HOST, DISK)]
    own = _find(drawing, MEMORY)
    alone = 0.0 if own is None or own.read_s is None else own.read_s
    if not far:
        ratio, name = _ratio(drawing, HOST), "the host's memory"
        if ratio is None:
            ratio, name = _ratio(drawing, DISK), "disk"
        return (
            f"All of it fits in the device's memory: a step reads what it needs in "
            f"{seconds(total)}. From {name} the same would take {number(ratio or 1)} times as long."
        )
    away = sum(item.bytes for level in far for item in level.held)
    return (
        f"{memory(away)} have no room in the device's memory and come from "
        f"{' and '.join(level.name for level in far)}: a step takes {seconds(total)} where the "
        f"weights alone, in a memory large enough, would take {seconds(alone)}."
    )


def _figures(
    drawing: Drawing,
    levels: tuple[Tier, ...],
    amounts: list[Amount],
    step_s: dict[str, float],
    total: float,
) -> list[Figure]:
    weights, rows = amounts[0].bytes, list[Figure]()
    for level in levels:
        if level.bytes_per_s is None:
            continue
        rows.append(
            Figure(
                f"Weights once from {level.name}", weights / level.bytes_per_s * 1e3, "ms",
                "assumed" if level.name == DISK else "ideal",
                f"{memory(weights)} / {scaled(level.bytes_per_s, 'B/s')} ({level.source})",
                f"{PLACE}tiers",
            )
        )  # fmt: skip
    parts = [f"{seconds(value)} from {name}" for name, value in step_s.items() if value]
    rows.append(
        Figure(
            "Reading for one step", total * 1e3, "ms", "ideal", " + ".join(parts),
            f"{PLACE}read_seconds",
        )
    )  # fmt: skip
    return rows


def _tables(drawing: Drawing, levels: tuple[Tier, ...]) -> list[Table]:
    unknown = "no data sheet says"
    return [
        Table(
            "Memories",
            ["memory", "bytes", "bytes a second", "weights once, s", "source"],
            [
                [one.name, "as you like" if one.bytes is None else one.bytes,
                 one.bytes_per_s or unknown, one.read_s or unknown, level.source]
                for one, level in zip(drawing.levels, levels, strict=True)
            ],
        ),
        Table(
            "What lives where",
            ["what", "bytes", "where"],
            [[item.name, item.bytes, item.home] for item in drawing.items],
        ),
    ]  # fmt: skip


def _questions(
    setup: Setup, inputs: Inputs, drawing: Drawing, amounts: list[Amount], total: float
) -> list[Question]:
    device, size = setup.device, setup.precision.dtype_bytes
    layer = amounts[0].bytes / setup.spec.num_layers
    cache = device.l2_bytes
    fits = "does not fit" if layer > cache else "fits"
    scores, tile = inputs.context**2 * size, drawing.items[0].bytes
    asked = [
        Question(
            "Could the last cache keep the weights of a layer from one token to the next?",
            f"One layer takes {memory(layer)} and the cache has {memory(cache)}: it {fits}, and "
            f"the other {setup.spec.num_layers - 1} layers pass through it before its turn comes "
            "again.",
        ),
        Question(
            "Do intermediate results stay in SRAM?",
            f"Those inside a kernel do: a tile of attention takes {memory(tile)}. Between "
            f" kernels they pass through memory. The score matrix of one head at "
            f"{inputs.context:,} tokens would take {memory(scores)}, which is why it is never made "
            "whole.",
        ),
    ]
    if device.kind == "gpu":
        link = device.host_link_bytes_per_s
        moved = amounts[1].bytes / inputs.users
        asked.append(
            Question(
                "What does it cost to move one request's keys and values to the host and back?",
                f"{memory(moved)} at {scaled(link, 'B/s')}: {seconds(2 * moved / link)}, "
                f"{number(2 * moved / link / total)} times the reading of a step.",
            )
        )
    return asked


PAGE = Page(
    name="memory_hierarchy",
    title="The memory hierarchy",
    idea="Small memories are fast and large ones slow; a token waits for the slowest one that it "
    "needs.",
    group="Memory",
    inputs=Inputs,
    answer=answer,
    presets=(
        Preset("8B on an H100", {}),
        Preset("70B on one 80 GB card", {"model": "llama-3.1-70b", "device": "a100-80-sxm"}),
        Preset("70B in 4 bits", {"model": "llama-3.1-70b", "weights": "int4"}),
        Preset("Half a terabyte of weights", {"model": "deepseek-v3", "weights": "fp8",
            "device": "h200-sxm", "host_gb": 512}),
        Preset("A processor's own memory", {"device": "epyc-9654", "users": 1}),
    ),
)  # fmt: skip
