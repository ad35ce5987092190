"""What is a GLM-4-MoE (GLM-4.5, 4.6)? Half of each head rotates; behind a few dense layers, many
small experts, scored by sigmoids and chosen with a bias, beside one that every token passes."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import MAX_LAYERS, ConfigReader
from ridgeline.architectures.deepseek_v3 import NAMES
from ridgeline.architectures.family import (
    Defaults,
    dense,
    in_groups,
    model_spec,
    read_trunk,
    routed,
)
from ridgeline.architectures.spec import ExpertsSpec, ModelSpec

DEFAULTS = Defaults(
    rope_theta=10_000.0, norm_eps=1e-5, max_positions=131_072, num_kv_heads=8, rotated_share=0.5
)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    attention = trunk.attention(
        qkv_bias=config.flag("attention_bias", default=False),
        qk_norm=config.flag("use_qk_norm", default=False),
    )
    first = config.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=1)
    experts = _experts(config)
    plain = dense(config) if first else experts
    return model_spec(
        config,
        trunk,
        family="glm4_moe",
        attention=(attention,) * trunk.num_layers,
        feed_forward=tuple(plain if i < first else experts for i in range(trunk.num_layers)),
        tensor_names=NAMES,
    )


def _experts(config: ConfigReader) -> ExpertsSpec:
    experts = routed(config, ("n_routed_experts",), num_experts=128, num_active=8)
    num_shared = config.integer("n_shared_experts", low=0, high=64, default=1)
    experts = replace(
        experts,
        renormalize=config.flag("norm_topk_prob", default=True),
        shared_size=experts.intermediate_size * num_shared,
        scoring="sigmoid",
        score_bias=True,
        float32_scores=True,
        weight_scale=config.number("routed_scaling_factor", default=1.0, low=1e-3, high=1e3),
    )
    return in_groups(config, experts, group_best=2)
