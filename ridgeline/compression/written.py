"""What is in a folder that was quantized here, and how does it become a plain checkpoint again?"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from ridgeline.architectures import read_spec
from ridgeline.compression.layers import layer_names, matrix_names, rest_names
from ridgeline.compression.rounding import Rounded
from ridgeline.compression.source import FileTensors
from ridgeline.errors import ConfigError
from ridgeline.loader.folder import read_config
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


def read_layer(
    tensors: Mapping[str, torch.Tensor], names: Mapping[str, str], grids: Mapping[str, Grid]
) -> Rounded:
    """One layer of a written shard: the roles in `grids` are quantized, the rest is as it is."""
    matrices = {role: read_tensors(tensors, names[role], grid) for role, grid in grids.items()}
    folded = {role: tensors[name] for role, name in names.items() if role not in matrices}
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
        matrices = matrix_names(spec, index).values() if index < spec.num_layers else ()
        names = layer_names(spec, index).values() if matrices else rest_names(spec)
        for name in names:
            plain = name not in matrices
            found[name] = source.tensor(name) if plain else _matrix(source, name, grids)
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
