"""Which files hold a model's weights, and do they belong together?"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ridgeline.architectures.config_reader import MAX_TENSORS
from ridgeline.loader.folder import GET_AGAIN, check_folder, open_file, read_object, refuse
from ridgeline.loader.header import MAX_HEADER_BYTES, TensorEntry, read_header
from ridgeline.log import say

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARDS = 1024
MAX_NAME = 255  # characters; file systems take no more bytes

Located = tuple[Path, TensorEntry]


def find_tensors(folder: Path, written: Sequence[tuple[str, str]] = ()) -> dict[str, Located]:
    """Every tensor of a model folder and the file that holds it, all headers checked. `written`:
    see ModelSpec."""
    return {_renamed(name, written): where for name, where in _find(folder).items()}


def _renamed(name: str, written: Sequence[tuple[str, str]]) -> str:
    found = next((pair for pair in written if name.startswith(pair[0])), None)
    return name if found is None else found[1] + name.removeprefix(found[0])


def _find(folder: Path) -> dict[str, Located]:
    check_folder(folder)
    if os.path.lexists(folder / SINGLE_FILE):
        path = _inside(folder, SINGLE_FILE)
        entries = {name: (path, entry) for name, entry in read_header(path).items()}
        if not entries:
            refuse(path, "holds no tensors")
        return entries
    if os.path.lexists(folder / INDEX_FILE):
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
    if len(weight_map) > MAX_TENSORS:
        size = len(weight_map)
        refuse(index, f"lists {size} tensors; at most {MAX_TENSORS} are read: {GET_AGAIN}")
    for name in weight_map.values():
        if not isinstance(name, str) or not _is_plain(name):
            refuse(index, f"names {str(name)[:80]!r}; a shard is a .safetensors file beside it")
    if (shards := len(set(weight_map.values()))) > MAX_SHARDS:
        refuse(index, f"names {shards} shards; at most {MAX_SHARDS} are read: {GET_AGAIN}")
    return weight_map


def shard_names(index: Path) -> list[str]:
    """The files that an index names. ConfigError when the index is broken."""
    return sorted(set(_read_index(index).values()))


def _sharded(folder: Path, index: Path) -> dict[str, Located]:
    weight_map = _read_index(index)
    shards: dict[str, tuple[Path, dict[str, TensorEntry]]] = {}
    left = MAX_HEADER_BYTES
    for name in sorted(set(weight_map.values())):
        path, header = shards[name] = _open_shard(folder, name, left)
        left -= min((entry.start for entry in header.values()), default=path.stat().st_size)
    entries: dict[str, Located] = {}
    for name, shard in weight_map.items():
        path, header = shards[shard]
        if name not in header:
            elsewhere = [other for other, (_, tensors) in shards.items() if name in tensors]
            where = f"it is in {elsewhere[0]}" if elsewhere else "it is in no shard"
            refuse(index, f"lists tensor {name[:80]!r} in {shard}, but {where}")
        entries[name] = (path, header[name])
    _check_unlisted(shards, entries)
    return entries


def _open_shard(folder: Path, name: str, limit: int) -> tuple[Path, dict[str, TensorEntry]]:
    path = folder / name
    if not os.path.lexists(path):
        refuse(path, f"missing, although {INDEX_FILE} names it; download the model again")
    path = _inside(folder, name)
    return path, read_header(path, limit)


def _is_plain(name: str) -> bool:
    unsafe = any(char in "/\\:" for char in name) or not name.isprintable()
    right = name.endswith(".safetensors") and len(name) <= MAX_NAME
    return right and not unsafe and not name.startswith(".")


def _inside(folder: Path, name: str) -> Path:
    """The file with links followed, when that does not lead out of the model.

    A snapshot in the hub's cache consists of links to files elsewhere in that cache.
    """
    path = folder / name
    open_file(path).close()
    real, home = path.resolve(), folder.resolve()
    if home.parent.name == "snapshots" and home.parent.parent.name.startswith("models--"):
        home = home.parents[2]
    if not real.is_relative_to(home):
        refuse(path, "is a link that leads out of the model's folder; put the file there")
    return real


def _check_unlisted(
    shards: Mapping[str, tuple[Path, Mapping[str, TensorEntry]]], entries: Mapping[str, Located]
) -> None:
    seen: dict[str, str] = {}
    for shard, (path, header) in shards.items():
        for name in header:
            if name in seen:
                refuse(path, f"tensor {name[:80]!r} is also in {seen[name]}")
            seen[name] = shard
    unlisted = sum(name not in entries for name in seen)
    if unlisted:
        say(logger, logging.WARNING, "shards hold tensors the index does not list", num=unlisted)
