"""What is a Mixtral? A Mistral whose feed-forward is the weighted sum of a few of many experts."""

from __future__ import annotations

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import (
    Defaults,
    activation,
    model_spec,
    one_window,
    read_trunk,
)
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ExpertsSpec, ModelSpec

DEFAULTS = Defaults(rope_theta=1_000_000.0, norm_eps=1e-5, max_positions=131_072, num_kv_heads=8)
MAX_EXPERTS = 1024

_STEM = "model.layers.{layer}.block_sparse_moe."
NAMES = {
    **{role: name for role, name in LLAMA_NAMES.items() if ".mlp." not in name},
    "router": f"{_STEM}gate.weight",
    "gate": f"{_STEM}experts.{{expert}}.w1.weight",
    "down": f"{_STEM}experts.{{expert}}.w2.weight",
    "up": f"{_STEM}experts.{{expert}}.w3.weight",
}


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    config.refuse("attention_bias", False)
    config.refuse("mlp_bias", False)
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    attention = trunk.attention(window=one_window(config, trunk.num_layers, None))
    num_experts = config.integer("num_local_experts", high=MAX_EXPERTS, default=8)
    experts = ExpertsSpec(
        num_experts=num_experts,
        num_active=config.integer("num_experts_per_tok", high=num_experts, default=2),
        intermediate_size=config.integer("intermediate_size"),
        activation=activation(config),
    )
    return model_spec(
        config,
        trunk,
        family="mixtral",
        attention=(attention,) * trunk.num_layers,
        feed_forward=experts,
        tensor_names=NAMES,
    )
