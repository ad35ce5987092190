"""How large is this model, and what does a token cost in operations and bytes? Arithmetic only.

An operation is one multiplication or one addition. Matrix products and attention are counted;
norms, activations and rotations (under one percent) are not. A test holds these against what
PyTorch counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from ridgeline.architectures.spec import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, ModelSpec
from ridgeline.architectures.tensor_names import expected_tensors
from ridgeline.formats import kv_line, weight_line


def num_parameters(spec: ModelSpec) -> int:
    """Numbers in the checkpoint; a tied output matrix counts once."""
    return sum(prod(shape) for shape in expected_tensors(spec).values())


def num_active_parameters(spec: ModelSpec) -> int:
    """Numbers that one token is multiplied by: only the chosen experts, no embedding look-up."""
    idle = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size
    for layer in spec.layers:
        if isinstance(layer.feed_forward, ExpertsSpec):
            unused = layer.feed_forward.num_experts - layer.feed_forward.num_active
            idle += unused * 3 * spec.hidden_size * layer.feed_forward.intermediate_size
    return num_parameters(spec) - idle


def linear_weights(spec: ModelSpec) -> int:
    """Weights that a weight format stores: attention and feed-forward matrices without routers.
    The embedding, the output matrix, norms, biases and routers stay in the serving dtype."""
    return sum(
        _attention_weights(spec, layer.attention)
        + (layer.feed_forward.num_experts if isinstance(layer.feed_forward, ExpertsSpec) else 1)
        * 3
        * spec.hidden_size
        * layer.feed_forward.intermediate_size
        for layer in spec.layers
    )


def weight_bytes(spec: ModelSpec, dtype_bytes: int, weight_format: str = "plain") -> int:
    """Bytes of all weights as served, scales included."""
    packed = linear_weights(spec)
    bits = weight_line(weight_format).bits_per_weight(dtype_bytes)
    return int(packed * bits / 8) + (num_parameters(spec) - packed) * dtype_bytes


def kv_bytes_per_token(spec: ModelSpec, dtype_bytes: int, kv_format: str = "auto") -> int:
    """Bytes of K and V of one token in all layers, as long as no window has passed it."""
    line = kv_line(kv_format)
    return sum(
        line.bytes_per_token(layer.attention.num_kv_heads, layer.attention.head_dim, dtype_bytes)
        for layer in spec.layers
    )


def kv_bytes(spec: ModelSpec, num_tokens: int, dtype_bytes: int, kv_format: str = "auto") -> int:
    """Bytes of K and V that a request of `num_tokens` must keep: its windows, or all of it."""
    line = kv_line(kv_format)
    return sum(
        line.bytes_per_token(a.num_kv_heads, a.head_dim, dtype_bytes) * _seen(a, num_tokens)
        for a in (layer.attention for layer in spec.layers)
    )


def linear_flops_per_token(spec: ModelSpec) -> int:
    """Operations of the layers' matrix products for one token, the output matrix not included."""
    return sum(2 * _layer_weights(spec, layer) for layer in spec.layers)


def logits_flops(spec: ModelSpec) -> int:
    """Operations of one row of logits."""
    return 2 * spec.vocab_size * spec.hidden_size


def attention_flops(spec: ModelSpec, num_new: int, num_before: int) -> int:
    """Operations of scores and mixing for `num_new` tokens after `num_before`, each looking at
    what it may see, itself included."""
    return sum(
        4 * a.num_heads * a.head_dim * _pairs(a, num_new, num_before)
        for a in (layer.attention for layer in spec.layers)
    )


def flops_per_token(spec: ModelSpec, context: int) -> int:
    """Operations to decode one token that sees `context` tokens, itself included."""
    return (
        linear_flops_per_token(spec)
        + attention_flops(spec, 1, max(context, 1) - 1)
        + logits_flops(spec)
    )


def step_flops(spec: ModelSpec, shape: Iterable[tuple[int, int]], num_logits: int) -> int:
    """Operations of a step over (new tokens, context before them) per request."""
    return num_logits * logits_flops(spec) + sum(
        new * linear_flops_per_token(spec) + attention_flops(spec, new, before)
        for new, before in shape
    )


def _attention_weights(spec: ModelSpec, attention: AttentionSpec) -> int:
    heads = 2 * attention.num_heads + 2 * attention.num_kv_heads
    return heads * attention.head_dim * spec.hidden_size


def _layer_weights(spec: ModelSpec, layer: LayerSpec) -> int:
    """Weights that one token meets in a layer."""
    inner = layer.feed_forward
    width = 3 * spec.hidden_size * inner.intermediate_size
    if not isinstance(inner, DenseSpec):
        width = width * inner.num_active + spec.hidden_size * inner.num_experts
    return _attention_weights(spec, layer.attention) + width


def _seen(attention: AttentionSpec, num_tokens: int) -> int:
    return num_tokens if attention.window is None else min(num_tokens, attention.window)


def _pairs(attention: AttentionSpec, num_new: int, num_before: int) -> int:
    """How many (query, visible key) pairs there are."""
    first, last = num_before + 1, num_before + num_new  # keys that the queries could see
    if attention.window is None or last <= attention.window:
        return (first + last) * num_new // 2
    growing = max(0, attention.window - num_before)  # queries that still see everything
    return growing * (first + attention.window) // 2 + (num_new - growing) * attention.window
