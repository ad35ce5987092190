"""What is a StableLM? A Llama with layer norms, of whose heads a quarter rotates; attention and
feed-forward may be side by side."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, dense, model_spec, read_trunk
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec

DEFAULTS = Defaults(
    rope_theta=10_000.0,
    norm_eps=1e-5,
    norm_key="layer_norm_eps",
    max_positions=4096,
    num_kv_heads=32,
    rotated_share=0.25,
)
_NORMS = "model.layers.{layer}.self_attn.%s_layernorm.norms.{head}.weight"
NAMES = {**LLAMA_NAMES, "q_norm": _NORMS % "q", "k_norm": _NORMS % "k"}


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    attention = replace(
        trunk.attention(qkv_bias=config.flag("use_qkv_bias", default=False)),
        qk_norm=config.flag("qk_layernorm", default=False),
        qk_norm_kind="layer",
    )
    return model_spec(
        config,
        trunk,
        family="stablelm",
        attention=(attention,) * trunk.num_layers,
        feed_forward=dense(config),
        tensor_names=NAMES,
        norm_kind="layer and bias",
        parallel_norms=1 if config.flag("use_parallel_residual", default=False) else 0,
    )
