"""How large is this model, and what does a token cost in operations and bytes? Arithmetic only.

An operation is one multiplication or one addition. Matrix products and attention are counted;
norms, activations and rotations (under one percent) are not. A test holds these against what
PyTorch counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import gcd, prod

from ridgeline.architectures.parts import Part, parts, products, shared_tensors
from ridgeline.architectures.quantization_scheme import Scheme
from ridgeline.architectures.shares import (
    fullest_share,
    held_copies,
    held_share,
    own_share,
)
from ridgeline.architectures.spec import (
    AttentionSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
)
from ridgeline.formats import CHECKPOINT, WeightFormatLine, kv_line, weight_line

SHARE_ROWS = 16  # kernels.cpu.packed_linear.PANEL


def num_parameters(spec: ModelSpec) -> int:
    """Numbers in the checkpoint; a tied output matrix counts once."""
    shared = sum(prod(shape) for shape in shared_tensors(spec).values())
    return shared + linear_weights(spec) + sum(small_parameters(spec, one) for one in spec.layers)


def num_active_parameters(spec: ModelSpec) -> int:
    """Numbers that one token is multiplied by: only the chosen experts, no embedding look-up."""
    rows = spec.learned_positions if spec.has_embedding else 0
    if spec.holds_embedding and not (spec.has_head and spec.tie_embeddings):
        rows += spec.vocab_size
    idle = rows * spec.hidden_size
    idle += sum(_idle_weights(layer, part) for layer, part in _every(spec))
    return num_parameters(spec) - idle


def _every(spec: ModelSpec) -> Iterator[tuple[LayerSpec, Part]]:
    """All parameters of all layers."""
    return ((layer, part) for layer in spec.layers for part in parts(layer, spec.hidden_size))


def _idle_weights(layer: LayerSpec, part: Part) -> int:
    """Of experts that a token does not choose."""
    inner = layer.feed_forward
    if not part.is_experts or not isinstance(inner, ExpertsSpec):
        return 0
    return (inner.num_experts - inner.num_active) * part.num_weights


def linear_weights(spec: ModelSpec) -> int:
    """Weights that a weight format stores: attention and feed-forward matrices without routers.
    Embedding and output matrix are in the format's `vocabulary`, norms, biases and routers in the
    serving dtype."""
    return sum(part.num_numbers for _, part in _every(spec) if part.is_packed)


def small_parameters(spec: ModelSpec, layer: LayerSpec) -> int:
    """Numbers of a layer that no weight format packs: norms, biases and the router."""
    small = (part for part in parts(layer, spec.hidden_size) if not part.is_packed)
    return layer.unlisted + sum(part.num_numbers for part in small)


def layer_scale_bytes(
    hidden_size: int,
    layer: LayerSpec,
    weight_format: str,
    ranks: int = 1,
    ep: int = 1,
    dp: int = 1,
    rank: int | None = None,
) -> int:
    """Bytes of the scales and zero points of a layer's packed matrices that one of `ranks` holds
    (None: the fullest): some for each row, and for each group of it, the last of which may be
    short. Rows of matrices that are split by their columns are held by all."""
    if weight_format == CHECKPOINT:
        return _scheme_bytes(hidden_size, layer, 1, ranks, ep, dp)[1]
    line, total = weight_line(weight_format), 0
    for matrices in products(layer, hidden_size).values():
        if matrices[0].is_packed:  # a product's matrices lie one below the other
            every = (ranks, ep, dp)
            held = [held_share(part, layer, weight_format, every, rank) for part in matrices]
            rows, columns = sum(share[0] for _, share in held), held[0][1][1]
            total += held[0][0] * _matrix_scale_bytes(line, rows, columns)
    return total


def _matrix_scale_bytes(line: WeightFormatLine, rows: int, columns: int) -> int:
    groups = -(-columns // line.group) if line.group else 0
    return -(-rows // line.group_rows) * groups * line.scale_bytes + rows * line.row_bytes


def weight_bytes(spec: ModelSpec, dtype_bytes: int, weight_format: str = "plain") -> int:
    """Bytes of all weights as served, scales included."""
    packed, line = linear_weights(spec), weight_line(weight_format)
    scheme = packed * (8 * dtype_bytes if line.bits is None else line.bits) // 8
    every = Counter(spec.layers).items()
    if weight_format == CHECKPOINT:
        width = spec.hidden_size
        scheme = sum(n * _scheme_bytes(width, layer, dtype_bytes)[0] for layer, n in every)
    scheme += sum(n * layer_scale_bytes(spec.hidden_size, one, weight_format) for one, n in every)
    matrices = spec.holds_embedding + spec.holds_head
    rest = num_parameters(spec) - packed - matrices * spec.vocab_size * spec.hidden_size
    vocabulary = sum(vocabulary_bytes(spec, dtype_bytes, weight_format))
    wide = sum(part.num_numbers for _, part in _every(spec) if part.is_float32)
    return scheme + matrices * vocabulary + rest * dtype_bytes + wide * (4 - dtype_bytes)


# ------------------------------------------------------------------------ kept as they are stored


def _scheme_bytes(
    hidden_size: int, layer: LayerSpec, dtype_bytes: int, ranks: int = 1, ep: int = 1, dp: int = 1
) -> tuple[int, int]:
    """Of the matrices of a layer that are kept as the checkpoint stores them: bytes of numbers, and
    of what stands beside them."""
    packed = [part for part in parts(layer, hidden_size) if part.is_packed]
    held = [held_copies(part, ranks, ep, dp) for part in packed]
    each = [
        (copies, _kept_bytes(layer, part, dtype_bytes, own))
        for part, (own, copies) in zip(packed, held, strict=True)
    ]
    return sum(n * own[0] for n, own in each), sum(n * own[1] for n, own in each)


def _kept_bytes(layer: LayerSpec, part: Part, dtype_bytes: int, ranks: int = 1) -> tuple[int, int]:
    """The same of one matrix."""
    rows, columns = fullest_share(part, layer, CHECKPOINT, ranks)
    scheme = layer.scheme_of(part.role)
    if scheme is not None and scheme.keeps == "codes" and part.split == "columns" and ranks > 1:
        starts = (own_share(part, layer, CHECKPOINT, rank, ranks).start for rank in range(ranks))
        scheme = replace(scheme, group=gcd(scheme.group, *starts) if scheme.group else 0)
    bits = None if scheme is None else scheme.kept_bits
    if scheme is None or bits is None:
        return rows * columns * dtype_bytes, 0
    return rows * -(-columns * bits // 8), scheme.beside_bytes(rows, columns)


def kept_bits(matrices: Iterable[Part], layer: LayerSpec, dtype_bytes: int) -> float:
    """Bits of one weight of these matrices of a layer, kept as the checkpoint stores them, with its
    part of what stands beside them."""
    each = list(matrices)
    held = sum(part.copies * sum(_kept_bytes(layer, part, dtype_bytes)) for part in each)
    return 8 * held / sum(part.num_numbers for part in each)


def nearest_format(matrices: Iterable[Part], layer: LayerSpec) -> str:
    """The weight format of ours whose kernels do most nearly what is done for such a product."""
    found = (layer.scheme_of(part.role) for part in matrices)
    return next((_format_of(scheme) for scheme in found if scheme and scheme.keeps), "plain")


def _format_of(scheme: Scheme) -> str:
    if scheme.keeps == "codes":
        return f"int{scheme.kept_bits}"
    return "fp8" if scheme.keeps == "e4m3" else "fp8-block"


# ------------------------------------------------------------------------ vocabulary and cache


def vocabulary_rows(vocab_size: int, weight_format: str = "plain", ranks: int = 1) -> int:
    """Rows of the embedding, or of the output matrix, that each of `ranks` holds beside weights of
    this format: the last rank and the last of `row_step` are filled up with zeros. So is a share
    that begins anywhere to full panels of the CPU's kernels, which the whole often fills."""
    step = weight_line(weight_line(weight_format).vocabulary).row_step
    step = step if ranks == 1 else max(step, SHARE_ROWS)
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
    return sum(_product_flops(layer, part) for layer, part in _every(spec))


