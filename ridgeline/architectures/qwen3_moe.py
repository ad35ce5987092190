"""What is a Qwen3-MoE? A Qwen3 in which all layers, or some, weigh a few of many small experts."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import MAX_POSITIONS, ConfigReader
from ridgeline.architectures.family import Defaults, mixed, model_spec, read_trunk, routed
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec

DEFAULTS = Defaults(rope_theta=10_000.0, norm_eps=1e-6, max_positions=32_768, num_kv_heads=4)
_MLP = "model.layers.{layer}.mlp."
NAMES = {
    **LLAMA_NAMES,
    "router": f"{_MLP}gate.weight",
    **{
        f"expert_{role}": f"{_MLP}experts.{{expert}}.{role}_proj.weight"
        for role in ("gate", "up", "down")
    },
}


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    bias = config.flag("attention_bias", default=False)
    window = None
    if config.flag("use_sliding_window", default=False) and config.values.get("sliding_window", 1):
        window = config.integer("sliding_window", high=MAX_POSITIONS, default=4096)
    attention = trunk.attention(window=window, qkv_bias=bias, out_bias=bias, qk_norm=True)
    keys = ("num_experts", "num_local_experts")
    experts = routed(config, keys, num_experts=128, num_active=8)
    renormalize = config.flag("norm_topk_prob", default=False)
    return model_spec(
        config,
        trunk,
        family="qwen3_moe",
        attention=(attention,) * trunk.num_layers,
        feed_forward=mixed(config, replace(experts, renormalize=renormalize), trunk.num_layers),
        tensor_names=NAMES,
    )
