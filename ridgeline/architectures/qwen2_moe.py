"""What is a Qwen2-MoE? A Qwen2 in which all layers, or some, weigh a few of many small experts
beside a large one that every token passes, itself weighed by a gate."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import MAX_POSITIONS, ConfigReader
from ridgeline.architectures.family import (
    Defaults,
    mixed,
    model_spec,
    read_trunk,
    routed,
    sliding_windows,
)
from ridgeline.architectures.qwen3_moe import NAMES as QWEN3_NAMES
from ridgeline.architectures.spec import ModelSpec

DEFAULTS = Defaults(rope_theta=10_000.0, norm_eps=1e-6, max_positions=32_768, num_kv_heads=16)
_MLP = "model.layers.{layer}.mlp."
NAMES = {
    **QWEN3_NAMES,
    "shared_score": f"{_MLP}shared_expert_gate.weight",
    **{
        f"shared_{role}": f"{_MLP}shared_expert.{role}_proj.weight"
        for role in ("gate", "up", "down")
    },
}


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    bias = config.flag("qkv_bias", default=True)
    attention = tuple(
        trunk.attention(window=window, qkv_bias=bias)
        for window in _windows(config, trunk.num_layers)
    )
    experts = replace(
        routed(config, ("num_experts", "num_local_experts"), num_experts=60, num_active=4),
        renormalize=config.flag("norm_topk_prob", default=False),
        shared_size=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return model_spec(
        config,
        trunk,
        family="qwen2_moe",
        attention=attention,
        feed_forward=mixed(config, experts, trunk.num_layers),
        tensor_names=NAMES,
    )


def _windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Where windows are on and no layer is named: every other layer below `max_window_layers`."""
    if not config.flag("use_sliding_window", default=False) or config.has("layer_types"):
        return sliding_windows(config, num_layers)
    below = config.integer("max_window_layers", low=0, high=MAX_POSITIONS, default=28)
    kinds = [
        "full_attention" if index % 2 or index >= below else "sliding_attention"
        for index in range(num_layers)
    ]
    return sliding_windows(
        replace(config, values={**config.values, "layer_types": kinds}), num_layers
    )
