"""Which model did the person name, and what is it made of? Weights are not needed for that.

A bundled model, then a folder or a GGUF file, then a name of the catalogue, then a hub id.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ridgeline import demo
from ridgeline.architectures import read_spec
from ridgeline.architectures.catalogue import Entry, catalogue, find_entry
from ridgeline.architectures.counts import (
    kv_bytes_per_token,
    num_active_parameters,
    num_parameters,
)
from ridgeline.architectures.spec import ModelSpec, missing

HALF = 2  # bytes of a number in 16 bits


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


@dataclass(frozen=True, slots=True)
class Line:
    """One model of the list."""

    entry: Entry
    spec: ModelSpec

    @property
    def as_json(self) -> dict[str, object]:
        needs = missing(self.spec)
        return {
            "name": self.entry.name,
            "family": self.spec.family,
            "hub_id": self.entry.hub_id,
            "source": self.entry.source,
            "parameters": num_parameters(self.spec),
            "active_parameters": num_active_parameters(self.spec),
            "num_layers": self.spec.num_layers,
            "context": self.spec.max_position_embeddings,
            "kv_bytes_per_token": kv_bytes_per_token(self.spec, HALF),
            "served": not needs,
            "needs": list(needs),
        }


def show_catalogue(*, as_json: bool) -> None:
    """The public models that are known by name."""
    lines = [Line(entry, read_spec(entry.config)) for entry in catalogue().values()]
    if as_json:
        print(json.dumps([line.as_json for line in lines], indent=2))
    else:
        _show_table(lines)


def _show_table(lines: Iterable[Line]) -> None:
    from rich.table import Table

    from ridgeline.cli.session import paper

    heads = ("name", "parameters", "KV a token", "context", "served", "hub id")
    table = Table(*heads, box=None, padding=(0, 1, 0, 0))
    table.columns[-1].overflow = "fold"
    for column in table.columns[1:4]:
        column.justify = "right"
    for line in lines:
        spec, size = line.spec, num_parameters(line.spec)
        table.add_row(
            line.entry.name,
            f"{size / 1e9:.4g} B",
            f"{kv_bytes_per_token(spec, HALF) / 1024:.4g} KiB",
            str(spec.max_position_embeddings),
            "no" if missing(spec) else "yes",
            line.entry.hub_id,
        )
    paper().print(table)
