"""Which model is this? A config.json in, a ModelSpec out; one file per family, data only."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.spec import ModelSpec
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


def read_spec(config: Mapping[str, object], *, max_model_len: int | None = None) -> ModelSpec:
    """The model that a config.json describes.

    `max_model_len` is only checked against what the model's positions can serve. ConfigError
    names the key that is missing, of a wrong type, out of range or not supported.
    """
    reader = ConfigReader(config)
    model_type = reader.text("model_type")
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(
            f"config.json: model_type is {model_type[:60]!r}; supported families are {known}"
        )
    spec = load(FAMILIES, model_type, "model family")(reader, max_model_len)
    if not isinstance(spec, ModelSpec):
        raise ConfigError(f"model family {model_type!r} did not return a ModelSpec")
    return spec
