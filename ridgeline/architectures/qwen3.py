"""What is a Qwen3? A Llama that normalises each head of q and k before rotation; explicit head
size, optional window on later layers."""

from __future__ import annotations

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, dense, model_spec, read_trunk, sliding_windows
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec

DEFAULTS = Defaults(
    rope_theta=10_000.0, norm_eps=1e-6, max_positions=32_768, num_kv_heads=32, head_dim=128
)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    config.refuse("mlp_bias", False)
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    bias = config.flag("attention_bias", default=False)
    windows = sliding_windows(config, trunk.num_layers)
    return model_spec(
        config,
        trunk,
        family="qwen3",
        attention=tuple(
            trunk.attention(window=window, qkv_bias=bias, out_bias=bias, qk_norm=True)
            for window in windows
        ),
        feed_forward=dense(config),
        tensor_names=LLAMA_NAMES,
    )
