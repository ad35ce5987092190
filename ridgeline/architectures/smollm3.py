"""What is a SmolLM3? A Llama of which every fourth layer does not rotate queries and keys."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import (
    LAYER_TYPES,
    Defaults,
    dense,
    model_spec,
    read_trunk,
    sliding_windows,
)
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec, RopeSpec

DEFAULTS = Defaults(rope_theta=2_000_000.0, norm_eps=1e-6, max_positions=32_768, num_kv_heads=4)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    config = config.with_defaults(tie_word_embeddings=True, sliding_window=None)
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    num_layers = trunk.num_layers
    every = config.integer("no_rope_layer_interval", high=1024, default=4)
    usual = tuple(index % every > 0 for index in range(1, num_layers + 1))
    rotates = config.flags("no_rope_layers", length=num_layers) or usual  # 1: it does rotate
    if not config.has("layer_types") and config.flag("use_sliding_window", default=False):
        config = config.with_values(layer_types=[LAYER_TYPES[not rotated] for rotated in rotates])
    bias = config.flag("attention_bias", default=False)
    attention = trunk.attention(qkv_bias=bias, out_bias=bias)
    ropes = RopeSpec(kind="none"), trunk.rope
    return model_spec(
        config,
        trunk,
        family="smollm3",
        attention=tuple(
            replace(attention, rope=ropes[rotated], window=window)
            for rotated, window in zip(rotates, sliding_windows(config, num_layers), strict=True)
        ),
        feed_forward=dense(config, bias=config.flag("mlp_bias", default=False)),
        tensor_names=LLAMA_NAMES,
    )
