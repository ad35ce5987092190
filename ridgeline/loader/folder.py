"""Which JSON files does a model folder hold, and are they what they claim to be?"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import BinaryIO, NoReturn

from ridgeline.errors import ConfigError

MAX_JSON_BYTES = 32 << 20  # an index of MAX_TENSORS has about half of it; configs have kilobytes
MAX_VALUES = 1 << 19  # of one file: 65,000 tensors; in memory each takes up to 300 bytes
KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
GET_AGAIN = "it is damaged or no model: get it again from where it came"
LFS_MARK = b"version https://git-lfs.github.com/spec/"


def refuse(path: Path, reason: str) -> NoReturn:
    raise ConfigError(f"{path}: {reason}")


def refuse_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """For json's `object_pairs_hook`: two values for one key means nobody knows which counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"key {twice[:80]!r} occurs twice")
    return found


def parse_object(
    data: bytes, path: Path, what: str = "file", *, most: int = MAX_VALUES
) -> dict[str, object]:
    """The JSON object that `data` spells. ConfigError when it is anything else, or when it has more
    than about `most` values."""
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > most:
        refuse(path, f"{what} holds about {values} values; at most {most} are read: {GET_AGAIN}")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=refuse_duplicates)
    except RecursionError:
        refuse(path, f"{what} is nested too deeply to be what it should be")
    except ValueError as error:  # broken JSON, broken UTF-8, duplicate keys, absurd numbers
        refuse(path, f"{what} is not valid JSON ({error})")
    if not isinstance(value, dict):
        refuse(path, f"{what} holds a JSON {type(value).__name__}, not an object")
    return value


def open_file(path: Path) -> BinaryIO:
    """The file at `path`, for reading. ConfigError for anything that is no regular file; it never
    waits for who writes to a FIFO."""
    try:
        _check_kind(path, path.stat().st_mode)  # what opening a device does, nobody knows
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
        _check_kind(path, os.fstat(file.fileno()).st_mode)
    except FileNotFoundError:
        refuse(path, "is a link to nothing" if path.is_symlink() else "no such file")
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        if isinstance(error, OSError) and error.errno == errno.ELOOP:
            refuse(path, "is a link in a loop of links; put the file there")
        refuse(path, f"cannot be read ({getattr(error, 'strerror', None) or error})")
    return file


def _check_kind(path: Path, mode: int) -> None:
    for is_kind, what in KINDS:
        if is_kind(mode):
            refuse(path, f"is {what}, not a file")


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """The file's content. ConfigError when it is missing, empty, too large or an LFS pointer."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            refuse(path, f"is {size} bytes long; at most {limit} make sense here")
        try:
            data = file.read(limit)
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


def read_optional(path: Path) -> dict[str, object]:
    """As `read_object`; an empty object where no file of that name is."""
    return read_object(path) if os.path.lexists(path) else {}


def check_folder(folder: Path) -> None:
    if not os.path.lexists(folder):
        refuse(folder, "folder not found")
    if not folder.is_dir():
        open_file(folder).close()
        if folder.suffix.lower() == ".gguf":
            refuse(folder, "is a GGUF file; this needs a folder with config.json and safetensors")
        refuse(folder, "is a file; give the folder with config.json and weights, or a .gguf file")


def read_config(folder: Path) -> dict[str, object]:
    """`config.json` of a model folder. ConfigError when it is missing or not a JSON object."""
    check_folder(folder)
    path = folder / "config.json"
    if not os.path.lexists(path):
        if not os.access(folder, os.R_OK | os.X_OK):
            refuse(folder, "cannot be read (Permission denied)")
        if found := sorted(folder.glob("*.gguf")):
            refuse(path, f"missing; to serve a GGUF file name the file itself, {found[0]}")
        refuse(path, "missing; a model folder needs config.json beside its weights")
    return read_object(path)


def read_generation_config(folder: Path) -> dict[str, object]:
    """`generation_config.json`, or an empty object when the model has none."""
    return read_optional(folder / "generation_config.json")
