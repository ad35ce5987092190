"""What is an OLMo-3? An OLMo-2 of which three layers in four look back on a window; positions are
scaled in the others alone."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import MAX_POSITIONS, ConfigReader
from ridgeline.architectures.family import (
    Defaults,
    dense,
    layer_types,
    model_spec,
    read_trunk_of_two_ropes,
)
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec

DEFAULTS = Defaults(rope_theta=500_000.0, norm_eps=1e-5, max_positions=2048)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    trunk, local = read_trunk_of_two_ropes(config, DEFAULTS, DEFAULTS.rope_theta, max_model_len)
    bias = config.flag("attention_bias", default=False)
    window = config.integer("sliding_window", high=MAX_POSITIONS, default=4096)
    full = trunk.attention(qkv_bias=bias, out_bias=bias, qk_norm=True, norms_all_heads=True)
    sliding = replace(full, rope=local, window=window)
    kinds = layer_types(config, trunk.num_layers, full_every=4)
    return model_spec(
        config,
        trunk,
        family="olmo3",
        attention=tuple(sliding if kind == "sliding_attention" else full for kind in kinds),
        feed_forward=dense(config),
        tensor_names=LLAMA_NAMES,
        norms="after",
    )
