"""How does the KV cache grow while answers are generated, and how many requests fit?

The bar is the memory contract of `cost.memory`; the pool is the engine's own block manager, led
through the requests of the inputs: all prompts are admitted, then all answers grow together, and
where the pool is full the newest request gives its blocks back and waits, as in the scheduler.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ridgeline import figures
from ridgeline.architectures.counts import kv_bytes, kv_bytes_per_token, num_visible
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost.fit_suggestions import Limits
from ridgeline.cost.memory import (
    MemoryItem,
    block_bytes,
    fit_suggestions,
    fixed_items,
    free_blocks,
    ideal_sequences,
    stage_kv_bytes_per_token,
)
from ridgeline.cost.memory_items import WEIGHTS
from ridgeline.cost.setup import Setup
from ridgeline.cost.steady_state import token_budget
from ridgeline.lab.block_pool import CHUNK, Pool, Shape, led_pool
from ridgeline.lab.machine import (
    Cache,
    Config,
    Devices,
    FoldedWeights,
    Model,
    described,
    setup_with,
)
from ridgeline.lab.machine import Device as DeviceName
from ridgeline.lab.page import Answer, Figure, Guess, Page, Preset, Question, Table, control
from ridgeline.scheduler.block_manager import beam_blocks_needed, blocks_needed

NUM_POINTS = 33  # of the curve


class Inputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Model = "llama-3.1-8b"
    config: Config = ""
    device: DeviceName = "h100-sxm"
    users: Annotated[int, control("requests at once", ge=1, le=128, step=1, scale="log")] = 64
    prompt: Annotated[
        int, control("prompt", ge=1, le=32768, step=1, unit="tokens", scale="log")
    ] = 1000
    generated: Annotated[
        int,
        control("generated so far", "by each request", ge=0, le=32768, step=10, unit="tokens"),
    ] = 2000
    output: Annotated[
        int,
        control(
            "longest answer", ge=1, le=32768, step=1, unit="tokens", scale="log", is_folded=True
        ),
    ] = 8000
    prefix: Annotated[
        int,
        control(
            "common beginning",
            "tokens of the prompt that all requests share, such as a system prompt",
            ge=0,
            le=32768,
            step=10,
            unit="tokens",
        ),
    ] = 0
    weights: FoldedWeights = "bf16"
    kv: Cache = "auto"
    devices: Devices = 1
    block_size: Annotated[
        int,
        control("block", "tokens of a block", choices=(8, 16, 32, 64, 128, 256), is_folded=True),
    ] = 16


class Share(msgspec.Struct, frozen=True):
    """A line of the memory bar; `means` is its colour."""

    name: str
    bytes: int
    means: str


class Point(msgspec.Struct, frozen=True):
    """After so many generated tokens: bytes of the keys and values of all requests, and how many
    requests of that length have room."""

    generated: int
    bytes: int
    fit: int


class Drawing(msgspec.Struct, frozen=True):
    device: str
    memory_bytes: int
    capacity_bytes: int
    fixed: list[Share]
    cache_bytes: int
    points: list[Point]
    generated: int
    users: int
    running: int
    reserved_fit: int
    longest: int
    pool: Pool | None
    ways: list[str]


def answer(inputs: Inputs) -> Answer[Drawing]:
    spec = described(inputs.model, inputs.config)
    setup = setup_with(spec, inputs.device, inputs.weights, inputs.kv, inputs.devices)
    output = max(inputs.output, inputs.generated)
    limits = Limits(
        inputs.prompt + output, inputs.users, max(token_budget(setup), inputs.users),
        inputs.block_size,
    )  # fmt: skip
    fixed = fixed_items(setup, limits)
    num_blocks = free_blocks(setup, limits, fixed)
    size = block_bytes(setup, inputs.block_size)
    prefix = min(inputs.prefix, inputs.prompt)
    found = _Counts(spec, setup, num_blocks, prefix, inputs.block_size)
    step = max(1, output // (NUM_POINTS - 1))
    marks = sorted({*range(0, output + 1, step), inputs.generated, output})
    points = [
        Point(g, found.blocks(inputs.users, inputs.prompt + g) * size, found.fit(inputs.prompt + g))
        for g in marks
    ]
    pool = None
    if num_blocks > 0:
        shape = Shape(inputs.users, inputs.prompt, found.prefix, inputs.generated)
        pool = led_pool(num_blocks, inputs.block_size, found.windows, shape)
    here = next(point for point in points if point.generated == inputs.generated)
    running = 0 if pool is None else sum(table.own + table.shared > 0 for table in pool.tables)
    drawing = Drawing(
        device=setup.device.label,
        memory_bytes=setup.device.memory_bytes,
        capacity_bytes=int(setup.device.memory_bytes * limits.utilization),
        fixed=_shares(fixed),
        cache_bytes=here.bytes,
        points=points,
        generated=inputs.generated,
        users=inputs.users,
        running=running,
        reserved_fit=found.reserved(limits.max_model_len),
        longest=limits.max_model_len,
        pool=pool,
        ways=[] if num_blocks > 0 else [way.text for way in fit_suggestions(setup, limits)],
    )
    weight_bytes = sum(item.bytes for item in fixed if item.what in WEIGHTS)
    return Answer(
        _sentence(inputs, drawing, here, weight_bytes),
        drawing,
        _figures(inputs, setup, drawing, here, weight_bytes),
        _tables(drawing, fixed, points),
        _questions(inputs, setup, drawing, found),
        Guess(
            f"How many requests fit once each has generated {inputs.generated:,} tokens?",
            "requests",
            here.fit,
        ),
    )


# ------------------------------------------------------------------------ how many blocks


class _Counts:
    """Blocks of requests that share a beginning, counted in closed form."""

    def __init__(
        self, spec: ModelSpec, setup: Setup, num_blocks: int, prefix: int, block_size: int
    ) -> None:
        self.windows = tuple(group.window for group in kv_groups(spec))
        self.setup = setup
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix = prefix // block_size * block_size  # whole blocks are shared

    def blocks(self, requests: int, num_tokens: int) -> int:
        """Of so many requests, each with so many tokens in the cache."""
        return beam_blocks_needed(
            self.prefix, num_tokens + 1, requests, self.block_size, self.windows, CHUNK
        )

    def fit(self, num_tokens: int) -> int:
        """The most requests whose blocks are in the pool."""
        first = self.blocks(1, num_tokens)
        each = self.blocks(2, num_tokens) - first
        if self.num_blocks < first:
            return 0
        return 1 + (self.num_blocks - first) // max(1, each)

    def reserved(self, longest: int) -> int:
        """The same where each request has room for its longest length from the beginning."""
        each = blocks_needed(longest, self.block_size, self.windows, CHUNK)
        return max(0, self.num_blocks // each)


# ------------------------------------------------------------------------ in words


def _shares(fixed: tuple[MemoryItem, ...]) -> list[Share]:
    """Weights as one, working space as one."""
    weights = sum(item.bytes for item in fixed if item.what in WEIGHTS)
    reserve = sum(item.bytes for item in fixed if item.what == "reserve")
    rest = sum(item.bytes for item in fixed) - weights - reserve
    return [
        Share("weights", weights, "weights"),
        Share("working space", rest, "activations"),
        Share("reserve", reserve, "waiting"),
    ]


def _sentence(inputs: Inputs, drawing: Drawing, here: Point, weight_bytes: int) -> str:
    if drawing.pool is None:
        needed, most = sum(share.bytes for share in drawing.fixed), drawing.capacity_bytes
        way = f" What would fit: {drawing.ways[0]}." if drawing.ways else ""
        return (
            f"The model does not fit: {figures.memory(needed)} are needed on each device before "
            f"the first token is cached, {figures.memory(most)} may be taken.{way}"
        )
    held = (
        f"After {inputs.generated:,} generated tokens, {inputs.users} requests need "
        f"{figures.memory(here.bytes)} of keys and values, {here.bytes / weight_bytes:.2f} times "
        f"the weights"
    )
    if here.fit >= inputs.users:
        return f"{held}; {here.fit:,} requests of this length would fit."
    waiting = inputs.users - drawing.running
    return f"{held}; only {drawing.running} of them fit, so {waiting} wait."


def _figures(
    inputs: Inputs, setup: Setup, drawing: Drawing, here: Point, weight_bytes: int
) -> list[Figure]:
    spec, precision, tp = setup.spec, setup.precision, setup.layout.tp
    tokens = inputs.prompt + inputs.generated
    per_token = stage_kv_bytes_per_token(setup)
    one = kv_bytes(spec, tokens, precision.dtype_bytes, precision.kv, tp)
    attention = spec.layers[0].attention
    layers = sum(layer.attention.cache_layer is None for layer in spec.layers)
    kept = (
        f"{layers} layers x {attention.latent.cached_width} numbers of the latent vector"
        if attention.latent is not None
        else f"2 x {layers} layers x {attention.num_kv_heads} KV heads x {attention.head_dim}"
        + (f" / {tp} devices" if tp > 1 else "")
    )
    bits = precision.kv_line.element_bits or 8 * precision.dtype_bytes
    scales = ", and scales," if precision.kv_line.head_bytes else ""
    seen = min(num_visible(layer.attention, tokens) for layer in spec.layers)
    sight = "" if seen == tokens else f" (some layers keep the last {seen:,} alone)"
    free = drawing.memory_bytes - weight_bytes
    return [
        Figure(
            "KV of a token", per_token, "B", "ideal",
            f"{kept} x {bits} bits{scales} = {per_token:,} B on each device",
            "ridgeline.architectures.counts.kv_bytes_per_token",
        ),
        Figure(
            "KV of one request", one, "B", "ideal",
            f"{tokens:,} tokens{sight} x "
            f"{per_token:,} B = {figures.memory(one)}",
            "ridgeline.architectures.counts.kv_bytes",
        ),
        Figure(
            "Requests that fit", here.fit, "requests", "assumed",
            f"({figures.memory(drawing.capacity_bytes)} that may be taken - "
            f"{figures.memory(sum(share.bytes for share in drawing.fixed))} of all else) in blocks",
            "ridgeline.cost.memory.free_blocks",
        ),
        Figure(
            "The same beside weights alone",
            ideal_sequences(drawing.memory_bytes, weight_bytes, one), "requests", "ideal",
            f"{figures.memory(free)} free / {figures.memory(one)} a request, rounded down",
            "ridgeline.cost.memory.ideal_sequences",
        ),
        Figure(
            "With room reserved for the longest", drawing.reserved_fit, "requests", "assumed",
            f"each holds {drawing.longest:,} tokens from its first to its last",
            "ridgeline.scheduler.block_manager.blocks_needed",
        ),
    ]  # fmt: skip


def _tables(drawing: Drawing, fixed: tuple[MemoryItem, ...], points: list[Point]) -> list[Table]:
    tables = [
        Table(
            "By generated tokens",
            ["generated", "KV cache of all, bytes", "requests that fit"],
            [[point.generated, point.bytes, point.fit] for point in points],
        ),
        Table(
            "Memory of one device before the cache",
            ["item", "bytes", "what is in it"],
            [[item.what, item.bytes, item.note] for item in fixed],
        ),
    ]
    if drawing.pool is not None:
        rows: list[list[str | float]] = [
            [f"request {held.request + 1}", held.shared, held.own, held.spare]
            for held in drawing.pool.tables
        ]
        names = ["request", "shared blocks", "own blocks", "unused slots"]
        tables.append(Table("Block tables", names, rows))
    return tables


def _questions(inputs: Inputs, setup: Setup, drawing: Drawing, found: _Counts) -> list[Question]:
    spec, precision = setup.spec, setup.precision
    now = kv_bytes_per_token(spec, precision.dtype_bytes, precision.kv)
    half = kv_bytes_per_token(spec, precision.dtype_bytes, "fp8")
    asked = [
        Question(
            "What would a cache in fp8 change?",
            f"A token takes {half:,} B in all layers instead of {now:,} B, so "
            f"{now / half:.2g} times as many tokens fit in the same memory.",
        )
    ]
    if drawing.pool is None:
        return asked
    tokens = inputs.prompt + inputs.generated
    paged, reserved = found.fit(tokens), drawing.reserved_fit
    spare = drawing.pool.spare_slots
    slots = drawing.pool.num_blocks * inputs.block_size
    return [
        Question(
            "Why blocks, and not one piece of memory for each request?",
            f"In one piece, each would hold {drawing.longest:,} tokens from the beginning: "
            f"{reserved:,} requests. With blocks {paged:,} of the present length fit.",
        ),
        Question(
            "How much do blocks waste?",
            f"Less than one block a request: {spare:,} slots of last blocks hold no token yet, "
            f"{figures.percent(spare / slots, 2)} of the pool.",
        ),
        *asked,
    ]


PAGE = Page(
    name="kv_growth",
    title="KV growth and the block pool",
    idea="Every generated token stays in memory until its answer ends, and that decides how many "
    "requests fit.",
    group="Memory",
    inputs=Inputs,
    answer=answer,
    presets=(
        Preset("Chat of many users", {}),
        Preset(
            "One long document",
            {
                "model": "llama-3.1-70b",
                "devices": 4,
                "users": 8,
                "prompt": 32768,
                "generated": 512,
            },
        ),
        Preset(
            "Heads without groups",
            {
                "model": "llama-2-13b",
                "device": "a100-40-sxm",
                "users": 16,
                "prompt": 1024,
                "generated": 1024,
                "output": 2048,
            },
        ),
        Preset("A latent cache", {"model": "deepseek-v2-lite", "users": 128}),
        Preset("One system prompt for all", {"prefix": 1000, "prompt": 1250, "generated": 250}),
    ),
)
