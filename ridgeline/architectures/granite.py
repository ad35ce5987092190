"""What is a Granite? A Llama that scales what it looks up, its scores, what each branch adds, and
its logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, FeedForwardSpec, dense, model_spec, read_trunk
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec, TensorLayout

DEFAULTS = Defaults(rope_theta=10_000.0, norm_eps=1e-6, max_positions=2048)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    inner = dense(config, bias=config.flag("mlp_bias", default=False))
    return granite_spec(config, max_model_len, "granite", inner, LLAMA_NAMES)


def granite_spec(
    config: ConfigReader,
    max_model_len: int | None,
    family: str,
    feed_forward: FeedForwardSpec,
    tensor_names: Mapping[str, str],
    tensor_layouts: tuple[TensorLayout, ...] = (),
) -> ModelSpec:
    """What those with and without experts have in common."""

    def multiplier(key: str) -> float:
        return config.number(key, default=1.0, low=1e-6, high=1e6)

    trunk = read_trunk(config, DEFAULTS, max_model_len)
    bias = config.flag("attention_bias", default=False)
    attention = trunk.attention(qkv_bias=bias, out_bias=bias)
    attention = replace(attention, scale=multiplier("attention_multiplier"))
    spec = model_spec(
        config,
        trunk,
        family=family,
        attention=(attention,) * trunk.num_layers,
        feed_forward=feed_forward,
        tensor_names=tensor_names,
        tensor_layouts=tensor_layouts,
    )
    return replace(
        spec,
        embedding_scale=multiplier("embedding_multiplier"),
        residual_scale=multiplier("residual_multiplier"),
        logits_scale=1.0 / multiplier("logits_scaling"),
    )
