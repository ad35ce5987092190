"""What is a model made of? Frozen records that the decoder, the memory contract and the cost model
are all built from. Pure Python.

Letters: E hidden, H query heads, K KV heads, D head size, F feed-forward, V vocabulary, X experts.

What this version can serve is less than what it can describe: `missing` says which of these fields
the decoder does not follow. The cost model and the planner follow all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ridgeline.architectures.quantization_scheme import Scheme
from ridgeline.errors import ConfigError

# x / rms(x) * weight, or (x - mean(x)) / deviation(x) * weight, or that + bias
NormKind = Literal["rms", "layer", "layer and bias"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions. `kind`: default, linear, dynamic, llama3, yarn, longrope, or none:
    nothing is rotated. Unused fields stay None. Of a head the first `rotary_dim` numbers rotate.

    Source of the formulas: Hugging Face Transformers `modeling_rope_utils`, where `kind` is
    called rope_type.
    """

    theta: float = 10000.0
    kind: str = "default"
    rotary_dim: int | None = None  # None: the whole head
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    interleaved: bool = False  # pairs are (2i, 2i + 1), not (i, i + half)
    # What divides each frequency, within the trained length and past it (longrope).
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): per token, the cache holds one
    vector of `kv_lora_rank` numbers for all heads, and one rotated key of `qk_rope_head_dim`.

    A query or key of a head is `qk_nope_head_dim` plain and `qk_rope_head_dim` rotated numbers, a
    value is `v_head_dim`. Queries go through `q_lora_rank` numbers (None: straight). `norm_eps` is
    of the norms of both vectors.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    norm_eps: float = 1e-6

    @property
    def cached_width(self) -> int:
        """Numbers that the cache holds per token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """`head_dim` is the size of a query. With `latent`, `num_kv_heads` equals `num_heads` and the
    cache holds what LatentSpec says. `cache_layer`: this layer has no keys and values of its own
    and reads those of that earlier layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    window: int | None = None  # tokens a query may look back on, itself included
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before rotation
    norms_all_heads: bool = False  # `qk_norm` is over all heads of a token together
    norms_rotated: bool = False  # `qk_norm` is of what has been rotated
    qk_norm_kind: NormKind = "rms"  # layer norms have weights of their own for each head
    scale: float | None = None  # None: head_dim ** -0.5
    scores_cap: float | None = None  # scores become cap * tanh(score / cap), after `scale`
    sinks: bool = False  # a learned number per head takes part in each softmax, as a key would
    latent: LatentSpec | None = None
    cache_layer: int | None = None

    @property
    def rotated_dim(self) -> int:
        """How many numbers of a query and a key are rotated."""
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """down(act(gate(x)) * up(x)); not `gated`: down(act(up(x)))"""

    intermediate_size: int
    activation: str = "silu"
    bias: bool = False
    gated: bool = True


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """`num_active` of `num_experts` gated feed-forwards (`bias`: of all three matrices), and a
    weight for each, as `layers/routing.py` chooses them by these rules:

    Scores are a softmax over all experts, or each expert's own sigmoid; `renormalize` makes those
    of the chosen sum to one, and `weight_scale` multiplies them. `router_bias` is added to the
    router's product, `score_bias` to the scores, to choose by, not to weigh by. Of `num_groups`
    equal groups of experts, the `num_active_groups` with the largest sums of their best
    `group_best` experts are chosen from. (DeepSeek-V3, arXiv 2412.19437, section 2.1.2.)

    `float32_scores`: the router's product too is in float32, whatever the serving dtype.

    `shared_size` is the width of a feed-forward that every token passes besides (0: none);
    `shared_gate`: times the sigmoid of a learned product.
    """

    num_experts: int
    num_active: int
    intermediate_size: int
    activation: str = "silu"
    renormalize: bool = True
    shared_size: int = 0
    scoring: str = "softmax"
    score_bias: bool = False
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
    num_groups: int = 1
    num_active_groups: int = 1
    group_best: int = 1
    weight_scale: float = 1.0
    float32_scores: bool = False


