"""What is a Qwen2? A Llama with biases on q, k and v whose later layers may look back on a
window."""

from __future__ import annotations

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, dense, model_spec, read_trunk, sliding_windows
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec

DEFAULTS = Defaults(rope_theta=10_000.0, norm_eps=1e-6, max_positions=32_768, num_kv_heads=32)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    config.refuse("mlp_bias", False)
    config.refuse("use_mrope", False)
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    windows = sliding_windows(config, trunk.num_layers)
    return model_spec(
        config,
        trunk,
        family="qwen2",
        attention=tuple(trunk.attention(window=window, qkv_bias=True) for window in windows),
        feed_forward=dense(config),
        tensor_names=LLAMA_NAMES,
    )
