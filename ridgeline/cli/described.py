"""Which model did the person name, and what is it made of? Weights are not needed for that.

A bundled model, then a folder or a GGUF file, then a name of the catalogue, then a hub id.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from ridgeline import demo
from ridgeline.architectures import read_spec
from ridgeline.architectures.catalogue import Entry, find_entry
from ridgeline.architectures.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Described:
    """`source` says where the description is from. `folder` None: from `entry`."""

    spec: ModelSpec
    source: str
    folder: Path | None
    entry: Entry | None = None


def describe(model: str) -> Described:
    """What MODEL is. Of a hub id only config.json is fetched; the catalogue asks nobody. Raises
    ConfigError."""
    from ridgeline.loader import read_config
    from ridgeline.loader.hub import find_config

    path, entry = Path(demo.located(model)).expanduser(), find_entry(model)
    if entry is not None and not path.exists():
        return Described(read_spec(entry.config), entry.source, None, entry)
    if entry is not None:
        said = f"{model} is a folder here, and a name of the catalogue; the folder is used"
        print(f"ridgeline: {said}", file=sys.stderr)
    folder = path if path.exists() else find_config(model)
    return Described(read_spec(read_config(folder)), f"config.json of {model}", folder)
