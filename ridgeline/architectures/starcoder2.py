"""What is a StarCoder2? Layer norms and products with biases, a feed-forward that is not gated, and
a window that all layers look back on."""

from __future__ import annotations

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, dense, model_spec, one_window, read_trunk
from ridgeline.architectures.parts import LLAMA_NAMES, with_biases
from ridgeline.architectures.spec import ModelSpec

DEFAULTS = Defaults(
    rope_theta=10_000.0, norm_eps=1e-5, norm_key="norm_epsilon", max_positions=4096, num_kv_heads=2
)
_STEM = "model.layers.{layer}.mlp."
NAMES = {**LLAMA_NAMES, **with_biases({"up": f"{_STEM}c_fc", "down": f"{_STEM}c_proj"})}


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    bias = config.flag("use_bias", default=True)
    window = one_window(config, trunk.num_layers, None)
    attention = trunk.attention(window=window, qkv_bias=bias, out_bias=bias)
    return model_spec(
        config,
        trunk,
        family="starcoder2",
        attention=(attention,) * trunk.num_layers,
        feed_forward=dense(config, bias=bias, gated=False, default="gelu_pytorch_tanh"),
        tensor_names=NAMES,
        norm_kind="layer and bias",
        tied=True,
    )
