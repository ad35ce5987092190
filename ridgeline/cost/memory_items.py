"""What do weights take on one device, line by line?"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.architectures.counts import (
    attention_matrices,
    layer_scale_bytes,
    small_parameters,
    vocabulary_bytes,
)
from ridgeline.architectures.spec import DenseSpec, LayerSpec, ModelSpec
from ridgeline.cost.layout import Layout
from ridgeline.cost.precision import Precision
from ridgeline.formats import STORED

WEIGHTS = ("embedding", "attention", "feed-forward", "experts", "norms", "LM head", "scales")


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of the contract; `note` says what is in it."""

    what: str
    bytes: int
    note: str = ""

    @property
    def words(self) -> str:
        return size_words(self.bytes)


def size_words(num_bytes: float) -> str:
    """In decimal and in binary units, which differ by 7 %: "16.06 GB (14.96 GiB)"."""
    return f"{num_bytes / 1e9:.2f} GB ({num_bytes / 2**30:.2f} GiB)"


def weight_items(spec: ModelSpec, layout: Layout, precision: Precision) -> tuple[MemoryItem, ...]:
    """The weights of the fullest pipeline stage by group; `norms` has biases and routers too."""
    stages = (_stage_items(spec, layout, precision, stage) for stage in range(layout.pp))
    return max(stages, key=lambda items: sum(item.bytes for item in items))


def stage_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """Which layers a pipeline stage has: as even as possible."""
    return range(stage * num_layers // num_stages, (stage + 1) * num_layers // num_stages)


def _stage_items(
    spec: ModelSpec, layout: Layout, precision: Precision, stage: int
) -> tuple[MemoryItem, ...]:
    own = [spec.layers[i] for i in stage_layers(spec.num_layers, layout.pp, stage)]
    counts = {layer: own.count(layer) for layer in dict.fromkeys(own)}
    is_first, is_last = stage == 0, stage == layout.pp - 1
    size, tp = precision.dtype_bytes, layout.tp
    vocabulary, of_vocabulary = vocabulary_bytes(spec, size, precision.weights, tp)
    attention = dense = experts = small = 0
    for layer, count in counts.items():
        attention += count * _attention_bits(spec, layer, tp, precision)
        experts += count * _expert_bits(spec, layer, tp, precision)
        dense += count * _dense_bits(spec, layer, tp, precision)
        small += count * small_parameters(spec, layer)
    plain = attention // 8, dense // 8, experts // 8
    scales = sum(
        count * layer_scale_bytes(spec.hidden_size, layer, precision.weights, tp)
        for layer, count in counts.items()
    )
    has_embedding = is_first or (is_last and spec.tie_embeddings)
    has_head = is_last and not spec.tie_embeddings
    scales += of_vocabulary * (has_embedding + has_head)
    amounts = (
        (vocabulary if has_embedding else 0, f"{spec.vocab_size} x {spec.hidden_size}"),
        (plain[0], "q, k, v and output matrices"),
        (plain[1], "gate, up and down matrices"),
        (plain[2], "gate, up and down matrices of all experts"),
        ((small + (spec.hidden_size if is_last else 0)) * size, "norms, biases and routers"),
        (vocabulary if has_head else 0, "output matrix"),
        (scales, f"of {precision.weights} weights"),
    )
    return tuple(
        MemoryItem(what, amount, note)
        for what, (amount, note) in zip(WEIGHTS, amounts, strict=True)
        if amount
    )


def _bits(layer: LayerSpec, role: str, precision: Precision) -> int:
    """Of one weight of such a matrix, scales apart."""
    size, bits = 8 * precision.dtype_bytes, precision.weight_line.bits
    if precision.weights == STORED:
        stored = layer.stored_as(role)
        bits = None if stored is None else stored.kept_bits
    return size if bits is None else bits


def _attention_bits(spec: ModelSpec, layer: LayerSpec, tp: int, precision: Precision) -> int:
    """Of the weights of one rank: q, o and what belongs to heads are split, k and v as far as there
    are KV heads, what all heads share is not."""
    attention = layer.attention
    total = 0
    for matrix in attention_matrices(attention, spec.hidden_size):
        if matrix.role in ("q_a", "kv_a"):
            held = matrix.num_weights
        elif matrix.role in ("k", "v"):
            per_head = matrix.num_weights // attention.num_kv_heads
            held = -(-attention.num_kv_heads // tp) * per_head
        else:
            held = matrix.num_weights // tp
        total += held * _bits(layer, matrix.role, precision)
    return total


def _dense_bits(spec: ModelSpec, layer: LayerSpec, tp: int, precision: Precision) -> int:
    inner = layer.feed_forward
    size = inner.intermediate_size if isinstance(inner, DenseSpec) else inner.shared_size
    return spec.hidden_size * size * _gated_bits(layer, precision) // tp


def _expert_bits(spec: ModelSpec, layer: LayerSpec, tp: int, precision: Precision) -> int:
    inner = layer.feed_forward
    if isinstance(inner, DenseSpec):
        return 0
    numbers = inner.num_experts * spec.hidden_size * inner.intermediate_size
    return numbers * _gated_bits(layer, precision) // tp


def _gated_bits(layer: LayerSpec, precision: Precision) -> int:
    """Of one weight of gate, up and down each."""
    return sum(_bits(layer, role, precision) for role in ("gate", "up", "down"))
