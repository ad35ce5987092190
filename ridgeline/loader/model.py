"""A model is a folder with config.json and safetensors, or one GGUF file: who reads which?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.architectures.stored_config import KEY
from ridgeline.loader import folder
from ridgeline.loader.gguf import is_gguf
from ridgeline.loader.gguf_model import read_gguf_config

if TYPE_CHECKING:
    from ridgeline.loader.checkpoint import Checkpoint


def read_config(path: Path) -> dict[str, object]:
    """`config.json` of a model folder, or what it would say of a GGUF file. Of a quantized model
    with what only the headers of its weights say. ConfigError."""
    if is_gguf(path):
        return read_gguf_config(path)
    config = folder.read_config(path)
    if not config.get(KEY):
        return config
    from ridgeline.loader.stored_checkpoint import with_scales

    return with_scales(config, path)


def read_generation_config(path: Path) -> dict[str, object]:
    """`generation_config.json`, or an empty object when the model has none."""
    return {} if is_gguf(path) else folder.read_generation_config(path)


def open_checkpoint(path: Path, *, finite_only: bool = True) -> Checkpoint:
    """The weights of a model folder or a GGUF file, after a check of every header.

    Takes milliseconds and no memory for the weights themselves. ConfigError names file and reason.
    """
    if is_gguf(path):
        from ridgeline.loader.gguf_checkpoint import open_gguf

        return open_gguf(path, finite_only=finite_only)
    from ridgeline.loader import checkpoint

    return checkpoint.open_checkpoint(path, finite_only=finite_only)
