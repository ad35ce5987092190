"""What is a Mistral? A Llama without biases whose layers may all look back on one window."""

from __future__ import annotations

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, dense, model_spec, one_window, read_trunk
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec

DEFAULTS = Defaults(rope_theta=10_000.0, norm_eps=1e-6, max_positions=131_072, num_kv_heads=8)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    config.refuse("attention_bias", False)
    config.refuse("mlp_bias", False)
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    attention = trunk.attention(window=one_window(config, trunk.num_layers, 4096))
    return model_spec(
        config,
        trunk,
        family="mistral",
        attention=(attention,) * trunk.num_layers,
        feed_forward=dense(config),
        tensor_names=LLAMA_NAMES,
    )
