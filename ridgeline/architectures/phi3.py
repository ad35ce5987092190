"""What is a Phi-3, or a Phi-4? A Mistral whose q, k and v are one tensor of the checkpoint, as are
gate and up; part of a head may rotate, by frequencies that are divided one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, dense, model_spec, one_window, read_trunk
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec, TensorLayout

DEFAULTS = Defaults(rope_theta=10_000.0, norm_eps=1e-5, max_positions=4096, rotated_share=1.0)
LAYOUTS = (
    TensorLayout("model.layers.{layer}.self_attn.qkv_proj.weight", ("q", "k", "v")),
    TensorLayout("model.layers.{layer}.mlp.gate_up_proj.weight", ("gate", "up")),
)
OLDER = ("su", "yarn")  # names of longrope in older files
TRAINED = "original_max_position_embeddings"


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    config.refuse("attention_bias", False)
    config.refuse("mlp_bias", False)
    config = _longrope(config)
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    attention = trunk.attention(window=one_window(config, trunk.num_layers, None))
    return model_spec(
        config,
        trunk,
        family="phi3",
        attention=(attention,) * trunk.num_layers,
        feed_forward=dense(config),
        tensor_names=LLAMA_NAMES,
        tensor_layouts=LAYOUTS,
    )


def _longrope(config: ConfigReader) -> ConfigReader:
    """The config with the kind of positions by the name that others have for it."""
    values = {TRAINED: 4096, **{k: v for k, v in config.values.items() if v is not None}}
    for key in ("rope_scaling", "rope_parameters"):
        section = values.get(key)
        if isinstance(section, Mapping):
            said = {"rope_type": section.get("rope_type", section.get("type"))}
            said = {"rope_type": "longrope"} if said["rope_type"] in OLDER else {}
            values[key] = {**section, **said}
    return replace(config, values=values)
