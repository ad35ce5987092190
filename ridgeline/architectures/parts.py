"""What is a layer made of, and what does it do, in which order? The one description that the tensor
check, the counts, the costs, the names in GGUF files, the quantizer and `inspect` loop over.

A layer is two branches, attention and feed-forward, each added to the hidden states:
x + norm_out(branch(norm_in(x))), where either norm may be missing.

Roles of `ModelSpec.tensor_names` (values may hold `{layer}` and `{expert}`):

  embedding, norm, lm_head          [V, E], [E], [V, E] (no lm_head when embeddings are tied)
  positions                         [P, E], of learned positions
  input_norm                        [E], before attention
  post_attention_norm               [E], of what attention adds
  pre_feed_forward_norm             [E], before the feed-forward
  post_feed_forward_norm            [E], of what the feed-forward adds
  norm_bias, input_norm_bias, ...   [E], of norms that have one
  q, k, v, o                        [H*D, E], [K*D, E], [K*D, E], [E, H*D]
  q_bias, k_bias, v_bias, o_bias    [rows of the matrix]
  sinks                             [H]
  q_norm, k_norm                    [D] each head alone, or [H*D] and [K*D] all heads together; of
                                    layer norms [H, D] and [K, D]
  gate, up, down                    [F, E], [F, E], [E, F]; with {expert} for experts; no gate
                                    where the feed-forward is not gated
  gate_bias, up_bias, down_bias     [rows of the matrix]
  router, router_bias               [X, E], [X]
  score_bias                        [X]
  expert_gate, expert_up, expert_down            as gate, up, down, where layers without experts
                                                 have those names
  shared_gate, shared_up, shared_down            the experts that every token passes, as one
  shared_score                      [1, E], their weight

  q_a, q_b, kv_a, kv_b, q_a_norm, kv_a_norm      latent attention, see `LatentSpec`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod

from ridgeline.architectures.spec import (
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    NormKind,
)

# Tables in files of older libraries: recomputed from the config, never read.
IGNORED_SUFFIXES = (
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    "position_ids",
)
ROUTER = "router"
HEAD = "{head}"  # in the names of tensors of which a layer has one for each head
LATENT_UP = "kv_up"  # its rows are multiplied head by head, from both sides
KINDS = {"q": "query", "k": "kv", "v": "kv"}  # of heads
# Products whose results attention reads.
BEFORE_ATTENTION = ("latent_down", "q_up", LATENT_UP, "qkv")

_STEM = "model.layers.{layer}."
LLAMA_NAMES: Mapping[str, str] = {
    "embedding": "model.embed_tokens.weight",
    "lm_head": "lm_head.weight",
    **{
        f"{role}{suffix}": f"{name}.{kind}"
        for role, name in (
            ("norm", "model.norm"),
            ("input_norm", f"{_STEM}input_layernorm"),
            # A Llama names the norm before its feed-forward by what it stands behind.
            ("pre_feed_forward_norm", f"{_STEM}post_attention_layernorm"),
            ("post_attention_norm", f"{_STEM}post_attention_layernorm"),
            ("post_feed_forward_norm", f"{_STEM}post_feedforward_layernorm"),
        )
        for suffix, kind in (("", "weight"), ("_bias", "bias"))
    },
    "q_norm": f"{_STEM}self_attn.q_norm.weight",
    "k_norm": f"{_STEM}self_attn.k_norm.weight",
    **{
        f"{role}{suffix}": f"{_STEM}{module}.{role}_proj.{kind}"
        for module, roles in (("self_attn", "q k v o"), ("mlp", "gate up down"))
        for role in roles.split()
        for suffix, kind in (("", "weight"), ("_bias", "bias"))
    },
}


def with_biases(modules: Mapping[str, str]) -> dict[str, str]:
    """Names of the weight and of the bias of each role, by the name of its module."""
    return {
        f"{role}{suffix}": f"{module}.{kind}"
        for role, module in modules.items()
        for suffix, kind in (("", "weight"), ("_bias", "bias"))
    }


@dataclass(frozen=True, slots=True)
class Branch:
    """`does` is "attention" or "feed_forward"; the norms are roles."""

    does: str
    norm_in: str | None
    norm_out: str | None


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter of a layer, or one for each of its experts (`copies`): [rows, columns] of a
    matrix, or a list of numbers.

    Matrices of the same `product` multiply the same input, one below the other. Of several devices
    each holds a share of the rows or columns (`split`), or all of it (""), as `shares` says: some
    of its `units`, which are "query" or "kv" `heads`, or numbers between gate and down.
    """

    role: str
    shape: tuple[int, ...]
    product: str = ""
    split: str = ""
    units: int = 1
    heads: str = ""
    copies: int = 1
    is_experts: bool = False
    is_float32: bool = False  # whatever the serving dtype

    @property
    def is_packed(self) -> bool:
        """A weight format stores it; norms, biases, routers and what makes keys and values of a
        latent vector stay in the serving dtype."""
        return self.product not in ("", ROUTER, LATENT_UP)

    @property
    def feeds_attention(self) -> bool:
        return self.product in BEFORE_ATTENTION

    @property
    def num_weights(self) -> int:
        """Of one."""
        return prod(self.shape)

    @property
    def num_numbers(self) -> int:
        """Of all copies."""
        return self.num_weights * self.copies


