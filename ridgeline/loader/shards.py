"""Which files hold a model's weights, and do they belong together?"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from ridgeline.loader.folder import check_folder, read_object, refuse
from ridgeline.loader.header import TensorEntry, read_header
from ridgeline.log import say

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Located = tuple[Path, TensorEntry]


def find_tensors(folder: Path) -> dict[str, Located]:
    """Every tensor of a model folder and the file that holds it, all headers checked."""
    check_folder(folder)
    single = folder / SINGLE_FILE
    if single.exists() or single.is_symlink():
        path = _inside(folder, SINGLE_FILE)
        entries = {name: (path, entry) for name, entry in read_header(path).items()}
        if not entries:
            refuse(path, "holds no tensors")
        return entries
    if (folder / INDEX_FILE).exists():
        return _sharded(folder, folder / INDEX_FILE)
    refuse(folder, _why_no_weights(folder))


def _why_no_weights(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    tensors = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if tensors:
        return f"has {tensors[0]} but neither {SINGLE_FILE} nor {INDEX_FILE}"
    if found := [name for name in names if name.endswith(".gguf")]:
        return f"holds no safetensors; to serve a GGUF file name the file itself, {found[0]}"
    if pickles:
        return f"has only pickled weights ({pickles[0]}); a pickle can run code, give safetensors"
    return f"holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}"


def _read_index(index: Path) -> dict[str, str]:
    """Tensor name to the name of its shard, a plain file name."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        refuse(index, "weight_map is missing, empty or no object")
    for name in weight_map.values():
        if not isinstance(name, str) or not _is_plain(name):
            refuse(index, f"names {str(name)[:80]!r}; a shard is a .safetensors file beside it")
    return weight_map


def shard_names(index: Path) -> list[str]:
    """The files that an index names. ConfigError when the index is broken."""
    return sorted(set(_read_index(index).values()))


def _sharded(folder: Path, index: Path) -> dict[str, Located]:
    weight_map = _read_index(index)
    shards = {name: _open_shard(folder, name) for name in sorted(set(weight_map.values()))}
    entries: dict[str, Located] = {}
    for name, shard in weight_map.items():
        path, header = shards[shard]
        if name not in header:
            elsewhere = [other for other, (_, tensors) in shards.items() if name in tensors]
            where = f"it is in {elsewhere[0]}" if elsewhere else "it is in no shard"
            refuse(index, f"lists tensor {name!r} in {shard}, but {where}")
        entries[name] = (path, header[name])
    _check_unlisted(shards, entries)
    return entries


def _open_shard(folder: Path, name: str) -> tuple[Path, dict[str, TensorEntry]]:
    path = folder / name
    if not path.exists() and not path.is_symlink():
        refuse(path, f"missing, although {INDEX_FILE} names it; download the model again")
    path = _inside(folder, name)
    return path, read_header(path)


def _is_plain(name: str) -> bool:
    unsafe = any(char in "/\\:" or ord(char) < 32 for char in name)
    return name.endswith(".safetensors") and not unsafe and not name.startswith(".")


def _inside(folder: Path, name: str) -> Path:
    """The file with links followed, when that does not lead out of the model.

    A snapshot in the hub's cache consists of links to files elsewhere in that cache.
    """
    path = folder / name
    real, home = path.resolve(), folder.resolve()
    if home.parent.name == "snapshots" and home.parent.parent.name.startswith("models--"):
        home = home.parents[2]
    if not real.is_relative_to(home):
        refuse(folder / name, "is a link that leads out of the model's folder; put the file there")
    if not real.is_file():
        refuse(folder / name, "is a link to nothing" if path.is_symlink() else "is not a file")
    return real


def _check_unlisted(
    shards: Mapping[str, tuple[Path, Mapping[str, TensorEntry]]],
    entries: Mapping[str, Located],
) -> None:
    seen: dict[str, str] = {}
    for shard, (path, header) in shards.items():
        for name in header:
            if name in seen:
                refuse(path, f"tensor {name!r} is also in {seen[name]}")
            seen[name] = shard
    unlisted = sum(name not in entries for name in seen)
    if unlisted:
        say(logger, logging.WARNING, "shards hold tensors the index does not list", num=unlisted)
