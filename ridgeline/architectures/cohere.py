"""What is a Cohere (Command R), or a Cohere 2? Attention and feed-forward side by side behind one
layer norm without bias, neighbouring numbers rotated, scaled logits; in the second one each fourth
layer sees everything and rotates nothing, and the others look back on a window."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import MAX_POSITIONS, ConfigReader
from ridgeline.architectures.family import (
    Defaults,
    Trunk,
    dense,
    layer_types,
    model_spec,
    read_trunk,
)
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import AttentionSpec, ModelSpec, RopeSpec

FIRST = Defaults(rope_theta=500_000.0, norm_eps=1e-5, norm_key="layer_norm_eps", max_positions=8192)
SECOND = replace(FIRST, rope_theta=10_000.0)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    trunk = _trunk(config, FIRST, max_model_len)
    attention = replace(
        _attention(config, trunk),
        qk_norm=config.flag("use_qk_norm", default=False),
        qk_norm_kind="layer",
    )
    return _spec(config, trunk, "cohere", (attention,) * trunk.num_layers)


def read_second(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    config.refuse("use_qk_norm", False)
    trunk = _trunk(config, SECOND, max_model_len)
    every = config.integer("sliding_window_pattern", high=MAX_POSITIONS, default=4)
    kinds = layer_types(config, trunk.num_layers, full_every=every)
    window = config.integer("sliding_window", high=MAX_POSITIONS, default=4096)
    sliding = replace(_attention(config, trunk), window=window)
    full = replace(sliding, window=None, rope=RopeSpec(kind="none"))
    attention = tuple(sliding if kind == "sliding_attention" else full for kind in kinds)
    return _spec(config, trunk, "cohere2", attention)


def _trunk(config: ConfigReader, defaults: Defaults, max_model_len: int | None) -> Trunk:
    trunk = read_trunk(config, defaults, max_model_len)
    return replace(trunk, rope=replace(trunk.rope, interleaved=True))


def _attention(config: ConfigReader, trunk: Trunk) -> AttentionSpec:
    bias = config.flag("attention_bias", default=False)
    return trunk.attention(qkv_bias=bias, out_bias=bias)


def _spec(
    config: ConfigReader, trunk: Trunk, family: str, attention: tuple[AttentionSpec, ...]
) -> ModelSpec:
    spec = model_spec(
        config,
        trunk,
        family=family,
        attention=attention,
        feed_forward=dense(config),
        tensor_names=LLAMA_NAMES,
        norm_kind="layer",
        parallel_norms=1,
        tied=True,
    )
    scale = config.number("logit_scale", default=0.0625, low=1e-6, high=1e6)
    return replace(spec, logits_scale=scale)
