"""What is a GraniteMoE? A Granite whose feed-forward is the weighted sum of a few of many
experts."""

from __future__ import annotations

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import routed
from ridgeline.architectures.granite import granite_spec
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec, TensorLayout

_STEM = "model.layers.{layer}.block_sparse_moe."
NAMES = {
    **LLAMA_NAMES,
    "router": f"{_STEM}router.layer.weight",
    **{role: f"{_STEM}experts.{{expert}}.{role}.weight" for role in ("gate", "up", "down")},
}
LAYOUTS = (
    TensorLayout(f"{_STEM}input_linear.weight", ("gate", "up"), experts=True),
    TensorLayout(f"{_STEM}output_linear.weight", ("down",), experts=True),
)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    experts = routed(
        config, ("num_local_experts",), size="intermediate_size", num_experts=8, num_active=2
    )
    return granite_spec(config, max_model_len, "granitemoe", experts, NAMES, LAYOUTS)
