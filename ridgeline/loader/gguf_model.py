"""Which model is in this GGUF file? Everything but the numbers of its tensors."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ridgeline.architectures import read_spec
from ridgeline.architectures.gguf import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    Source,
    config_of,
    drafting_blocks,
    family_of,
    sources,
)
from ridgeline.architectures.parts import Part, expected_tensors, layer_tensors
from ridgeline.architectures.scheme_config import KEY
from ridgeline.architectures.scheme_methods import gguf_described
from ridgeline.architectures.spec import ModelSpec
from ridgeline.errors import ConfigError
from ridgeline.loader.folder import open_file, refuse
from ridgeline.loader.gguf import GGUFHeader, read_gguf
from ridgeline.loader.gguf_layout import locate
from ridgeline.loader.header import TensorEntry

MAX_FACTORS = 4096  # half of the widest head
FOR_ROTATIONS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """`entries` and `sources` are by the names that a safetensors checkpoint would have; `keys`
    are the entries of `Source.keys`."""

    path: Path
    config: Mapping[str, object]
    entries: Mapping[str, TensorEntry]
    sources: Mapping[str, Source]
    keys: Mapping[str, TensorEntry]


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
        rope_factors={
            name: _rope_factors(header, found[name]) for name in FOR_ROTATIONS if name in found
        },
        source=str(path),
    )
    try:
        spec = read_spec(config)
    except ConfigError as error:
        refuse(path, f"its metadata describe no model that can be served: {error}")
    left_out = drafting_blocks(header.metadata)
    found = {name: entry for name, entry in found.items() if not name.startswith(left_out)}
    wanted = sources(spec, found)
    entries = _entries(path, spec, wanted, found)
    packed = [name for name, part in _parts(spec) if part.is_packed]
    stored = gguf_described({name: entries[name].dtype for name in packed})
    config = config if stored is None else {**config, KEY: stored}
    keys = {name: found[one.keys] for name, one in wanted.items() if one.keys}
    return GGUFModel(path, config, entries, wanted, keys)


def _parts(spec: ModelSpec) -> Iterator[tuple[str, Part]]:
    for index in range(spec.num_layers):
        yield from layer_tensors(spec, index).items()


def read_gguf_config(path: Path) -> dict[str, object]:
    """What a config.json beside the weights of this GGUF file would say. ConfigError as above."""
    return dict(read_gguf_model(path).config)


def _dtype(found: Mapping[str, TensorEntry]) -> str:
    """To serve in what the matrices are stored in, or bfloat16, whose range holds all of it."""
    kinds = {entry.dtype for entry in found.values() if len(entry.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _rope_factors(header: GGUFHeader, entry: TensorEntry) -> tuple[float, ...]:
    if entry.dtype != "F32" or len(entry.shape) != 1 or entry.shape[0] > MAX_FACTORS:
        refuse(header.path, f"tensor {entry.name!r} is no short list of F32")
    try:
        with open_file(header.path) as file:
            file.seek(entry.start)
            raw = file.read(entry.end - entry.start)
        return struct.unpack(f"<{entry.shape[0]}f", raw)
    except (OSError, struct.error) as error:
        refuse(header.path, f"tensor {entry.name!r} cannot be read ({error})")


def _entries(
    path: Path, spec: ModelSpec, wanted: Mapping[str, Source], found: Mapping[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """What the model needs, by its own names; all there and nothing else."""
    entries: dict[str, TensorEntry] = {}
    for name, shape in expected_tensors(spec).items():
        source = wanted[name]
        entry, whole = _find(path, found, source.name), source.whole or shape
        if source.keys:
            whole = _check_keys(path, source, _find(path, found, source.keys), shape)
        _check_shape(path, entry, whole)
        size, count = entry.end - entry.start, math.prod(whole)
        start = entry.start + source.first * size // count
        own = size if source.keys else math.prod(shape) * size // count
        entries[name] = TensorEntry(name, entry.dtype, shape, start, start + own)
    used = {name for source in wanted.values() for name in (source.name, source.keys)}
    extra = sorted(found.keys() - used - {*FOR_ROTATIONS})
    if extra:
        shown = ", ".join(repr(name[:80]) for name in extra[:3])
        more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
        refuse(path, f"holds {shown}{more}, which this architecture does not use")
    return entries


def _find(path: Path, found: Mapping[str, TensorEntry], name: str) -> TensorEntry:
    entry = found.get(name)
    if entry is None:
        refuse(path, f"lacks tensor {name!r}, which its metadata make part of the model")
    return entry


def _check_shape(path: Path, entry: TensorEntry, shape: tuple[int, ...]) -> None:
    """Sizes of 1 in front may be missing."""
    if _bare(entry.shape) != _bare(shape):
        refuse(
            path,
            f"tensor {entry.name!r} has shape {str(list(entry.shape))[:80]}, but the metadata "
            f"make it {list(shape)}",
        )


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[1:] if len(shape) > 1 and shape[0] == 1 else shape


def _check_keys(
    path: Path, source: Source, keys: TensorEntry, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """The shape of what makes values, where the file has apart what makes keys."""
    (rows, rank), (heads, cut) = shape, source.cuts
    _check_shape(path, keys, (heads, rank, cut))
    return heads, rows // heads - cut, rank
