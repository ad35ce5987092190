"""What is a GraniteMoE? A Granite whose feed-forward is the weighted sum of a few of many
experts."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, model_spec, read_trunk, routed
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec, Stored

DEFAULTS = Defaults(rope_theta=10_000.0, norm_eps=1e-6, max_positions=2048)
_STEM = "model.layers.{layer}.block_sparse_moe."
NAMES = {
    **LLAMA_NAMES,
    "router": f"{_STEM}router.layer.weight",
    **{role: f"{_STEM}experts.{{expert}}.{role}.weight" for role in ("gate", "up", "down")},
}
STORED = (
    Stored(f"{_STEM}input_linear.weight", ("gate", "up"), experts=True),
    Stored(f"{_STEM}output_linear.weight", ("down",), experts=True),
)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    bias = config.flag("attention_bias", default=False)
    attention = replace(
        trunk.attention(qkv_bias=bias, out_bias=bias),
        scale=multiplier(config, "attention_multiplier"),
    )
    spec = model_spec(
        config,
        trunk,
        family="granitemoe",
        attention=(attention,) * trunk.num_layers,
        feed_forward=routed(
            config, ("num_local_experts",), size="intermediate_size", num_experts=8, num_active=2
        ),
        tensor_names=NAMES,
        stored=STORED,
    )
    return replace(
        spec,
        embedding_scale=multiplier(config, "embedding_multiplier"),
        residual_scale=multiplier(config, "residual_multiplier"),
        logits_scale=1.0 / multiplier(config, "logits_scaling"),
    )


def multiplier(config: ConfigReader, key: str) -> float:
    return config.number(key, default=1.0, low=1e-6, high=1e6)
