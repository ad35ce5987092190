"""What do weights take on one device, line by line?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from ridgeline.architectures.counts import layer_kv_bytes, layer_scale_bytes, vocabulary_bytes
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.parts import Part, norm_roles, parts
from ridgeline.architectures.shares import (
    Shard,
    expert_shard,
    head_unit,
    held_share,
    kv_shard,
    query_shard,
)
from ridgeline.architectures.spec import ExpertsSpec, LayerSpec, ModelSpec
from ridgeline.cost.setup import Layout, Precision
from ridgeline.formats import CHECKPOINT

LAYER_ITEMS = ("attention", "feed-forward", "experts", "norms")
WEIGHTS = ("embedding", *LAYER_ITEMS, "LM head", "scales")


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of the contract; `note` says what is in it."""

    what: str
    bytes: int
    note: str = ""

    @property
    def text(self) -> str:
        return size_text(self.bytes)


def size_text(num_bytes: float) -> str:
    """In decimal and in binary units, which differ by 7 %: "16.06 GB (14.96 GiB)"."""
    return f"{num_bytes / 1e9:.2f} GB ({num_bytes / 2**30:.2f} GiB)"


def weight_items(spec: ModelSpec, layout: Layout, precision: Precision) -> tuple[MemoryItem, ...]:
    """The weights of the fullest pipeline stage by group; `norms` has biases and routers too."""
    stages = (stage_items(spec, layout, precision, stage) for stage in range(layout.pp))
    return max(stages, key=lambda items: sum(item.bytes for item in items))


def stage_items(
    spec: ModelSpec, layout: Layout, precision: Precision, stage: int, rank: int | None = None
) -> tuple[MemoryItem, ...]:
    """The same of one stage, on this one of its ranks (None: on the fullest)."""
    own = [spec.layers[i] for i in layout.stage_layers(spec.num_layers, stage)]
    counts = {layer: own.count(layer) for layer in dict.fromkeys(own)}
    is_first, is_last = stage == 0, stage == layout.pp - 1
    size, tp = precision.dtype_bytes, layout.tp
    vocabulary, of_vocabulary = vocabulary_bytes(spec, size, precision.weights, tp)
    positions = spec.learned_positions * spec.hidden_size * size
    last_norm = len(norm_roles(spec.norm_kind, "norm")) * spec.hidden_size * size
    held = dict.fromkeys(LAYER_ITEMS, 0)  # bits
    for layer, count in counts.items():
        held["norms"] += count * layer.unlisted * 8 * size
        for part in parts(layer, spec.hidden_size):
            held[_item(part)] += count * _held_bits(layer, part, layout, precision, rank)
    ranks = tp, layout.ep, layout.dp
    scales = sum(
        count * layer_scale_bytes(spec.hidden_size, layer, precision.weights, *ranks, rank)
        for layer, count in counts.items()
    )
    begins, ends = is_first and spec.has_embedding, is_last and spec.has_head
    has_embedding = begins or (ends and spec.tie_embeddings)
    has_head = ends and not spec.tie_embeddings
    scales += of_vocabulary * (has_embedding + has_head)
    amounts = (
        (
            (vocabulary if has_embedding else 0) + is_first * positions,
            f"{spec.vocab_size} x {spec.hidden_size}",
        ),
        (held["attention"] // 8, "q, k, v and output matrices"),
        (held["feed-forward"] // 8, "gate, up and down matrices"),
        (held["experts"] // 8, "gate, up and down matrices of all experts"),
        (held["norms"] // 8 + is_last * last_norm, "norms, biases and routers"),
        (vocabulary if has_head else 0, "output matrix"),
        (scales, f"of {precision.weights} weights"),
    )
    return tuple(
        MemoryItem(what, amount, note)
        for what, (amount, note) in zip(WEIGHTS, amounts, strict=True)
        if amount
    )


def _item(part: Part) -> str:
    """The line that a parameter of a layer is part of."""
    is_attention = part.feeds_attention or part.product == "attention_out"
    if not part.is_packed and not is_attention:
        return "norms"
    if part.is_experts:
        return "experts"
    return "attention" if is_attention else "feed-forward"


def _held_bits(
    layer: LayerSpec, part: Part, layout: Layout, precision: Precision, rank: int | None
) -> int:
    """On one rank, scales apart. Experts may be divided among ranks whole or each by its
    rows."""
    bits = 32 if part.is_float32 else None
    if part.is_packed:
        bits, scheme = precision.weight_line.bits, layer.scheme_of(part.role)
        if precision.weights == CHECKPOINT:
            bits = None if scheme is None else scheme.kept_bits
    ranks = layout.tp, layout.ep, layout.dp
    copies, shape = held_share(part, layer, precision.weights, ranks, rank)
    numbers = copies * prod(shape)
    return numbers * (8 * precision.dtype_bytes if bits is None else bits)


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank has of a model. `group` is that of ranks that attend for the same requests;
    heads and experts are those of the layer with most. `expert_ranks` divide each of its experts;
    None: the model has no experts, or a latent vector for all heads."""

    rank: int
    stage: int
    group: int
    layers: range
    query_heads: Shard
    kv_heads: Shard | None
    experts: Shard | None
    expert_ranks: int
    weights: int  # bytes
    block_bytes: int  # of one block of the KV cache


def rank_share(
    spec: ModelSpec, layout: Layout, precision: Precision, rank: int, block_size: int
) -> RankShare:
    """Of one of `layout.devices` ranks, as they are numbered: those of a group after each other,
    those of the first stage first."""
    tp, ranks = layout.tp, (layout.tp, layout.ep, layout.dp)
    stage, place = divmod(rank, layout.expert_devices)
    layers = layout.stage_layers(spec.num_layers, stage)
    widest = max((spec.layers[i] for i in layers), key=lambda one: one.attention.num_heads)
    attention = widest.attention
    kv_heads = attention.num_heads if attention.latent is not None else attention.num_kv_heads
    unit = head_unit(widest, precision.weights)
    routed = [
        one.feed_forward.num_experts
        for one in (spec.layers[i] for i in layers)
        if isinstance(one.feed_forward, ExpertsSpec)
    ]
    sizes = []
    for group in kv_groups(spec):
        per_token = 0
        for i in group.layers:
            one = spec.layers[i].attention
            own = (
                one
                if one.latent is not None
                else replace(one, num_kv_heads=kv_shard(one.num_kv_heads, place % tp, tp).length)
            )
            kept = layer_kv_bytes(own, precision.dtype_bytes, precision.kv)
            per_token = max(per_token, kept)
        sizes.append(sum(i in layers for i in group.layers) * block_size * per_token)
    return RankShare(
        rank,
        stage,
        place // tp,
        layers,
        query_shard(attention.num_heads, kv_heads, place % tp, tp, unit),
        None if attention.latent is not None else kv_shard(kv_heads, place % tp, tp),
        expert_shard(max(routed), place, ranks) if routed else None,
        layout.expert_devices // layout.ep,
        sum(item.bytes for item in stage_items(spec, layout, precision, stage, place)),
        max(sizes),
    )