def branches(layer: LayerSpec) -> tuple[Branch, Branch]:
    """What the layer does, in this order, or at the same time."""
    before, after = layer.norms != "after", layer.norms != "before"
    feed_norm = "input_norm" if layer.parallel_norms == 1 else "pre_feed_forward_norm"
    first, second = (
        Branch(does, norm_in if before else None, norm_out if after else None)
        for does, norm_in, norm_out in (
            ("attention", "input_norm", "post_attention_norm"),
            ("feed_forward", feed_norm, "post_feed_forward_norm"),
        )
    )
    return first, second


@lru_cache(maxsize=1024)
def parts(layer: LayerSpec, width: int) -> tuple[Part, ...]:
    """All parameters of a layer of this hidden size: norms, then matrices as they are used."""
    inner = layer.feed_forward
    return (
        *(
            Part(name, (width,))
            for role in branch_norms(layer)
            for name in norm_roles(layer.norm_kind, role)
        ),
        *_attention(layer.attention, width),
        *(_dense(inner, width) if isinstance(inner, DenseSpec) else _experts(inner, width)),
    )


def branch_norms(layer: LayerSpec) -> tuple[str, ...]:
    """Roles of the norms around the branches, those in front first."""
    around = branches(layer)
    roles = (*(one.norm_in for one in around), *(one.norm_out for one in around))
    return tuple(dict.fromkeys(role for role in roles if role is not None))


def norm_roles(kind: NormKind, role: str) -> tuple[str, ...]:
    """Of the parameters of this norm, all of which have the same size."""
    return (role, f"{role}_bias") if kind == "layer and bias" else (role,)


@lru_cache(maxsize=1024)
def products(layer: LayerSpec, width: int) -> Mapping[str, tuple[Part, ...]]:
    """The matrices of the layer by the product that they are rows of, in the order of use."""
    found: dict[str, tuple[Part, ...]] = {}
    for part in parts(layer, width):
        if part.product:
            found[part.product] = (*found.get(part.product, ()), part)
    return found


def _attention(spec: AttentionSpec, width: int) -> Iterator[Part]:
    if spec.latent is not None:
        yield from _latent(spec.num_heads, spec.latent, width)
        return
    heads = {"q": spec.num_heads}
    if spec.cache_layer is None:
        heads |= dict.fromkeys("kv", spec.num_kv_heads)
    kinds = {
        role: partial(Part, split="rows", units=num, heads=KINDS[role])
        for role, num in heads.items()
    }
    for role, num in heads.items():
        if not spec.qk_norm or role == "v":
            continue
        if spec.qk_norm_kind != "rms":
            yield kinds[role](f"{role}_norm", (num, spec.head_dim))
        elif spec.norms_all_heads:
            yield kinds[role](f"{role}_norm", (num * spec.head_dim,))
        else:
            yield Part(f"{role}_norm", (spec.head_dim,))
    for role, num in heads.items():
        rows = num * spec.head_dim
        yield kinds[role](role, (rows, width), "qkv")
        if spec.qkv_bias:
            yield kinds[role](f"{role}_bias", (rows,))
    if spec.sinks:
        yield kinds["q"]("sinks", (spec.num_heads,), is_float32=True)
    queries = spec.num_heads * spec.head_dim
    yield kinds["q"]("o", (width, queries), "attention_out", split="columns")
    if spec.out_bias:
        yield Part("o_bias", (width,))


def _latent(heads: int, latent: LatentSpec, width: int) -> Iterator[Part]:
    """What no head owns (q_a, kv_a) is held by every device."""
    queries, rank = heads * latent.qk_head_dim, latent.q_lora_rank
    own = partial(Part, split="rows", units=heads, heads="query")
    if rank is None:
        yield own("q", (queries, width), "latent_down")
    else:
        yield Part("q_a", (rank, width), "latent_down")
        yield Part("q_a_norm", (rank,))
        yield own("q_b", (queries, rank), "q_up")
    yield Part("kv_a", (latent.cached_width, width), "latent_down")
    yield Part("kv_a_norm", (latent.kv_lora_rank,))
    both = latent.qk_nope_head_dim + latent.v_head_dim
    yield own("kv_b", (heads * both, latent.kv_lora_rank), LATENT_UP)
    yield own("o", (width, heads * latent.v_head_dim), "attention_out", split="columns")


