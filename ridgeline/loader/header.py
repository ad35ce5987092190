"""What does a safetensors file hold, and can every byte of it be where its header says?

The format: 8 bytes little-endian length N, N bytes of JSON (name -> dtype, shape, data_offsets
relative to the end of the header, and `__metadata__`), then the data without holes. Source:
https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ridgeline.loader.folder import GET_AGAIN, LFS_MARK, open_file, parse_object, refuse

MAX_HEADER_BYTES = 40 << 20  # of all files of a model; 208,000 tensors take about 30 MB
MAX_DIMS = 16
MAX_COUNT = 1 << 60  # of a size or an offset

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}

OTHER_FORMATS = (
    (LFS_MARK, "a Git LFS pointer, not the weights; run `git lfs pull` in its folder"),
    (b"PK\x03\x04", "a zip archive (a PyTorch pickle?), not safetensors"),
    (b"\x80\x02", "a Python pickle, not safetensors; pickles are never opened"),
    (b"GGUF", "a GGUF file, not safetensors; name the file itself, not its folder"),
    (b"\x89HDF", "an HDF5 file, not safetensors"),
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: its data are the bytes start .. end-1 of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path, limit: int = MAX_HEADER_BYTES) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, checked against its size, without touching the data.

    Takes milliseconds and no memory beyond the header, which has at most `limit` bytes.
    ConfigError names file and reason.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = _header_length(path, file.read(64), size, limit)
            file.seek(8)
            raw = file.read(length)
    except OSError as error:
        refuse(path, f"cannot be read ({error.strerror})")
    if len(raw) != length:
        refuse(path, f"is cut off: its header should have {length} bytes, {len(raw)} are there")
    if not raw.startswith(b"{"):
        _refuse_head(path, length.to_bytes(8, "little") + raw[:56], "its header is no JSON object")
    return _entries(path, parse_object(raw, path, "header"), 8 + length, size)


def _header_length(path: Path, head: bytes, size: int, limit: int) -> int:
    if size == 0:
        refuse(path, "is empty")
    if size < 8:
        refuse(path, f"is cut off: {size} bytes, a safetensors file has at least 8")
    length = int.from_bytes(head[:8], "little")
    if length > limit:
        left = "" if limit == MAX_HEADER_BYTES else f" {limit} bytes beside the other files, and"
        most = f"read are{left} at most {MAX_HEADER_BYTES} for a model"
        _refuse_head(path, head, f"claims a header of {length} bytes; {most}: {GET_AGAIN}")
    if 8 + length > size:
        _refuse_head(
            path, head, f"is cut off: header of {length} bytes announced, file has {size} bytes"
        )
    return length


def _refuse_head(path: Path, head: bytes, reason: str) -> NoReturn:
    """Say what the file is instead, when its first bytes tell."""
    for mark, what in OTHER_FORMATS:
        if head.startswith(mark):
            refuse(path, f"is {what}")
    refuse(path, reason)


def _entries(
    path: Path, header: dict[str, object], data_start: int, size: int
) -> dict[str, TensorEntry]:
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not _are_texts(metadata):
        refuse(path, "__metadata__ in the header is no object of texts")
    entries = {name: _entry(path, name, value, data_start) for name, value in header.items()}
    _check_tiling(path, entries, data_start, size)
    return entries


def _entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    what = f"tensor {name[:80]!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        refuse(path, f"{what} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        known = ", ".join(ITEM_BYTES)
        refuse(path, f"{what} has dtype {str(dtype)[:40]!r}; readable are {known}")
    if not _are_counts(shape) or len(shape) > MAX_DIMS:
        refuse(path, f"{what} has a shape that is no list of at most {MAX_DIMS} sizes")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(path, f"{what} has data_offsets that are no pair start <= end")
    start, end = offsets
    if end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        refuse(
            path,
            f"{what} of dtype {dtype} and shape {_short(shape)} does not have the "
            f"{end - start} bytes its data_offsets give it",
        )
    return TensorEntry(name, dtype, tuple(shape), data_start + start, data_start + end)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= MAX_COUNT for item in value
    )


def _are_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _short(shape: list[int]) -> str:
    return str(shape)[:80]


def _check_tiling(path: Path, entries: dict[str, TensorEntry], data_start: int, size: int) -> None:
    """The tensors must cover the data once: no overlap, no hole, nothing missing or left over."""
    here = data_start
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.end)):
        if entry.start != here:
            what = "overlaps the one before it" if entry.start < here else "leaves a hole before it"
            refuse(
                path, f"tensor {entry.name[:80]!r} {what} (data offset {entry.start - data_start})"
            )
        here = entry.end
    if here > size:
        refuse(path, f"is cut off: {here} bytes announced, {size} are there")
    if here < size:
        refuse(path, f"has {size - here} bytes that belong to no tensor")
