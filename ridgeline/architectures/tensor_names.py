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
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ridgeline.architectures.spec import AttentionSpec, DenseSpec, ExpertsSpec, ModelSpec

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
        shapes = dict(_norm_shapes(layer.attention, width))
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


def _norm_shapes(spec: AttentionSpec, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "input_norm", (width,)
    yield "post_norm", (width,)
    if spec.qk_norm:
        yield "q_norm", (spec.head_dim,)
        yield "k_norm", (spec.head_dim,)


def _attention_shapes(spec: AttentionSpec, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    for role, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
        yield role, (rows, width)
        if spec.qkv_bias:
            yield f"{role}_bias", (rows,)
    yield "o", (width, q_rows)
    if spec.out_bias:
        yield "o_bias", (width,)


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
    shapes = tuple(_dense_shapes(DenseSpec(spec.intermediate_size), width))
    for expert in range(spec.num_experts):
        for role, shape in shapes:
            yield names[role].format(layer=layer, expert=expert), shape
