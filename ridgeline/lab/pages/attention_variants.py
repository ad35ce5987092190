"""What do groups of heads, one head, a latent vector, windows and shared layers do to the cache?

Each variant is the chosen model with the attention of its layers replaced; everything else stays.
What it keeps, reads and multiplies is counted from that description like that of any model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle
from typing import Annotated

import msgspec

from ridgeline.architectures.counts import (
    flops_per_key,
    kv_bytes,
    kv_bytes_per_token,
    layer_kv_bytes,
)
from ridgeline.architectures.spec import AttentionSpec, LatentSpec, LayerSpec, ModelSpec
from ridgeline.cost.ops import step_ops
from ridgeline.cost.roofline import ideal_seconds
from ridgeline.cost.setup import Setup
from ridgeline.cost.throughput import decode_shape
from ridgeline.errors import RequestFault
from ridgeline.figures import memory, number, percent, seconds
from ridgeline.lab.machine import Cache, FoldedDevice, FoldedWeights, Model, pricer_of, spec_of
from ridgeline.lab.page import Answer, Figure, Guess, Page, Preset, Question, Table, control

STEP = "ridgeline.cost.roofline.ideal_seconds"


class Inputs(msgspec.Struct, frozen=True):
    model: Model = "llama-3.1-70b"
    context: Annotated[
        int, control("context", ge=16, le=131072, step=1, unit="tokens", scale="log")
    ] = 32768
    batch: Annotated[int, control("requests in a step", ge=1, le=256, step=1, scale="log")] = 8
    kv_heads: Annotated[
        int,
        control("KV heads of GQA", "each serves an equal group of query heads", ge=1, le=256,
                scale="powers"),
    ] = 8  # fmt: skip
    latent: Annotated[
        int,
        control("latent vector", "numbers of a token in MLA", ge=64, le=4096, step=64),
    ] = 512
    window: Annotated[
        int, control("window", ge=16, le=65536, step=16, unit="tokens", scale="log")
    ] = 4096
    full_every: Annotated[
        int,
        control(
            "one full layer in",
            "the others see the window alone",
            ge=1,
            le=16,
            unit="layers",
            is_folded=True,
        ),
    ] = 6
    shared_by: Annotated[
        int,
        control(
            "cache shared by", "cross-layer sharing", ge=1, le=8, unit="layers", is_folded=True
        ),
    ] = 2
    rotated: Annotated[
        int,
        control("rotated key", "numbers beside the latent vector", ge=16, le=256, step=16,
                is_folded=True),
    ] = 64  # fmt: skip
    device: FoldedDevice = "h100-sxm"
    weights: FoldedWeights = "bf16"
    kv: Cache = "auto"


class Variant(msgspec.Struct, frozen=True):
    """`query_heads` share `kv_heads`, 0 where a latent vector stands for all. Bytes of all layers;
    `keeps` is of one request of the context, `reads` of a step. `layers` says of each layer whether
    it keeps keys and values of all tokens ("full"), of a window, or none ("none").
    `flops_per_byte`: of attention in a step."""

    name: str
    title: str
    query_heads: int
    kv_heads: int
    layers: list[str]
    bytes_per_token: int
    keeps: int
    reads: float
    weights: float
    seconds: float
    flops_per_byte: float


class Drawing(msgspec.Struct, frozen=True):
    device: str
    ridge: float
    context: int
    batch: int
    variants: list[Variant]


@dataclass(frozen=True, slots=True)
class _Found:
    """A variant and what it was counted from."""

    spec: ModelSpec
    seen: Variant


def answer(inputs: Inputs) -> Answer[Drawing]:
    setup = pricer_of(inputs.model, inputs.device, inputs.weights, inputs.kv).setup
    base = _plain(setup.spec.layers[0].attention)
    if base.num_heads % inputs.kv_heads:
        divisors = [n for n in range(1, base.num_heads + 1) if base.num_heads % n == 0]
        raise RequestFault(
            f"kv_heads is {inputs.kv_heads}; {base.num_heads} query heads make equal groups with "
            f"{', '.join(map(str, divisors))}",
            param="kv_heads",
        )
    ways = _variants(
        inputs.model, inputs.kv_heads, inputs.latent, inputs.rotated, inputs.window,
        inputs.full_every, inputs.shared_by,
    )  # fmt: skip
    found = [_counted(setup, spec, name, title, inputs) for name, title, spec in ways]
    drawing = Drawing(
        setup.device.label,
        setup.device.ridge(setup.precision.short_dtype),
        inputs.context,
        inputs.batch,
        [one.seen for one in found],
    )
    mha, gqa = found[0].seen, found[1].seen
    return Answer(
        _sentence(inputs, mha, gqa),
        drawing,
        _figures(inputs, setup, found),
        _tables(drawing),
        _questions(inputs, setup, found),
        Guess(
            f"How many bytes of cache does a token take in all layers with {inputs.kv_heads} KV "
            f"heads?",
            "bytes",
            gqa.bytes_per_token,
        ),
    )


# ------------------------------------------------------------------------ the variants


def _plain(attention: AttentionSpec) -> AttentionSpec:
    """With keys and values of its own for each query head, and all tokens in sight."""
    latent = attention.latent
    return replace(
        attention,
        num_kv_heads=attention.num_heads,
        head_dim=attention.head_dim if latent is None else latent.v_head_dim,
        window=None,
        latent=None,
        cache_layer=None,
    )


@lru_cache(maxsize=8)  # those that a slider was at last: other inputs leave the models as they are
def _variants(
    model: str,
    kv_heads: int,
    latent: int,
    rotated: int,
    window: int,
    full_every: int,
    shared_by: int,
) -> tuple[tuple[str, str, ModelSpec], ...]:
    """(name, title, model)"""
    spec = spec_of(model)
    base = _plain(spec.layers[0].attention)
    grouped = replace(base, num_kv_heads=kv_heads)
    vectors = LatentSpec(latent, rotated, base.head_dim, base.head_dim)
    joint = replace(base, head_dim=base.head_dim + rotated, latent=vectors)
    every = [replace(grouped, window=window)] * (full_every - 1) + [grouped]
    # Whose cache a layer reads costs nothing, so that all may be one object, which is priced once.
    shared = [grouped] + [replace(grouped, cache_layer=0)] * (shared_by - 1)
    ways = (
        ("MHA", "one KV head each", [base]),
        ("GQA", f"groups of {base.num_heads // kv_heads}", [grouped]),
        ("MQA", "one KV head for all", [replace(base, num_kv_heads=1)]),
        ("MLA", "latent vectors", [joint]),
        ("GQA, windows", f"in {full_every - 1} of {full_every} layers", every),
        ("GQA, shared", f"by {shared_by} layers", shared),
    )
    return tuple((name, title, _with(spec, attentions)) for name, title, attentions in ways)


def _with(spec: ModelSpec, attentions: Sequence[AttentionSpec]) -> ModelSpec:
    """The layers have these one after the other, from the beginning again and again."""
    made: dict[tuple[int, int], LayerSpec] = {}  # equal layers stay one object
    layers = list[LayerSpec]()
    for layer, attention in zip(spec.layers, cycle(attentions)):
        key = (id(layer), id(attention))
        if key not in made:
            made[key] = replace(layer, attention=attention, schemes=())
        layers.append(made[key])
    return replace(spec, layers=tuple(layers))


def _counted(setup: Setup, spec: ModelSpec, name: str, title: str, inputs: Inputs) -> _Found:
    precision = setup.precision
    size, kv = precision.dtype_bytes, precision.kv
    shape = decode_shape(inputs.batch, inputs.context - 1)
    ops = step_ops(spec, shape, setup.layout, precision)
    attention = spec.layers[0].attention
    attends = [op for op in ops if op.kind == "decode_attention"]
    read = sum(op.count * op.kv_bytes for op in attends)
    seen = Variant(
        name,
        title,
        attention.num_heads,
        0 if attention.latent else attention.num_kv_heads,
        [_kept(layer.attention) for layer in spec.layers],
        kv_bytes_per_token(spec, size, kv),
        kv_bytes(spec, inputs.context, size, kv),
        read,
        sum(op.count * op.weight_bytes for op in ops),
        sum(op.count * ideal_seconds(op, setup.device) for op in ops),
        sum(op.count * op.flops for op in attends) / read,
    )
    return _Found(spec, seen)


def _kept(attention: AttentionSpec) -> str:
    if attention.cache_layer is not None:
        return "none"
    return "full" if attention.window is None else "window"


# ------------------------------------------------------------------------ in words


def _sentence(inputs: Inputs, mha: Variant, gqa: Variant) -> str:
    share = gqa.reads / (gqa.reads + gqa.weights)
    return (
        f"With {gqa.kv_heads} KV heads for {gqa.query_heads} query heads a token takes "
        f"{memory(gqa.bytes_per_token)} instead of {memory(mha.bytes_per_token)}; a step of "
        f"{inputs.batch} requests with {inputs.context:,} tokens then reads {memory(gqa.reads)} of "
        f"keys and values, {percent(share, 0)} of its traffic, instead of {memory(mha.reads)}."
    )


def _figures(inputs: Inputs, setup: Setup, found: list[_Found]) -> list[Figure]:
    precision = setup.precision
    bits = precision.kv_line.element_bits or 8 * precision.dtype_bytes
    rows, size, kv = list[Figure](), precision.dtype_bytes, precision.kv
    for one in found:
        seen, kind = one.seen, one.spec.layers[0].attention
        numbers = (
            f"2 x {kind.num_kv_heads} heads x {kind.head_dim}"
            if kind.latent is None
            else f"({kind.latent.kv_lora_rank} + {kind.latent.qk_rope_head_dim})"
        )
        own = len(seen.layers) - seen.layers.count("none")
        each = layer_kv_bytes(kind, size, kv)
        rows.append(
            Figure(
                f"{seen.name}: KV of a token", seen.bytes_per_token, "B", "ideal",
                f"{own} layers x {numbers} x {bits} bits = {own} x {each:,} B",
                "ridgeline.architectures.counts.kv_bytes_per_token",
            )
        )  # fmt: skip
    gqa, grouped = found[1].seen, found[1].spec.layers[0].attention
    bandwidth = setup.device.bandwidth
    rows += [
        Figure(
            "GQA: one step", gqa.seconds * 1e3, "ms", "ideal",
            f"each operator at its own limit; ({memory(gqa.weights)} of weights + "
            f"{memory(gqa.reads)} of the cache) / {bandwidth / 1e9:,.0f} GB/s alone are "
            f"{seconds((gqa.weights + gqa.reads) / bandwidth)}", STEP,
        ),
        Figure(
            "GQA: operations for a byte of the cache", gqa.flops_per_byte, "FLOP/B", "ideal",
            f"4 x {gqa.query_heads} heads x {grouped.head_dim} / "
            f"{layer_kv_bytes(grouped, size, kv):,} B",
            "ridgeline.architectures.counts.flops_per_key",
        ),
    ]  # fmt: skip
    return rows


def _tables(drawing: Drawing) -> list[Table]:
    columns = [
        "variant", "KV heads", "KV of a token, B", "of one request, B", "read in a step, B",
        "weights read, B", "ideal step, ms", "FLOP per byte of cache",
    ]  # fmt: skip
    return [
        Table(
            "Side by side",
            columns,
            [
                [one.name, one.kv_heads or "latent", one.bytes_per_token, one.keeps, one.reads,
                 one.weights, one.seconds * 1e3, one.flops_per_byte]
                for one in drawing.variants
            ],
        )
    ]  # fmt: skip


def _questions(inputs: Inputs, setup: Setup, found: list[_Found]) -> list[Question]:
    gqa, mla, shared = (found[i].seen for i in (1, 3, 5))
    ridge = setup.device.ridge(setup.precision.short_dtype)
    latent = found[3].spec.layers[0].attention
    side = "still below" if mla.flops_per_byte < ridge else "above"
    per_token = gqa.bytes_per_token * inputs.batch
    equal = int(gqa.weights // per_token)
    return [
        Question(
            "From which context on does a step read more cache than weights?",
            f"With GQA, {inputs.batch} requests read {memory(per_token)} for each token of context "
            f"and {memory(gqa.weights)} of weights: from about {equal:,} tokens on.",
        ),
        Question(
            "What does MLA pay for its small cache?",
            f"All {latent.num_heads} query heads work on the same vector: "
            f"{number(flops_per_key(latent))} operations a token and layer, "
            f"{number(mla.flops_per_byte)} for each byte, {side} the {number(ridge)} FLOP/B at "
            f"which {setup.device.label} is busy; GQA needs {number(gqa.flops_per_byte)}.",
        ),
        Question(
            "Does cross-layer sharing make a step faster?",
            f"Hardly: it keeps {memory(shared.keeps)} a request instead of {memory(gqa.keeps)}, "
            f"but each layer still reads what it attends to, {memory(shared.reads)} in a step.",
        ),
    ]


PAGE = Page(
    name="attention_variants",
    title="MHA, GQA, MQA, MLA, windows, shared layers",
    idea="What heads share, the cache does not have to hold, and a step does not have to read.",
    group="Memory",
    inputs=Inputs,
    answer=answer,
    presets=(
        Preset("Llama-3.1-70B, long contexts", {}),
        Preset("Llama-2-70B at 4,096 tokens", {
            "model": "llama-2-70b", "context": 4096, "batch": 1,
        }),
        Preset("DeepSeek-V3", {"model": "deepseek-v3", "kv_heads": 8, "device": "h200-sxm"}),
        Preset("A small model on one card", {
            "model": "llama-3.1-8b", "device": "rtx-4090", "context": 8192, "batch": 4,
        }),
    ),
)  # fmt: skip
