"""How large is this model, and what does a token cost in operations and bytes? Arithmetic only.

An operation is one multiplication or one addition. Matrix products and attention are counted;
norms, activations and rotations (under one percent) are not. A test holds these against what
PyTorch counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from ridgeline.architectures.spec import (
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
)
from ridgeline.architectures.stored_config import kept_bytes
from ridgeline.architectures.tensor_names import expected_tensors
from ridgeline.formats import STORED, WeightFormatLine, kv_line, weight_line


def num_parameters(spec: ModelSpec) -> int:
    """Numbers in the checkpoint; a tied output matrix counts once."""
    listed = sum(prod(shape) for shape in expected_tensors(spec).values())
    return listed + sum(layer.unlisted for layer in spec.layers)


def num_active_parameters(spec: ModelSpec) -> int:
    """Numbers that one token is multiplied by: only the chosen experts, no embedding look-up."""
    idle = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size
    for layer in spec.layers:
        if isinstance(layer.feed_forward, ExpertsSpec):
            unused = layer.feed_forward.num_experts - layer.feed_forward.num_active
            idle += unused * expert_weights(spec, layer.feed_forward)
    return num_parameters(spec) - idle


def linear_weights(spec: ModelSpec) -> int:
    """Weights that a weight format stores: attention and feed-forward matrices without routers.
    Embedding and output matrix are in the format's `vocabulary`, norms, biases and routers in the
    serving dtype."""
    return sum(_packed_weights(spec, layer) for layer in spec.layers)


def layer_scale_bytes(
    hidden_size: int, layer: LayerSpec, weight_format: str, ranks: int = 1
) -> int:
    """Bytes of the scales and zero points of a layer's packed matrices that each of `ranks`
    holds: some for each row, and for each group of it, the last of which may be short. Rows of
    matrices that are split by their columns are held by all."""
    if weight_format == STORED:
        return _stored_bytes(hidden_size, layer, 1, ranks)[1]
    line = weight_line(weight_format)
    return sum(
        count * _matrix_scale_bytes(line, rows, columns)
        for rows, columns, count in _held_matrices(hidden_size, layer, ranks)
    )


def _held_matrices(
    hidden_size: int, layer: LayerSpec, ranks: int
) -> Iterator[tuple[int, int, int]]:
    """Rows, columns and number of the matrices of one rank; q, k and v are one."""
    qkv_rows = 0
    for matrix, count in _packed_matrices(hidden_size, layer):
        rows, columns = _share(matrix, ranks)
        if matrix.role in ("q", "k", "v"):
            qkv_rows += rows
        else:
            yield rows, columns, count
    yield qkv_rows, hidden_size, 1


def _share(matrix: Matrix, ranks: int) -> tuple[int, int]:
    """Rows and columns that each rank holds of it."""
    is_whole, by_columns = matrix.role in ("q_a", "kv_a"), matrix.role in ("o", "down")
    rows = matrix.rows if is_whole or by_columns else matrix.rows // ranks
    return rows, matrix.columns // ranks if by_columns else matrix.columns


def _matrix_scale_bytes(line: WeightFormatLine, rows: int, columns: int) -> int:
    groups = -(-columns // line.group) if line.group else 0
    return -(-rows // line.group_rows) * groups * line.scale_bytes + rows * line.row_bytes


def _packed_matrices(hidden_size: int, layer: LayerSpec) -> Iterator[tuple[Matrix, int]]:
    """Those of a layer that a weight format stores, and how many there are of each."""
    for matrix in attention_matrices(layer.attention, hidden_size):
        yield matrix, 1
    inner = layer.feed_forward
    sizes = [(inner.intermediate_size, 1 if isinstance(inner, DenseSpec) else inner.num_experts)]
    if not isinstance(inner, DenseSpec) and inner.shared_size:
        sizes.append((inner.shared_size, 1))
    for size, count in sizes:
        yield Matrix("gate_up", 2 * size, hidden_size), count
        yield Matrix("down", hidden_size, size), count


def weight_bytes(spec: ModelSpec, dtype_bytes: int, weight_format: str = "plain") -> int:
    """Bytes of all weights as served, scales included."""
    packed, line = linear_weights(spec), weight_line(weight_format)
    stored = packed * (8 * dtype_bytes if line.bits is None else line.bits) // 8
    if weight_format == STORED:
        every = [_stored_bytes(spec.hidden_size, layer, dtype_bytes) for layer in spec.layers]
        stored = sum(numbers for numbers, _ in every)
    stored += sum(layer_scale_bytes(spec.hidden_size, one, weight_format) for one in spec.layers)
    matrices = 1 if spec.tie_embeddings else 2
    rest = num_parameters(spec) - packed - matrices * spec.vocab_size * spec.hidden_size
    vocabulary = sum(vocabulary_bytes(spec, dtype_bytes, weight_format))
    return stored + matrices * vocabulary + rest * dtype_bytes


def _stored_bytes(
    hidden_size: int, layer: LayerSpec, dtype_bytes: int, ranks: int = 1
) -> tuple[int, int]:
    """Of the matrices of a layer that are kept as the checkpoint stores them: bytes of numbers, and
    of what stands beside them."""
    total, beside = 0, 0
    for matrix, count in _packed_matrices(hidden_size, layer):
        rows, columns = _share(matrix, ranks)
        own = kept_bytes(layer, matrix.role, rows, columns, dtype_bytes)
        total, beside = total + count * own[0], beside + count * own[1]
    return total, beside


def kept_bits(layer: LayerSpec, role: str, hidden_size: int, dtype_bytes: int) -> float:
    """Bits of one weight of a product (qkv and gate_up are some) whose matrices are kept as the
    checkpoint stores them, with its part of what stands beside them."""
    roles = ("q", "k", "v") if role == "qkv" else (role,)
    found = [m for m, _ in _packed_matrices(hidden_size, layer) if m.role in roles]
    held = [sum(kept_bytes(layer, m.role, m.rows, m.columns, dtype_bytes)) for m in found]
    return 8 * sum(held) / sum(matrix.num_weights for matrix in found)


def mean_kept_bits(spec: ModelSpec, dtype_bytes: int) -> float:
    """The same of all matrices of a model's layers together."""
    every = [_stored_bytes(spec.hidden_size, layer, dtype_bytes) for layer in spec.layers]
    return 8 * sum(map(sum, every)) / linear_weights(spec)


