"""What is a Granite? A Llama that scales what it looks up, its scores, what each branch adds, and
its logits."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, dense, model_spec, read_trunk
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec

DEFAULTS = Defaults(rope_theta=10_000.0, norm_eps=1e-6, max_positions=2048)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    bias = config.flag("attention_bias", default=False)
    attention = trunk.attention(qkv_bias=bias, out_bias=bias)
    attention = replace(attention, scale=multiplier(config, "attention_multiplier"))
    spec = model_spec(
        config,
        trunk,
        family="granite",
        attention=(attention,) * trunk.num_layers,
        feed_forward=dense(config, bias=config.flag("mlp_bias", default=False)),
        tensor_names=LLAMA_NAMES,
    )
    return replace(
        spec,
        embedding_scale=multiplier(config, "embedding_multiplier"),
        residual_scale=multiplier(config, "residual_multiplier"),
        logits_scale=1.0 / multiplier(config, "logits_scaling"),
    )


def multiplier(config: ConfigReader, key: str) -> float:
    return config.number(key, default=1.0, low=1e-6, high=1e6)
