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

from ridgeline.loader.folder import LFS_MARK, refuse

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 8
MAX_NESTING = 4

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


class _Reader:
    """Takes values off the front of the file, never beyond its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self.at:
            raise ValueError(f"cut off at byte {len(self._data)}")
        self.at += size
        return self._data[self.at - size : self.at]

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
        if kind in _SCALARS:
            form = f"<{count}{_SCALARS[kind][1]}"
            return list(struct.unpack(form, self.take(struct.calcsize(form))))
        return [self.value(kind, depth) for _ in range(count)]


def read_gguf(path: Path) -> GGUFHeader:
    """Metadata and tensor infos of a GGUF file. ConfigError names the file and the reason."""
    return _mapped(path, lambda data: _read(path, data))


def _mapped(path: Path, read: Callable[[mmap.mmap], GGUFHeader]) -> GGUFHeader:
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return read(data)
    except FileNotFoundError:
        refuse(path, "no such file")
    except OSError as error:
        refuse(path, f"cannot be read ({error.strerror})")
    except (
        ValueError,
        struct.error,
        OverflowError,
    ) as error:  # mmap of an empty file is a ValueError
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
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.text()
        if key in metadata:
            raise ValueError(f"key {key[:80]!r} occurs twice")
        metadata[key] = reader.value(reader.number("<I"))
    tensors = tuple(_tensor(reader) for _ in range(num_tensors))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError("general.alignment is not a positive number")
    start = -(-reader.at // alignment) * alignment
    return GGUFHeader(path, version, metadata, tensors, start)


def _tensor(reader: _Reader) -> GGUFTensor:
    name, num_dims = reader.text(), reader.number("<I")
    if num_dims > MAX_DIMS:
        raise ValueError(f"tensor {name[:80]!r} has {num_dims} dimensions")
    shape = tuple(reader.number("<Q") for _ in range(num_dims))
    return GGUFTensor(name, shape[::-1], reader.number("<I"), reader.number("<Q"))
