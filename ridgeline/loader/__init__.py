"""Where do weights come from: a folder or the hub, checked before any memory is taken?

Names resolve on first use: who reads a config or a tokenizer does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.loader.checkpoint import (
        Checkpoint,
        check_finite,
        check_tensors,
        open_checkpoint,
    )
    from ridgeline.loader.folder import read_config, read_generation_config
    from ridgeline.loader.hub import ModelFolder, resolve_model

_WHERE = {
    "Checkpoint": "checkpoint",
    "check_finite": "checkpoint",
    "check_tensors": "checkpoint",
    "open_checkpoint": "checkpoint",
    "read_config": "folder",
    "read_generation_config": "folder",
    "ModelFolder": "hub",
    "resolve_model": "hub",
}

__all__ = [
    "Checkpoint",
    "ModelFolder",
    "check_finite",
    "check_tensors",
    "open_checkpoint",
    "read_config",
    "read_generation_config",
    "resolve_model",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ridgeline.loader' has no attribute {name!r}")
    return getattr(import_module(f"ridgeline.loader.{_WHERE[name]}"), name)
