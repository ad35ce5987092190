"""What does a GGUF file say about itself: its metadata, and where its tensors are?

The format: magic, version, counts, then metadata (key, type, value) and tensor infos, then the
aligned data. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md . Only the part
before the data is read.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.architectures.config_reader import MAX_TENSORS
from ridgeline.loader.folder import GET_AGAIN, LFS_MARK, open_file, refuse

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 8
MAX_NESTING = 4
MAX_KEYS = 1 << 16
# Of all arrays of a file. A vocabulary of 500,000 tokens with its merges is below both; lists in
# memory take many times their bytes in a file.
MAX_ITEMS = 1 << 21
MAX_HEADER_BYTES = 64 << 20

_SCALARS: Mapping[int, str] = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """`shape` is as in PyTorch (slowest dimension first); `offset` counts from `data_start`."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: tuple[GGUFTensor, ...]
    data_start: int
    num_bytes: int  # of the file
    alignment: int = DEFAULT_ALIGNMENT


class _Reader:
    """Takes values off the front of the file, never beyond its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._end = min(len(data), MAX_HEADER_BYTES)
        self._items = 0
        self.at = 0

    def take(self, size: int) -> bytes:
        if size > self._end - self.at:
            raise self._ended()
        self.at += size
        return self._data[self.at - size : self.at]

    def _ended(self) -> ValueError:
        if len(self._data) > self._end:
            return ValueError(f"more than {MAX_HEADER_BYTES} bytes of metadata: {GET_AGAIN}")
        return ValueError(f"cut off at byte {self._end}")

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(depth + 1)
        if kind not in _SCALARS:
            raise ValueError(f"metadata of unknown type {kind}")
        return self.number(_SCALARS[kind])

    def _array(self, depth: int) -> list[Any]:
        kind, count = self.number("<I"), self.number("<Q")
        if depth > MAX_NESTING:
            raise ValueError("arrays nested too deeply")
        if count > len(self._data) - self.at:  # every element takes at least a byte
            raise ValueError(f"an array of {count} elements in a file of {len(self._data)} bytes")
        self._items += count
        if self._items > MAX_ITEMS:
            raise ValueError(f"arrays of more than {MAX_ITEMS} elements together: {GET_AGAIN}")
        if kind in _SCALARS:
            form = f"<{count}{_SCALARS[kind][1]}"
            return list(struct.unpack(form, self.take(struct.calcsize(form))))
        if kind == _STRING:
            return self._texts(count)
        return [self.value(kind, depth) for _ in range(count)]

    def _texts(self, count: int) -> list[str]:
        """As `text`, in one loop: a vocabulary has some 10^5 of them."""
        data, size, at = self._data, self._end, self.at
        found: list[str] = []
        for _ in range(count):
            begin = at + _LENGTH.size
            end = begin + _LENGTH.unpack_from(data, at)[0] if begin <= size else size + 1
            if end > size:
                raise self._ended()
            found.append(data[begin:end].decode("utf-8", errors="replace"))
            at = end
        self.at = at
        return found


def is_gguf(path: Path) -> bool:
    """A file that calls itself GGUF, by its name or by its first bytes (no damage is seen here)."""
    try:
        if not path.is_file():
            return False
        if path.suffix.lower() == ".gguf":
            return True
        with open_file(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        refuse(path, f"cannot be read ({error.strerror})")


def read_gguf(path: Path) -> GGUFHeader:
    """Metadata and tensor infos of a GGUF file. ConfigError names the file and the reason."""
    return _mapped(path, lambda data: _read(path, data))


def _mapped(path: Path, read: Callable[[mmap.mmap], GGUFHeader]) -> GGUFHeader:
    try:
        with open_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read(data)
    except OSError as error:
        refuse(path, f"cannot be read ({error.strerror})")
    except (ValueError, struct.error, OverflowError) as error:  # ValueError: mmap of an empty file
        refuse(path, f"is no readable GGUF file ({error})")


def _read(path: Path, data: mmap.mmap) -> GGUFHeader:
    reader = _Reader(data)
    if data[: len(LFS_MARK)] == LFS_MARK:
        raise ValueError("it is a Git LFS pointer")
    if reader.take(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = reader.number("<I")
    if version not in VERSIONS:
        raise ValueError(f"version {version}; readable are {VERSIONS}")
    num_tensors, num_values = reader.number("<Q"), reader.number("<Q")
    for count, most, what in (
        (num_tensors, MAX_TENSORS, "tensors"),
        (num_values, MAX_KEYS, "keys"),
    ):
        if count > most:
            raise ValueError(f"{count} {what}; at most {most} are read: {GET_AGAIN}")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.text()
        if key in metadata:
            raise ValueError(f"key {key[:80]!r} occurs twice")
        metadata[key] = reader.value(reader.number("<I"))
    tensors = _tensors(reader, num_tensors)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise ValueError("general.alignment is not a positive number")
    start = -(-reader.at // alignment) * alignment
    return GGUFHeader(path, version, metadata, tensors, start, len(data), alignment)


def _tensors(reader: _Reader, count: int) -> tuple[GGUFTensor, ...]:
    found: dict[str, GGUFTensor] = {}
    for _ in range(count):
        tensor = _tensor(reader)
        if tensor.name in found:
            raise ValueError(f"tensor {tensor.name[:80]!r} occurs twice")
        found[tensor.name] = tensor
    return tuple(found.values())


def _tensor(reader: _Reader) -> GGUFTensor:
    name, num_dims = reader.text(), reader.number("<I")
    if num_dims > MAX_DIMS:
        raise ValueError(f"tensor {name[:80]!r} has {num_dims} dimensions")
    shape = tuple(reader.number("<Q") for _ in range(num_dims))
    return GGUFTensor(name, shape[::-1], reader.number("<I"), reader.number("<Q"))
