"""How is a checkpoint read so that one tensor alone takes memory, and how does a folder that was
quantized here become a plain checkpoint again?"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ridgeline.architectures import OWN_EXPERTS, read_spec
from ridgeline.architectures.parts import layer_tensors, shared_tensors
from ridgeline.architectures.spec import ModelSpec
from ridgeline.architectures.tensor_layouts import Cut, checkpoint_layer, unstacked
from ridgeline.compression.rounding import Rounded
from ridgeline.errors import ConfigError, check
from ridgeline.layers.cut_source import cut_out, join
from ridgeline.layers.piece import TensorSource
from ridgeline.loader.checkpoint import DTYPES, check_finite
from ridgeline.loader.folder import read_config
from ridgeline.loader.header import TensorEntry
from ridgeline.loader.shards import find_tensors
from ridgeline.quantization.algorithms.grid import Grid, Quantized, Scales
from ridgeline.quantization.compressed_tensors import (
    PACKED,
    SCALE,
    SHAPE,
    ZERO,
    grid_of,
    read_grids,
    read_tensors,
    tensors_of,
)
from ridgeline.quantization.writer import (
    INDEX_FILE,
    shard_name,
    write_index,
    write_json,
    write_shard,
)

KEY = "quantization_config"
FLOATS = ("F32", "F16", "BF16")


class FileTensors(TensorSource):
    """The tensors of a model folder, each read from its file when it is asked for: nothing is
    mapped, so a limit on the address space is a limit on what this takes."""

    def __init__(self, folder: Path, written: Sequence[tuple[str, str]] = ()) -> None:
        self._entries = find_tensors(folder, written)

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name)[1].shape

    def num_bytes(self, name: str) -> int:
        entry = self._find(name)[1]
        return entry.end - entry.start

    def tensor(self, name: str) -> torch.Tensor:
        """In the stored dtype. ConfigError if it is missing, cut off, NaN or infinite."""
        path, entry = self._find(name)
        data = bytearray(entry.end - entry.start)
        with path.open("rb", buffering=0) as file:
            file.seek(entry.start)
            done = 0
            while done < len(data):
                count = file.readinto(memoryview(data)[done:])
                if not count:
                    raise ConfigError(f"{path}: ends within tensor {name!r}; copy it again")
                done += count
        if not data:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        found = torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(entry.shape)
        check_finite(name, found, path)
        return found

    def slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        """A part of `tensor(name)`."""
        shape = self.shape(name)
        check(0 <= dim < len(shape) and start + length <= shape[dim], "slice outside", name=name)
        return self.tensor(name).narrow(dim, start, length)

    def check_floats(self) -> None:
        """ConfigError if a tensor has another dtype than those that quantization starts from."""
        for name, (path, entry) in self._entries.items():
            if entry.dtype not in FLOATS:
                raise ConfigError(
                    f"{path}: tensor {name!r} is {entry.dtype}; quantize needs a checkpoint of"
                    f" {', '.join(FLOATS)}, not one that is quantized already"
                )

    def _find(self, name: str) -> tuple[Path, TensorEntry]:
        if name not in self._entries:
            raise ConfigError(f"the checkpoint has no tensor {name!r}")
        return self._entries[name]


def read_layer(
    tensors: Mapping[str, torch.Tensor], spec: ModelSpec, index: int, grids: Mapping[str, Grid]
) -> Rounded:
    """One layer of a written shard, by the names of its parameters: what is in `grids` is
    quantized, the rest is as it is."""
    found = Rounded({}, {})
    for stored, own in checkpoint_layer(spec, index).items():
        for name, cut in own:
            if name in grids:
                matrix = read_tensors(tensors, stored, grids[name])
                rows = (
                    _numbers(matrix)
                    if cut is None
                    else [cut_out(one, replace(cut, transposed=False)) for one in _numbers(matrix)]
                )
                found.matrices[name] = _quantized(matrix.grid, rows)
            else:
                whole = tensors[stored]
                found.folded[name] = whole if cut is None else cut_out(whole, cut)
    return found


def written_layer(
    rounded: Rounded, source: TensorSource, spec: ModelSpec, index: int
) -> dict[str, torch.Tensor]:
    """A layer in the tensors of the checkpoint that it is made from; a quantized one has the rows
    of its product, even if they were columns."""
    found: dict[str, torch.Tensor] = {}
    for stored, own in checkpoint_layer(spec, index).items():
        if own[0][0] in rounded.matrices:
            found |= tensors_of(
                _joined([(rounded.matrices[name], cut) for name, cut in own]), stored
            )
            continue
        values = [(rounded.folded.get(name), name, cut) for name, cut in own]
        read = [(source.tensor(n) if v is None else v, cut) for v, n, cut in values]
        found[stored] = _join(read)
    return found


def _join(own: Sequence[tuple[torch.Tensor, Cut | None]]) -> torch.Tensor:
    cut = [(values, cut) for values, cut in own if cut is not None]
    return join(cut) if cut else own[0][0]


def _joined(own: Sequence[tuple[Quantized, Cut | None]]) -> Quantized:
    rows = [None if cut is None else replace(cut, transposed=False) for _, cut in own]
    each = zip(*(_numbers(one) for one, _ in own), strict=True)
    return _quantized(
        own[0][0].grid, [_join(list(zip(alike, rows, strict=True))) for alike in each]
    )


def _numbers(one: Quantized) -> list[torch.Tensor]:
    """All of it, row by row."""
    zero = [] if one.scales.zero_OG is None else [one.scales.zero_OG]
    return [one.codes_OI, one.scales.scale_OG, *zero]


def _quantized(grid: Grid, numbers: Sequence[torch.Tensor]) -> Quantized:
    codes_OI, scale_OG, *zero = numbers
    return Quantized(grid, codes_OI, Scales(scale_OG, zero[0] if zero else None))


def write_plain(folder: Path, out: Path) -> None:
    """The dequantized model, layer by layer: each weight is code * scale, rounded to the dtype of
    the scales, as Transformers makes it. `out` must not exist. ConfigError if `folder` holds
    another layout than ours."""
    config = read_config(folder)
    described = config.pop(KEY, None)
    if not isinstance(described, dict):
        raise ConfigError(f"{folder}: config.json has no {KEY}; the model is plain already")
    grids, spec, source = read_grids(described), read_spec(config), FileTensors(folder)
    if unstacked(spec) != spec:
        config[OWN_EXPERTS] = True
        spec = read_spec(config)
    out.mkdir()
    shard_of: dict[str, str] = {}
    total, count = 0, spec.num_layers + 1
    for index in range(count):
        found: dict[str, torch.Tensor] = {}
        if index == spec.num_layers:
            found = {name: source.tensor(name) for name in shared_tensors(spec)}
        else:
            packed = {name: part.is_packed for name, part in layer_tensors(spec, index).items()}
            for stored, ((name, cut), *_) in checkpoint_layer(spec, index).items():
                values = _matrix(source, stored, grids) if packed[name] else source.tensor(stored)
                is_turned = packed[name] and cut is not None and cut.transposed
                found[stored] = values.T.contiguous() if is_turned else values
        total += write_shard(out / shard_name(index, count), found, {})
        shard_of.update(dict.fromkeys(found, shard_name(index, count)))
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".jinja", ".model", ".txt") and path.name != INDEX_FILE:
            shutil.copyfile(path, out / path.name)
    write_json(out / "config.json", config)
    write_index(out, shard_of, total)


def _matrix(source: FileTensors, name: str, grids: Mapping[str, Grid]) -> torch.Tensor:
    stem, grid = name.removesuffix("weight"), grid_of(grids, name)
    parts = [PACKED, SCALE, SHAPE, *([] if grid.symmetric else [ZERO])]
    read = read_tensors({stem + part: source.tensor(stem + part) for part in parts}, name, grid)
    return read.dequantize().to(read.scales.scale_OG.dtype)