NATIVE, TRANSFORMERS = "native", "transformers"  # whose code computes the layers
NormPlaces = Literal["before", "after", "around"]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """`norms`: where the hidden states are normalised: "before" attention and feed-forward read
    them, "after" (what the two add is normalised), or "around", both. `schemes`: role -> how the
    checkpoint stores those matrices that somebody quantized. `unlisted`: how many numbers it has
    beside those that these fields say (below 0: fewer), such as sinks and biases of experts, in
    families that are only planned for. `parallel_norms`: attention and feed-forward read the same
    hidden states, through one norm that they share or through two; 0: the feed-forward reads what
    attention has been added to."""

    attention: AttentionSpec
    feed_forward: DenseSpec | ExpertsSpec
    norms: NormPlaces = "before"
    schemes: tuple[tuple[str, Scheme], ...] = ()
    unlisted: int = 0
    norm_kind: NormKind = "rms"
    parallel_norms: int = 0

    def scheme_of(self, role: str) -> Scheme | None:
        """None: as numbers."""
        return next((scheme for own, scheme in self.schemes if own == role), None)


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Tensor `name` of the checkpoint (with {layer} to fill in) holds the parameters of `roles`,
    one below the other: in each of `blocks` equal parts of it, one for each head say, its share of
    all of them. `transposed`: side by side, as a product x @ W has them. `experts`: the same of
    each expert, one behind the other. `mxfp4`: as blocks of 32 numbers with a scale, in two
    tensors."""

    name: str
    roles: tuple[str, ...]
    blocks: int = 1
    transposed: bool = False
    experts: bool = False
    mxfp4: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only model. `tensor_names` maps our parameter roles to checkpoint names, with
    `{layer}` and `{expert}` to fill in (see `architectures/parts.py` for the roles).
    `unserved` says what the numbers of this family need and this version does not compute.
    `scheme`: as that of a layer, of the matrices of the vocabulary. `norm_kind`: of the last norm.
    `tensor_layouts`: which parameters are parts of larger tensors; their names are ours alone then.
    `learned_positions`: rows of a table, of which that of its position is added to each embedding.
    `written`: how names begin in some files, and how they do here.
    `implementation`: whose code computes the layers; with TRANSFORMERS nothing here names a
    checkpoint's tensors.

    `norm_offset` is added to what the checkpoint has as weights of norms. Rows of the embedding are
    multiplied by `embedding_scale`, what a branch adds by `residual_scale`, logits by
    `logits_scale`; then they become cap * tanh(logit / cap), where there is a `logits_cap`.
    `left_out`: how tensors of the checkpoint begin that are of other parts, which see images.

    A stage of a pipeline is a model that has some layers of another, from `first_layer` on;
    `has_embedding`: it begins with token ids, `has_head`: it ends with logits (see `stages.py`)."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tie_embeddings: bool
    max_position_embeddings: int
    dtype: str  # of the checkpoint: float32, bfloat16, float16
    tensor_names: Mapping[str, str] = field(repr=False)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    unserved: str = ""
    schemes: tuple[tuple[str, Scheme], ...] = ()
    norm_kind: NormKind = "rms"
    tensor_layouts: tuple[TensorLayout, ...] = ()
    learned_positions: int = 0
    written: tuple[tuple[str, str], ...] = ()
    implementation: str = NATIVE
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float | None = None
    left_out: tuple[str, ...] = ()
    first_layer: int = 0
    has_embedding: bool = True
    has_head: bool = True

    @property
    def holds_embedding(self) -> bool:
        """Its matrix: to look up, or as the output matrix."""
        return self.has_embedding or (self.has_head and self.tie_embeddings)

    @property
    def holds_head(self) -> bool:
        """An output matrix that is not the embedding."""
        return self.has_head and not self.tie_embeddings

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def states_eps(self) -> float:
        """Of norms that read hidden states, which are held divided by `residual_scale`: with this
        eps a norm does not notice."""
        return self.norm_eps / self.residual_scale**2


# ------------------------------------------------------------------------ can it be served?


def check_served(spec: ModelSpec) -> None:
    """ConfigError that says what is missing, for a model that can only be planned for."""
    reasons = missing(spec)
    if reasons:
        raise ConfigError(
            f"model family {spec.family!r} can be planned for, cannot be served by this version: "
            f"it needs {', '.join(reasons)}"
        )


def missing(spec: ModelSpec) -> tuple[str, ...]:
    """What the model needs and the decoder does not have; empty when it can be served."""
    return (spec.unserved,) if spec.unserved else ()