def _dense(spec: DenseSpec, width: int) -> Iterator[Part]:
    for part in _gated(spec.intermediate_size, width):
        if part.role == "gate" and not spec.gated:
            continue
        yield part
        if spec.bias:
            rows = part.shape[:1]
            yield Part(f"{part.role}_bias", rows, split=_split_of_rows(part), units=part.units)


def _split_of_rows(part: Part) -> str:
    return "rows" if part.split == "rows" else ""


def _gated(size: int, width: int, prefix: str = "", role: str = "") -> list[Part]:
    up, down = f"{prefix}gate_up", f"{prefix}down"
    return [
        Part(f"{role}gate", (size, width), up, "rows", size),
        Part(f"{role}up", (size, width), up, "rows", size),
        Part(f"{role}down", (width, size), down, "columns", size),
    ]


def _experts(spec: ExpertsSpec, width: int) -> Iterator[Part]:
    yield Part(ROUTER, (spec.num_experts, width), ROUTER)
    if spec.shared_gate:
        yield Part("shared_score", (1, width), ROUTER)
    if spec.router_bias:
        yield Part("router_bias", (spec.num_experts,))
    if spec.score_bias:
        yield Part("score_bias", (spec.num_experts,), is_float32=True)
    if spec.shared_size:
        yield from _gated(spec.shared_size, width, "shared_", "shared_")
    for one in _gated(spec.intermediate_size, width, "experts_"):
        part = replace(one, copies=spec.num_experts, is_experts=True)
        yield part
        if spec.bias:
            rows, split = part.shape[:1], _split_of_rows(part)
            yield replace(part, role=f"{part.role}_bias", shape=rows, product="", split=split)


# ------------------------------------------------------------------------ names in a checkpoint


def tensor_name(names: Mapping[str, str], role: str, layer: int, expert: int | None = None) -> str:
    """The checkpoint's name of a parameter of this layer, or of this expert of it."""
    own = None if expert is None else names.get(f"expert_{role}")
    return (own or names[role]).format(layer=layer, expert=expert, head=HEAD)


def layer_name(spec: ModelSpec, role: str, index: int, expert: int | None = None) -> str:
    """The same, of a layer of this model or stage."""
    return tensor_name(spec.tensor_names, role, spec.first_layer + index, expert)


def layer_tensors(spec: ModelSpec, index: int) -> dict[str, Part]:
    """Checkpoint tensor name -> what it is, of one layer; expert after expert."""
    every = parts(spec.layers[index], spec.hidden_size)
    experts = [part for part in every if part.is_experts]
    found: dict[str, Part] = {}
    for part in every:
        if not part.is_experts:
            name = layer_name(spec, part.role, index)
            found |= _of_heads(name, part) if HEAD in name else {name: part}
    for expert in range(experts[0].copies if experts else 0):
        found |= {layer_name(spec, part.role, index, expert): part for part in experts}
    return found


def _of_heads(name: str, part: Part) -> dict[str, Part]:
    """Each row of the parameter is a tensor."""
    row = Part(part.role, part.shape[1:])
    return {name.format(head=head): row for head in range(part.shape[0])}


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Checkpoint tensor name -> shape, for every tensor that the model needs."""
    behind, first = shared_tensors(spec), spec.tensor_names["embedding"]
    tensors = {first: behind.pop(first)} if spec.holds_embedding else {}
    for index in range(spec.num_layers):
        tensors |= {name: part.shape for name, part in layer_tensors(spec, index).items()}
    return tensors | behind


def shared_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The same of those that are no layer's: what begins, then what ends."""
    names, width = spec.tensor_names, spec.hidden_size
    tensors: dict[str, tuple[int, ...]] = {}
    if spec.holds_embedding:
        tensors[names["embedding"]] = (spec.vocab_size, width)
    if spec.has_embedding and spec.learned_positions:
        tensors[names["positions"]] = (spec.learned_positions, width)
    if spec.has_head:
        tensors |= {names[role]: (width,) for role in norm_roles(spec.norm_kind, "norm")}
    if spec.holds_head:
        tensors[names["lm_head"]] = (spec.vocab_size, width)
    return tensors


def optional_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Tensors that may be there and are then compared: the output matrix of a tied model."""
    if not spec.tie_embeddings or not spec.holds_embedding:
        return {}
    return {spec.tensor_names["lm_head"]: (spec.vocab_size, spec.hidden_size)}


def leftover_tensors(spec: ModelSpec, names: Iterable[str]) -> tuple[str, ...]:
    """Tensors of a checkpoint that the model does not use and that might have meant something."""
    known = expected_tensors(spec).keys() | optional_tensors(spec).keys()
    return tuple(name for name in names if name not in known and not is_ignored(name))


def is_ignored(name: str) -> bool:
    """A leftover tensor of this name changes nothing."""
    return name.endswith(IGNORED_SUFFIXES)