def _product_flops(layer: LayerSpec, part: Part) -> int:
    """Operations of one token with this matrix: of experts, with those that it chooses."""
    return 2 * (part.num_numbers - _idle_weights(layer, part)) if part.product else 0


def logits_flops(spec: ModelSpec) -> int:
    """Operations of one row of logits."""
    return 2 * spec.vocab_size * spec.hidden_size if spec.has_head else 0


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
    return min(flops, _expanded_flops(attention, latent, num_new, num_before))


def is_expanded(attention: AttentionSpec, num_new: int, num_before: int) -> bool:
    """Latent attention computes the keys and values of these tokens, as that takes fewer."""
    latent = attention.latent
    if latent is None or num_new == 1:
        return False
    flops = flops_per_key(attention) * num_pairs(attention, num_new, num_before)
    return _expanded_flops(attention, latent, num_new, num_before) < flops


def _expanded_flops(
    attention: AttentionSpec, latent: LatentSpec, num_new: int, num_before: int
) -> int:
    heads = 2 * attention.num_heads
    pairs = num_pairs(attention, num_new, num_before)
    direct = heads * (latent.qk_head_dim + latent.v_head_dim) * pairs
    expand = heads * latent.kv_lora_rank * (latent.qk_nope_head_dim + latent.v_head_dim)
    return direct + expand * num_before


def flops_per_key(attention: AttentionSpec) -> int:
    """Operations of one query token, all heads, against one key and value as the cache has them."""
    latent = attention.latent
    if latent is None:
        return 4 * attention.num_heads * attention.head_dim
    return 2 * attention.num_heads * (2 * latent.kv_lora_rank + latent.qk_rope_head_dim)


def behind_last_attention_flops(spec: ModelSpec) -> int:
    """Operations of one token behind the attention of the last layer, up to the output matrix. They
    are for its own logits alone, as no layer attends any more; of a stage that has no head, for the
    next one."""
    if not spec.has_head:
        return 0
    last = spec.layers[-1]
    every = parts(last, spec.hidden_size)
    return sum(_product_flops(last, part) for part in every if not part.feeds_attention)


def step_flops(spec: ModelSpec, shape: Iterable[tuple[int, int]], num_logits: int) -> int:
    """Operations of a step over (new tokens, context before them) per request."""
    behind = behind_last_attention_flops(spec)
    return num_logits * (behind + logits_flops(spec)) + sum(
        new * (linear_flops_per_token(spec) - behind) + attention_flops(spec, new, before)
        for new, before in shape
    )


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
