"""Which model is in this GGUF file? Everything but the numbers of its tensors."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ridgeline.architectures import read_spec
from ridgeline.architectures.gguf import (
    ROPE_FACTORS,
    Source,
    config_of,
    family_of,
    sources,
)
from ridgeline.architectures.parts import expected_tensors
from ridgeline.architectures.scheme_config import KEY
from ridgeline.architectures.scheme_methods import gguf_described
from ridgeline.architectures.spec import ModelSpec
from ridgeline.errors import ConfigError
from ridgeline.loader.folder import open_file, refuse
from ridgeline.loader.gguf import GGUFHeader, read_gguf
from ridgeline.loader.gguf_layout import locate
from ridgeline.loader.header import TensorEntry

MAX_FACTORS = 4096  # half of the widest head


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """`entries` and `sources` are by the names that a safetensors checkpoint would have."""

    path: Path
    config: Mapping[str, object]
    entries: Mapping[str, TensorEntry]
    sources: Mapping[str, Source]


def read_gguf_model(path: Path) -> GGUFModel:
    """The model of a GGUF file, after every tensor of it has been found where it should be.

    Reads the header alone. ConfigError names the file and the key or tensor: what is damaged, of
    another architecture or type, missing, of another shape, or more than the model needs.
    """
    header = read_gguf(path)
    family_of(header.metadata, str(path))  # before tensors are looked for
    found = locate(header)
    config = config_of(
        header.metadata,
        {name: entry.shape for name, entry in found.items()},
        dtype=_dtype(found),
        rope_factors=_rope_factors(header, found),
        source=str(path),
    )
    try:
        spec = read_spec(config)
    except ConfigError as error:
        refuse(path, f"its metadata describe no model that can be served: {error}")
    wanted = sources(spec)
    entries = _entries(path, spec, wanted, found)
    stored = gguf_described({name: entry.dtype for name, entry in entries.items()})
    config = config if stored is None else {**config, KEY: stored}
    return GGUFModel(path, config, entries, wanted)


def read_gguf_config(path: Path) -> dict[str, object]:
    """What a config.json beside the weights of this GGUF file would say. ConfigError as above."""
    return dict(read_gguf_model(path).config)


def _dtype(found: Mapping[str, TensorEntry]) -> str:
    """To serve in what the matrices are stored in, or bfloat16, whose range holds all of it."""
    kinds = {entry.dtype for entry in found.values() if len(entry.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _rope_factors(header: GGUFHeader, found: Mapping[str, TensorEntry]) -> tuple[float, ...] | None:
    entry = found.get(ROPE_FACTORS)
    if entry is None:
        return None
    if entry.dtype != "F32" or len(entry.shape) != 1 or entry.shape[0] > MAX_FACTORS:
        refuse(header.path, f"tensor {ROPE_FACTORS!r} is no short list of F32")
    try:
        with open_file(header.path) as file:
            file.seek(entry.start)
            raw = file.read(entry.end - entry.start)
        return struct.unpack(f"<{entry.shape[0]}f", raw)
    except (OSError, struct.error) as error:
        refuse(header.path, f"tensor {ROPE_FACTORS!r} cannot be read ({error})")


def _entries(
    path: Path,
    spec: ModelSpec,
    wanted: Mapping[str, Source],
    found: Mapping[str, TensorEntry],
) -> dict[str, TensorEntry]:
    """What the model needs, by its own names; all there and nothing else."""
    entries: dict[str, TensorEntry] = {}
    for name, shape in expected_tensors(spec).items():
        stored = wanted[name].name
        entry = found.get(stored)
        if entry is None:
            refuse(path, f"lacks tensor {stored!r}, which its metadata make part of the model")
        source = wanted[name]
        row = shape if source.is_row else shape[1:]
        whole = source.rows or shape[0], *row
        if entry.shape != whole:
            refuse(
                path,
                f"tensor {stored!r} has shape {str(list(entry.shape))[:80]}, but the metadata "
                f"make it {list(whole)}",
            )
        row_bytes = (entry.end - entry.start) // whole[0]
        start = entry.start + source.first * row_bytes
        end = start + (1 if source.is_row else shape[0]) * row_bytes
        entries[name] = TensorEntry(name, entry.dtype, shape, start, end)
    used = {source.name for source in wanted.values()} | {ROPE_FACTORS}
    extra = sorted(found.keys() - used)
    if extra:
        shown = ", ".join(repr(name[:80]) for name in extra[:3])
        more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
        refuse(path, f"holds {shown}{more}, which this architecture does not use")
    return entries
