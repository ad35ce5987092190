"""How does a checkpoint come into a folder so that an interrupted one is never taken for whole?

Every file is written beside its place and moved there at once. The index, without which no reader
opens a folder of shards, comes last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ridgeline.errors import ConfigError

INDEX_FILE = "model.safetensors.index.json"
NOTE = "ridgeline"  # key of our own line in a shard's metadata


def shard_name(index: int, count: int) -> str:
    """Of `count` files, from 0."""
    return f"model-{index + 1:05}-of-{count:05}.safetensors"


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor], note: Mapping[str, Any]) -> int:
    """The bytes of its tensors. `note` is any JSON object, to be read with `read_note`.
    ConfigError if the disk does not take it."""
    beside = path.with_name(path.name + ".part")
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        beside.touch()
        mode = beside.stat().st_mode  # what the person's umask gives; save_file has its own
        save_file(kept, beside, metadata={"format": "pt", NOTE: json.dumps(note)})
        beside.chmod(mode)
        os.replace(beside, path)
    except (OSError, SafetensorError) as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written ({error})") from None
    return sum(tensor.numel() * tensor.element_size() for tensor in kept.values())


def read_shard(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and note of a shard of ours. ConfigError if it is none."""
    try:
        with safe_open(path, framework="pt") as file:
            note = json.loads((file.metadata() or {}).get(NOTE, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); remove it and go on") from None
    if not isinstance(note, dict):
        raise ConfigError(f"{path}: is not of this program; remove it or choose another -o")
    return tensors, note


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """ConfigError if the disk does not take it."""
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None


def write_index(folder: Path, shard_of: Mapping[str, str], total_bytes: int) -> None:
    """`shard_of`: tensor name -> file name."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(shard_of)}
    write_json(folder / INDEX_FILE, index)
