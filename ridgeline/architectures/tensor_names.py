"""Which tensors must a checkpoint of this model have, and of what shapes?

Roles of `ModelSpec.tensor_names` (values may hold `{layer}` and `{expert}`):

  embedding, norm, lm_head          [V, E], [E], [V, E] (no lm_head when embeddings are tied)
  input_norm, post_norm             [E], before attention and before the feed-forward
  q, k, v, o                        [H*D, E], [K*D, E], [K*D, E], [E, H*D]
  q_bias, k_bias, v_bias, o_bias    [rows of the matrix]
  q_norm, k_norm                    [D]
  gate, up, down                    [F, E], [F, E], [E, F]; with {expert} for experts
  gate_bias, up_bias, down_bias     [rows of the matrix]
  router                            [X, E]

Of families that can be planned for:

  attention_norm, feed_forward_norm [E], after attention and feed-forward (`output_norms`)
  q_a, q_b, kv_a, kv_b, q_a_norm, kv_a_norm      latent attention, see `LatentSpec`
  expert_gate, expert_up, expert_down            as gate, up, down, where layers without experts
                                                 have those names
  shared_gate, shared_up, shared_down            the experts that every token passes, as one
  score_bias                        [X]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ridgeline.architectures.spec import (
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
)

# In files of older libraries: recomputed from the config, never read.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attention.bias", ".attn.masked_bias")

_STEM = "model.layers.{layer}."
_ATTENTION = {
    f"{role}{suffix}": f"{_STEM}self_attn.{role}_proj.{kind}"
    for role in ("q", "k", "v", "o")
    for suffix, kind in (("", "weight"), ("_bias", "bias"))
}
_DENSE = {
    f"{role}{suffix}": f"{_STEM}mlp.{role}_proj.{kind}"
    for role in ("gate", "up", "down")
    for suffix, kind in (("", "weight"), ("_bias", "bias"))
}
LLAMA_NAMES: Mapping[str, str] = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "input_norm": f"{_STEM}input_layernorm.weight",
    "post_norm": f"{_STEM}post_attention_layernorm.weight",
    "q_norm": f"{_STEM}self_attn.q_norm.weight",
    "k_norm": f"{_STEM}self_attn.k_norm.weight",
    **_ATTENTION,
    **_DENSE,
}


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Checkpoint tensor name -> shape, for every tensor that the model needs."""
    names = spec.tensor_names
    width = spec.hidden_size
    tensors: dict[str, tuple[int, ...]] = {names["embedding"]: (spec.vocab_size, width)}
    for index, layer in enumerate(spec.layers):
        shapes = dict(_norm_shapes(layer, width))
        shapes.update(_attention_shapes(layer.attention, width))
        if isinstance(layer.feed_forward, DenseSpec):
            shapes.update(_dense_shapes(layer.feed_forward, width))
        tensors.update({names[role].format(layer=index): s for role, s in shapes.items()})
        if isinstance(layer.feed_forward, ExpertsSpec):
            tensors.update(_experts_tensors(names, layer.feed_forward, width, index))
    tensors[names["norm"]] = (width,)
    if not spec.tie_embeddings:
        tensors[names["lm_head"]] = (spec.vocab_size, width)
    return tensors


def optional_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Tensors that may be there and are then compared: the output matrix of a tied model."""
    if not spec.tie_embeddings:
        return {}
    return {spec.tensor_names["lm_head"]: (spec.vocab_size, spec.hidden_size)}


def leftover_tensors(spec: ModelSpec, names: Iterable[str]) -> tuple[str, ...]:
    """Tensors of a checkpoint that the model does not use and that might have meant something."""
    known = expected_tensors(spec).keys() | optional_tensors(spec).keys()
    return tuple(name for name in names if name not in known and not is_ignored(name))


def is_ignored(name: str) -> bool:
    """A leftover tensor of this name changes nothing."""
    return name.endswith(IGNORED_SUFFIXES)


def _norm_shapes(layer: LayerSpec, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    spec = layer.attention
    yield "input_norm", (width,)
    yield "post_norm", (width,)
    if layer.output_norms:
        yield "attention_norm", (width,)
        yield "feed_forward_norm", (width,)
    if spec.qk_norm:
        yield "q_norm", (spec.head_dim,)
        if spec.cache_layer is None:
            yield "k_norm", (spec.head_dim,)


def _attention_shapes(spec: AttentionSpec, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if spec.latent is not None:
        yield from _latent_shapes(spec.num_heads, spec.latent, width)
        return
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    roles = [("q", q_rows)] + ([("k", kv_rows), ("v", kv_rows)] if spec.cache_layer is None else [])
    for role, rows in roles:
        yield role, (rows, width)
        if spec.qkv_bias:
            yield f"{role}_bias", (rows,)
    yield "o", (width, q_rows)
    if spec.out_bias:
        yield "o_bias", (width,)


def _latent_shapes(
    heads: int, latent: LatentSpec, width: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries, rank = heads * latent.qk_head_dim, latent.q_lora_rank
    if rank is None:
        yield "q", (queries, width)
    else:
        yield "q_a", (rank, width)
        yield "q_a_norm", (rank,)
        yield "q_b", (queries, rank)
    yield "kv_a", (latent.cached_width, width)
    yield "kv_a_norm", (latent.kv_lora_rank,)
    both = latent.qk_nope_head_dim + latent.v_head_dim
    yield "kv_b", (heads * both, latent.kv_lora_rank)
    yield "o", (width, heads * latent.v_head_dim)


def _dense_shapes(spec: DenseSpec, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    inner = spec.intermediate_size
    for role, rows, columns in (
        ("gate", inner, width),
        ("up", inner, width),
        ("down", width, inner),
    ):
        yield role, (rows, columns)
        if spec.bias:
            yield f"{role}_bias", (rows,)


def _experts_tensors(
    names: Mapping[str, str], spec: ExpertsSpec, width: int, layer: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield names["router"].format(layer=layer), (spec.num_experts, width)
    if spec.score_bias:
        yield names["score_bias"].format(layer=layer), (spec.num_experts,)
    for role, shape in _dense_shapes(DenseSpec(spec.shared_size), width):
        if spec.shared_size:
            yield names[f"shared_{role}"].format(layer=layer), shape
    shapes = tuple(_dense_shapes(DenseSpec(spec.intermediate_size), width))
    for expert in range(spec.num_experts):
        for role, shape in shapes:
            name = names.get(f"expert_{role}", names[role])
            yield name.format(layer=layer, expert=expert), shape
