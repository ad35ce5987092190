"""What is a Seed-OSS? A Llama whose queries, keys and values have biases, and whose config says
apart whether attention's output has one."""

from __future__ import annotations

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, dense, model_spec, read_trunk
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec

DEFAULTS = Defaults(
    rope_theta=10_000.0, norm_eps=1e-6, max_positions=524_288, num_kv_heads=8, head_dim=128
)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    attention = trunk.attention(
        qkv_bias=config.flag("attention_bias", default=True),
        out_bias=config.flag("attention_out_bias", default=False),
    )
    return model_spec(
        config,
        trunk,
        family="seed_oss",
        attention=(attention,) * trunk.num_layers,
        feed_forward=dense(config, bias=config.flag("mlp_bias", default=False)),
        tensor_names=LLAMA_NAMES,
    )
