"""What is a GLM-4? A Llama that rotates half of each head, neighbour with neighbour, and has gate
and up as one tensor; the newer ones norm what a branch adds, too."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, dense, model_spec, read_trunk
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec, TensorLayout

DEFAULTS = Defaults(
    rope_theta=10_000.0,
    norm_eps=1.5625e-7,
    max_positions=131_072,
    num_kv_heads=2,
    head_dim=128,
    rotated_share=0.5,
)
LAYOUTS = (TensorLayout("model.layers.{layer}.mlp.gate_up_proj.weight", ("gate", "up")),)
NAMES = {
    **LLAMA_NAMES,
    "post_attention_norm": "model.layers.{layer}.post_self_attn_layernorm.weight",
    "post_feed_forward_norm": "model.layers.{layer}.post_mlp_layernorm.weight",
}


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    trunk = replace(trunk, rope=replace(trunk.rope, interleaved=True))
    is_older = config.text("model_type") == "glm"
    attention = trunk.attention(qkv_bias=config.flag("attention_bias", default=True))
    return model_spec(
        config,
        trunk,
        family="glm" if is_older else "glm4",
        attention=(attention,) * trunk.num_layers,
        feed_forward=dense(config),
        tensor_names=NAMES,
        norms="before" if is_older else "around",
        tensor_layouts=LAYOUTS,
    )
