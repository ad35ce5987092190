"""Which model is this? A config.json in, a ModelSpec out; one file per family, data only."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.shapes import SHAPES
from ridgeline.architectures.spec import ModelSpec
from ridgeline.architectures.stored_config import described
from ridgeline.architectures.tensor_names import (
    expected_tensors,
    is_ignored,
    leftover_tensors,
    optional_tensors,
)
from ridgeline.errors import ConfigError
from ridgeline.registry import load

__all__ = [
    "FAMILIES",
    "PLANNED_FAMILIES",
    "expected_tensors",
    "is_ignored",
    "leftover_tensors",
    "optional_tensors",
    "read_spec",
]

# model_type of config.json -> "module:function"
FAMILIES: dict[str, str] = {
    "llama": "ridgeline.architectures.llama:read",
    "mistral": "ridgeline.architectures.mistral:read",
    "mixtral": "ridgeline.architectures.mixtral:read",
    "qwen2": "ridgeline.architectures.qwen2:read",
    "qwen3": "ridgeline.architectures.qwen3:read",
}
# Described, priced and planned for; `serving.check_served` says why they are not served.
PLANNED_FAMILIES: dict[str, str] = {
    **dict.fromkeys(SHAPES, "ridgeline.architectures.shapes:read"),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "kimi_k2"), "ridgeline.architectures.deepseek_v3:read"
    ),
    "gemma3": "ridgeline.architectures.gemma3:read_multimodal",
    "gemma3_text": "ridgeline.architectures.gemma3:read",
}


def read_spec(config: Mapping[str, object], *, max_model_len: int | None = None) -> ModelSpec:
    """The model that a config.json describes.

    `max_model_len` is only checked against what the model's positions can serve. ConfigError
    names the key that is missing, of a wrong type, out of range or not supported. A family that
    can only be planned for is read too: `serving.check_served` tells.
    """
    reader = ConfigReader(config)
    model_type = reader.text("model_type")
    families = {**PLANNED_FAMILIES, **FAMILIES}
    if model_type not in families:
        known, planned = ", ".join(sorted(FAMILIES)), ", ".join(sorted(PLANNED_FAMILIES))
        raise ConfigError(
            f"config.json: model_type is {model_type[:60]!r}; supported families are {known} "
            f"(and for planning alone {planned})"
        )
    spec = load(families, model_type, "model family")(reader, max_model_len)
    if not isinstance(spec, ModelSpec):
        raise ConfigError(f"model family {model_type!r} did not return a ModelSpec")
    # What can only be planned for is priced in any format, whatever its checkpoint has.
    return described(spec, reader) if model_type in FAMILIES else spec
