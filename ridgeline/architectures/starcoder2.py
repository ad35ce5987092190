"""What is a StarCoder2? Layer norms and products with biases, a feed-forward that is not gated, and
a window that all layers look back on."""

from __future__ import annotations

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, dense, model_spec, one_window, read_trunk
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec

DEFAULTS = Defaults(
    rope_theta=10_000.0,
    norm_eps=1e-5,
    norm_key="norm_epsilon",
    max_positions=4096,
    num_kv_heads=2,
)
_OWN = {"up": "c_fc", "down": "c_proj"}
NAMES = {
    **LLAMA_NAMES,
    **{
        f"{role}{suffix}": f"model.layers.{{layer}}.mlp.{name}.{kind}"
        for role, name in _OWN.items()
        for suffix, kind in (("", "weight"), ("_bias", "bias"))
    },
}


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
