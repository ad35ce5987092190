"""What is an OLMo-2? A Llama whose norms stand behind attention and feed-forward in place of before
them, and that norms the queries of all heads together, and the keys."""

from __future__ import annotations

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, dense, model_spec, read_trunk
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec

DEFAULTS = Defaults(rope_theta=10_000.0, norm_eps=1e-5, max_positions=2048)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    bias = config.flag("attention_bias", default=False)
    attention = trunk.attention(qkv_bias=bias, out_bias=bias, qk_norm=True, norms_all_heads=True)
    return model_spec(
        config,
        trunk,
        family="olmo2",
        attention=(attention,) * trunk.num_layers,
        feed_forward=dense(config),
        tensor_names=LLAMA_NAMES,
        norms="after",
    )
