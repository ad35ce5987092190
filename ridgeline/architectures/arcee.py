"""What is an Arcee? A Llama whose feed-forward is not gated and squares what its ReLU leaves."""

from __future__ import annotations

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, dense, model_spec, read_trunk
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec

DEFAULTS = Defaults(rope_theta=10_000.0, norm_eps=1e-5, max_positions=4096)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    bias = config.flag("attention_bias", default=False)
    mlp_bias = config.flag("mlp_bias", default=False)
    attention = trunk.attention(qkv_bias=bias, out_bias=bias)
    return model_spec(
        config,
        trunk,
        family="arcee",
        attention=(attention,) * trunk.num_layers,
        feed_forward=dense(config, bias=mlp_bias, gated=False, default="relu2"),
        tensor_names=LLAMA_NAMES,
    )
