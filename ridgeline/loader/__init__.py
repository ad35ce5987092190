"""Where do weights come from: a folder, a GGUF file or the hub, checked before memory is taken?

Names resolve on first use: who reads a config or a tokenizer does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.loader.checkpoint import Checkpoint, check_finite, check_tensors
    from ridgeline.loader.gguf import is_gguf
    from ridgeline.loader.hub import ModelFolder, resolve_model
    from ridgeline.loader.model import open_checkpoint, read_config, read_generation_config

_WHERE = {
    "Checkpoint": "checkpoint",
    "check_finite": "checkpoint",
    "check_tensors": "checkpoint",
    "is_gguf": "gguf",
    "open_checkpoint": "model",
    "read_config": "model",
    "read_generation_config": "model",
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
