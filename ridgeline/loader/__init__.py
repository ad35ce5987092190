"""Where do weights come from: a folder, a GGUF file or the hub, checked before memory is taken?

A model is a folder with config.json and safetensors, or one GGUF file. Who reads a config or a
tokenizer does not load torch: other names resolve on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.loader import folder
from ridgeline.loader.gguf import is_gguf

if TYPE_CHECKING:
    from ridgeline.loader.checkpoint import Checkpoint, check_finite, check_tensors
    from ridgeline.loader.hub import ModelFolder, resolve_model

_WHERE = {
    "Checkpoint": "checkpoint",
    "check_finite": "checkpoint",
    "check_tensors": "checkpoint",
    "ModelFolder": "hub",
    "resolve_model": "hub",
}

__all__ = [
    "Checkpoint",
    "ModelFolder",
    "check_finite",
    "check_tensors",
    "is_gguf",
    "open_checkpoint",
    "read_config",
    "read_generation_config",
    "resolve_model",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ridgeline.loader' has no attribute {name!r}")
    return getattr(import_module(f"ridgeline.loader.{_WHERE[name]}"), name)


def read_config(path: Path) -> dict[str, object]:
    """`config.json` of a model folder, or what it would say of a GGUF file. Of a quantized model
    with what only the headers of its weights say. ConfigError."""
    from ridgeline.architectures.scheme_config import KEY
    from ridgeline.loader.gguf_model import read_gguf_config

    if is_gguf(path):
        return read_gguf_config(path)
    config = folder.read_config(path)
    if not config.get(KEY):
        return config
    from ridgeline.loader.quantized_checkpoint import with_scales

    return with_scales(config, path)


def read_generation_config(path: Path) -> dict[str, object]:
    """`generation_config.json`, or an empty object when the model has none."""
    return {} if is_gguf(path) else folder.read_generation_config(path)


def open_checkpoint(
    path: Path, *, finite_only: bool = True, written: Sequence[tuple[str, str]] = ()
) -> Checkpoint:
    """The weights of a model folder or a GGUF file, after a check of every header.

    Takes milliseconds and no memory for the weights themselves. ConfigError names file and reason.
    """
    if is_gguf(path):
        from ridgeline.loader.gguf_checkpoint import open_gguf

        return open_gguf(path, finite_only=finite_only)
    from ridgeline.loader import checkpoint

    return checkpoint.open_checkpoint(path, finite_only=finite_only, written=written)
