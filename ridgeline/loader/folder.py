"""Which JSON files does a model folder hold, and are they what they claim to be?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

from ridgeline.errors import ConfigError

MAX_JSON_BYTES = 64 << 20  # an index of 10^6 tensors has about this size; configs have kilobytes
LFS_MARK = b"version https://git-lfs.github.com/spec/"


def refuse(path: Path, reason: str) -> NoReturn:
    raise ConfigError(f"{path}: {reason}")


def refuse_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """For json's `object_pairs_hook`: two values for one key means nobody knows which counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice[:80]!r} occurs twice")
    return found


def parse_object(data: bytes, path: Path, what: str = "file") -> dict[str, object]:
    """The JSON object that `data` spells. ConfigError when it is anything else."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=refuse_duplicates)
    except RecursionError:
        refuse(path, f"{what} is nested too deeply to be what it should be")
    except ValueError as error:  # broken JSON, broken UTF-8, duplicate keys, absurd numbers
        refuse(path, f"{what} is not valid JSON ({error})")
    if not isinstance(value, dict):
        refuse(path, f"{what} holds a JSON {type(value).__name__}, not an object")
    return value


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """The file's content. ConfigError when it is missing, empty, too large or an LFS pointer."""
    try:
        if not path.is_file():
            refuse(path, "no such file")
        if path.stat().st_size > limit:
            refuse(path, f"is {path.stat().st_size} bytes long; at most {limit} make sense here")
        data = path.read_bytes()
    except OSError as error:
        refuse(path, f"cannot be read ({error.strerror})")
    if not data:
        refuse(path, "is empty")
    if data.startswith(LFS_MARK):
        refuse(path, "is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder")
    return data


def read_object(path: Path) -> dict[str, object]:
    """The JSON object in the file at `path`. ConfigError names the file and what is wrong."""
    return parse_object(read_bytes(path), path)


def check_folder(folder: Path) -> None:
    if not folder.exists():
        refuse(folder, "folder not found")
    if not folder.is_dir():
        if folder.suffix.lower() == ".gguf":
            refuse(folder, "is a GGUF file; this needs a folder with config.json and safetensors")
        refuse(folder, "is a file; give the folder with config.json and weights, or a .gguf file")


def read_config(folder: Path) -> dict[str, object]:
    """`config.json` of a model folder. ConfigError when it is missing or not a JSON object."""
    check_folder(folder)
    path = folder / "config.json"
    if not path.exists():
        if found := sorted(folder.glob("*.gguf")):
            refuse(path, f"missing; to serve a GGUF file name the file itself, {found[0]}")
        refuse(path, "missing; a model folder needs config.json beside its weights")
    return read_object(path)


def read_generation_config(folder: Path) -> dict[str, object]:
    """`generation_config.json`, or an empty object when the model has none."""
    path = folder / "generation_config.json"
    return read_object(path) if path.exists() else {}
