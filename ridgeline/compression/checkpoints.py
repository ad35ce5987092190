"""How is a checkpoint read so that one tensor alone takes memory, and how does a folder that was
quantized here become a plain checkpoint again?"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from ridgeline.architectures import read_spec
from ridgeline.architectures.parts import layer_tensors, shared_tensors
from ridgeline.compression.rounding import Rounded
from ridgeline.errors import ConfigError, check
from ridgeline.loader.checkpoint import DTYPES, check_finite
from ridgeline.loader.folder import read_config
from ridgeline.loader.header import TensorEntry
from ridgeline.loader.shards import find_tensors
from ridgeline.quantization.algorithms.grid import Grid
from ridgeline.quantization.compressed_tensors import (
    PACKED,
    SCALE,
    SHAPE,
    ZERO,
    grid_of,
    read_grids,
    read_tensors,
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


class FileTensors:
    """The tensors of a model folder, each read from its file when it is asked for: nothing is
    mapped, so a limit on the address space is a limit on what this takes."""

    def __init__(self, folder: Path) -> None:
        self._entries = find_tensors(folder)

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
    tensors: Mapping[str, torch.Tensor], names: Iterable[str], grids: Mapping[str, Grid]
) -> Rounded:
    """One layer of a written shard: what is in `grids` is quantized, the rest is as it is."""
    matrices = {name: read_tensors(tensors, name, grid) for name, grid in grids.items()}
    folded = {name: tensors[name] for name in names if name not in matrices}
    return Rounded(matrices, folded)


def write_plain(folder: Path, out: Path) -> None:
    """The dequantized model, layer by layer: each weight is code * scale, rounded to the dtype of
    the scales, as Transformers makes it. `out` must not exist. ConfigError if `folder` holds
    another layout than ours."""
    config = read_config(folder)
    described = config.pop(KEY, None)
    if not isinstance(described, dict):
        raise ConfigError(f"{folder}: config.json has no {KEY}; the model is plain already")
    grids, spec, source = read_grids(described), read_spec(config), FileTensors(folder)
    out.mkdir()
    shard_of: dict[str, str] = {}
    total, count = 0, spec.num_layers + 1
    for index in range(count):
        found: dict[str, torch.Tensor] = {}
        if index == spec.num_layers:
            found = {name: source.tensor(name) for name in shared_tensors(spec)}
        for name, part in layer_tensors(spec, index).items() if index < spec.num_layers else ():
            found[name] = _matrix(source, name, grids) if part.is_packed else source.tensor(name)
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
