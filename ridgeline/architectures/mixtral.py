"""What is a Mixtral? A Mistral whose feed-forward is the weighted sum of a few of many experts."""

from __future__ import annotations

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, model_spec, one_window, read_trunk, routed
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec

DEFAULTS = Defaults(rope_theta=1_000_000.0, norm_eps=1e-5, max_positions=131_072, num_kv_heads=8)

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
    experts = routed(
        config, ("num_local_experts",), size="intermediate_size", num_experts=8, num_active=2
    )
    return model_spec(
        config,
        trunk,
        family="mixtral",
        attention=(attention,) * trunk.num_layers,
        feed_forward=experts,
        tensor_names=NAMES,
    )
