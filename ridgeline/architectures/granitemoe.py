"""What is a GraniteMoE? A Granite whose feed-forward is the weighted sum of a few of many
experts; in a `granitemoeshared`, beside one that every token passes."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import routed
from ridgeline.architectures.granite import granite_spec
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ExpertsSpec, ModelSpec, TensorLayout

_STEM = "model.layers.{layer}.block_sparse_moe."
NAMES = {
    **LLAMA_NAMES,
    "router": f"{_STEM}router.layer.weight",
    **{role: f"{_STEM}experts.{{expert}}.{role}.weight" for role in ("gate", "up", "down")},
}
_SHARED = "model.layers.{layer}.shared_mlp."
SHARED_NAMES = {
    "shared_gate": f"{_SHARED}gate.weight",
    "shared_up": f"{_SHARED}up.weight",
    "shared_down": f"{_SHARED}output_linear.weight",
}
LAYOUTS = (
    TensorLayout(f"{_STEM}input_linear.weight", ("gate", "up"), experts=True),
    TensorLayout(f"{_STEM}output_linear.weight", ("down",), experts=True),
)
SHARED_LAYOUT = TensorLayout(f"{_SHARED}input_linear.weight", ("shared_gate", "shared_up"))


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    return granite_spec(config, max_model_len, "granitemoe", _experts(config), NAMES, LAYOUTS)


def read_shared(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    size = config.integer("shared_intermediate_size", low=0, default=0)
    experts = replace(_experts(config), shared_size=size)
    names = {**NAMES, **SHARED_NAMES} if size else NAMES
    layouts = (*LAYOUTS, SHARED_LAYOUT) if size else LAYOUTS
    return granite_spec(config, max_model_len, "granitemoeshared", experts, names, layouts)


def _experts(config: ConfigReader) -> ExpertsSpec:
    return routed(
        config, ("num_local_experts",), size="intermediate_size", num_experts=8, num_active=2
    )
