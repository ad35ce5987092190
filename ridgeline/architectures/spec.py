"""What is a model made of? Frozen records that the decoder, the memory contract and the cost model
are all built from. Pure Python.

Letters: E hidden, H query heads, K KV heads, D head size, F feed-forward, V vocabulary, X experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions. `kind`: default, linear, dynamic, llama3, yarn. Unused fields stay None.

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


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    window: int | None = None  # tokens a query may look back on, itself included
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before rotation
    scale: float | None = None  # None: head_dim ** -0.5


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """down(act(gate(x)) * up(x))"""

    intermediate_size: int
    activation: str = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """`num_active` of `num_experts` gated feed-forwards; router weights are a softmax over all
    experts, renormalised over the chosen ones when `renormalize`."""

    num_experts: int
    num_active: int
    intermediate_size: int
    activation: str = "silu"
    renormalize: bool = True


@dataclass(frozen=True, slots=True)
class LayerSpec:
    attention: AttentionSpec
    feed_forward: DenseSpec | ExpertsSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only model. `tensor_names` maps our parameter roles to checkpoint names, with
    `{layer}` and `{expert}` to fill in (see `architectures/llama.py` for the roles)."""

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

    @property
    def num_layers(self) -> int:
        return len(self.layers)
