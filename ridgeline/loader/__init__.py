"""Where do weights come from: a folder or the hub, checked before any memory is taken."""

from ridgeline.loader.checkpoint import (
    Checkpoint,
    check_finite,
    check_tensors,
    open_checkpoint,
)
from ridgeline.loader.folder import read_config, read_generation_config
from ridgeline.loader.hub import ModelFolder, resolve_model

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