def vocabulary_rows(vocab_size: int, weight_format: str = "plain", ranks: int = 1) -> int:
    """Rows of the embedding, or of the output matrix, that each of `ranks` holds beside weights of
    this format: the last rank and the last of `row_step` are filled up with zeros."""
    step = weight_line(weight_line(weight_format).vocabulary).row_step
    share = -(-vocab_size // ranks)
    return -(-share // step) * step


def vocabulary_bytes(
    spec: ModelSpec, dtype_bytes: int, weight_format: str = "plain", ranks: int = 1
) -> tuple[int, int]:
    """Of the same matrix: bytes of its numbers, and of their scales."""
    line = weight_line(weight_line(weight_format).vocabulary)
    rows = vocabulary_rows(spec.vocab_size, weight_format, ranks)
    weights = rows * spec.hidden_size
    numbers = weights * (8 * dtype_bytes if line.bits is None else line.bits) // 8
    return numbers, _matrix_scale_bytes(line, rows, spec.hidden_size)


def layer_kv_bytes(
    attention: AttentionSpec, dtype_bytes: int, kv_format: str = "auto", ranks: int = 1
) -> int:
    """Bytes that one token's keys and values of one layer take on each of `ranks` devices, whose
    layer it may be: KV heads are split as far as they go, a latent vector is held by all."""
    line = kv_line(kv_format)
    if attention.latent is not None:
        return line.latent_bytes_per_token(attention.latent.cached_width, dtype_bytes)
    heads = -(-attention.num_kv_heads // ranks)
    return line.bytes_per_token(heads, attention.head_dim, dtype_bytes)


def kv_bytes_per_token(
    spec: ModelSpec, dtype_bytes: int, kv_format: str = "auto", ranks: int = 1
) -> int:
    """Bytes of K and V of one token in all layers that keep some, until a window has passed it."""
    return sum(
        layer_kv_bytes(attention, dtype_bytes, kv_format, ranks) for attention in _caching(spec)
    )


def kv_bytes(
    spec: ModelSpec, num_tokens: int, dtype_bytes: int, kv_format: str = "auto", ranks: int = 1
) -> int:
    """Bytes of K and V that a request of `num_tokens` must keep: its windows, or all of it."""
    return sum(
        layer_kv_bytes(a, dtype_bytes, kv_format, ranks) * num_visible(a, num_tokens)
        for a in _caching(spec)
    )


def _caching(spec: ModelSpec) -> list[AttentionSpec]:
    every = [layer.attention for layer in spec.layers]
    return [attention for attention in every if attention.cache_layer is None]


def linear_flops_per_token(spec: ModelSpec) -> int:
    """Operations of the layers' matrix products for one token, the output matrix not included."""
    return sum(2 * _layer_weights(spec, layer) for layer in spec.layers)


def logits_flops(spec: ModelSpec) -> int:
    """Operations of one row of logits."""
    return 2 * spec.vocab_size * spec.hidden_size


def attention_flops(spec: ModelSpec, num_new: int, num_before: int) -> int:
    """Operations of scores and mixing for `num_new` tokens after `num_before`, each looking at
    what it may see, itself included."""
    return sum(layer_attention_flops(layer.attention, num_new, num_before) for layer in spec.layers)


def layer_attention_flops(attention: AttentionSpec, num_new: int, num_before: int) -> int:
    """The same, of one layer.

    Latent attention multiplies queries by cached latent vectors (always so for one new token), or
    first computes the keys and values of earlier tokens from them, whichever takes fewer.
    """
    pairs = num_pairs(attention, num_new, num_before)
    flops = flops_per_key(attention) * pairs
    latent = attention.latent
    if latent is None or num_new == 1:
        return flops
    heads = 2 * attention.num_heads
    direct = heads * (latent.qk_head_dim + latent.v_head_dim) * pairs
    expand = heads * latent.kv_lora_rank * (latent.qk_nope_head_dim + latent.v_head_dim)
    return min(flops, direct + expand * num_before)


def flops_per_key(attention: AttentionSpec) -> int:
    """Operations of one query token, all heads, against one key and value as the cache has them."""
    latent = attention.latent
    if latent is None:
        return 4 * attention.num_heads * attention.head_dim
    return 2 * attention.num_heads * (2 * latent.kv_lora_rank + latent.qk_rope_head_dim)


def flops_per_token(spec: ModelSpec, context: int) -> int:
    """Operations to decode one token that sees `context` tokens, itself included."""
    return (
        linear_flops_per_token(spec)
        + attention_flops(spec, 1, max(context, 1) - 1)
        + logits_flops(spec)
    )


def behind_last_attention_flops(spec: ModelSpec) -> int:
    """Operations of one token behind the attention of the last layer, up to the output matrix. They
    are for its own logits alone, as no layer attends any more."""
    last = spec.layers[-1]
    matrices = attention_matrices(last.attention, spec.hidden_size)
    kept = sum(matrix.num_weights for matrix in matrices if matrix.role != "o")
    return 2 * (_layer_weights(spec, last) - kept)


def step_flops(spec: ModelSpec, shape: Iterable[tuple[int, int]], num_logits: int) -> int:
    """Operations of a step over (new tokens, context before them) per request."""
    behind = behind_last_attention_flops(spec)
    return num_logits * (behind + logits_flops(spec)) + sum(
        new * (linear_flops_per_token(spec) - behind) + attention_flops(spec, new, before)
        for new, before in shape
    )


@dataclass(frozen=True, slots=True)
class Matrix:
    """[rows, columns] of a layer; `role` as in `tensor_names`."""

    role: str
    rows: int
    columns: int

    @property
    def num_weights(self) -> int:
        return self.rows * self.columns


def attention_matrices(attention: AttentionSpec, hidden_size: int) -> tuple[Matrix, ...]:
    """The matrices of one layer's attention, unsplit."""
    if attention.latent is not None:
        return _latent_matrices(attention.num_heads, attention.latent, hidden_size)
    width = attention.num_heads * attention.head_dim
    kv_width = attention.num_kv_heads * attention.head_dim
    kv_roles = ("k", "v") if attention.cache_layer is None else ()
    return (
        Matrix("q", width, hidden_size),
        *(Matrix(role, kv_width, hidden_size) for role in kv_roles),
        Matrix("o", hidden_size, width),
    )


def _latent_matrices(heads: int, latent: LatentSpec, hidden_size: int) -> tuple[Matrix, ...]:
    queries = heads * latent.qk_head_dim
    rank = latent.q_lora_rank
    down_and_up = (
        (Matrix("q", queries, hidden_size),)
        if rank is None
        else (Matrix("q_a", rank, hidden_size), Matrix("q_b", queries, rank))
    )
    both = heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    return (
        *down_and_up,
        Matrix("kv_a", latent.cached_width, hidden_size),
        Matrix("kv_b", both, latent.kv_lora_rank),
        Matrix("o", hidden_size, heads * latent.v_head_dim),
    )


def small_parameters(spec: ModelSpec, layer: LayerSpec) -> int:
    """Numbers of a layer that no weight format packs: norms, biases and the router."""
    attention, inner, width = layer.attention, layer.feed_forward, spec.hidden_size
    total = width * (4 if layer.output_norms else 2) + layer.unlisted
    kv_width = 0 if attention.cache_layer is not None else attention.num_kv_heads
    if attention.qk_norm:
        total += attention.head_dim * (2 if kv_width else 1)
    if attention.qkv_bias:
        total += (attention.num_heads + 2 * kv_width) * attention.head_dim
    if attention.out_bias:
        total += width
    if attention.latent is not None:
        total += attention.latent.kv_lora_rank + (attention.latent.q_lora_rank or 0)
    if isinstance(inner, DenseSpec):
        return total + (2 * inner.intermediate_size + width if inner.bias else 0)
    return total + inner.num_experts * (width + (1 if inner.score_bias else 0))


def expert_weights(spec: ModelSpec, experts: ExpertsSpec) -> int:
    """Weights of one expert."""
    return 3 * spec.hidden_size * experts.intermediate_size


def num_visible(attention: AttentionSpec, num_tokens: int) -> int:
    """How many of the last `num_tokens` a query sees."""
    return num_tokens if attention.window is None else min(num_tokens, attention.window)


def num_pairs(attention: AttentionSpec, num_new: int, num_before: int) -> int:
    """How many (query, visible key) pairs there are."""
    first, last = num_before + 1, num_before + num_new  # keys that the queries could see
    if attention.window is None or last <= attention.window:
        return (first + last) * num_new // 2
    growing = max(0, attention.window - num_before)  # queries that still see everything
    return growing * (first + attention.window) // 2 + (num_new - growing) * attention.window


def _attention_weights(spec: ModelSpec, attention: AttentionSpec) -> int:
    return sum(m.num_weights for m in attention_matrices(attention, spec.hidden_size))


def _packed_weights(spec: ModelSpec, layer: LayerSpec) -> int:
    inner, width = layer.feed_forward, 3 * spec.hidden_size
    attention = _attention_weights(spec, layer.attention)
    if isinstance(inner, DenseSpec):
        return attention + width * inner.intermediate_size
    experts = inner.num_experts * expert_weights(spec, inner)
    return attention + experts + width * inner.shared_size


def _layer_weights(spec: ModelSpec, layer: LayerSpec) -> int:
    """Weights that one token meets in a layer."""
    inner = layer.feed_forward
    if isinstance(inner, DenseSpec):
        return _packed_weights(spec, layer)
    unused = (inner.num_experts - inner.num_active) * expert_weights(spec, inner)
    return _packed_weights(spec, layer) - unused + spec.hidden_size * inner.num_experts
