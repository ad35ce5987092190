"""What is a Llama? Rotary positions, grouped heads, gated feed-forward; optional biases."""

from __future__ import annotations

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, dense, model_spec, one_window, read_trunk
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec

DEFAULTS = Defaults(rope_theta=10_000.0, norm_eps=1e-6, max_positions=2048)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    one_window(config, trunk.num_layers, None)
    config.refuse("sliding_window")
    bias = config.flag("attention_bias", default=False)
    attention = trunk.attention(qkv_bias=bias, out_bias=bias)
    return model_spec(
        config,
        trunk,
        family="llama",
        attention=(attention,) * trunk.num_layers,
        feed_forward=dense(config, bias=config.flag("mlp_bias", default=False)),
        tensor_names=LLAMA_NAMES,
    )
