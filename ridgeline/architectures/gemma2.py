"""What is a Gemma 2? A Gemma with norms around each branch, every second layer looking back on a
window, and soft caps of attention scores and logits."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import MAX_POSITIONS, ConfigReader
from ridgeline.architectures.family import Defaults, Trunk, layer_types, read_trunk
from ridgeline.architectures.gemma import gemma_spec
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import AttentionSpec, ModelSpec

DEFAULTS = Defaults(
    rope_theta=10_000.0, norm_eps=1e-6, max_positions=8192, num_kv_heads=4, head_dim=256
)
NAMES = {
    **LLAMA_NAMES,
    "pre_feed_forward_norm": "model.layers.{layer}.pre_feedforward_layernorm.weight",
}
MAX_CAP = 1e6


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    config = config.with_defaults(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    full, sliding = full_and_sliding(config, trunk)
    kinds = layer_types(config, trunk.num_layers, full_every=2)
    attention = tuple(sliding if kind == "sliding_attention" else full for kind in kinds)
    spec = gemma_spec(config, trunk, "gemma2", attention, NAMES, norms="around")
    return replace(spec, logits_cap=cap(config, "final_logit_softcapping"))


def full_and_sliding(config: ConfigReader, trunk: Trunk) -> tuple[AttentionSpec, AttentionSpec]:
    """Attention of layers that see everything, and of those that look back on a window."""
    bias = config.flag("attention_bias", default=False)
    width = config.number("query_pre_attn_scalar", default=256.0, low=1e-3, high=1e6)
    full = replace(
        trunk.attention(qkv_bias=bias, out_bias=bias),
        scale=width**-0.5,
        scores_cap=cap(config, "attn_logit_softcapping"),
    )
    window = config.integer("sliding_window", high=MAX_POSITIONS, default=4096)
    return full, replace(full, window=window)


def cap(config: ConfigReader, key: str) -> float | None:
    return config.number(key, default=None, low=1e-3, high=MAX_CAP) if config.has(key) else None
