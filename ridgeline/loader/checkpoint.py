"""Where are the weights, and how do they come into memory without being copied?"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch

from ridgeline.architectures.parts import IGNORED_SUFFIXES
from ridgeline.errors import ConfigError, check
from ridgeline.layers.piece import Piece, TensorSource
from ridgeline.loader.folder import open_file, refuse
from ridgeline.loader.header import ITEM_BYTES, TensorEntry
from ridgeline.loader.shards import find_tensors

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

# What a checkpoint may hold although no architecture asks for it; the last is the output matrix
# beside an embedding that it is tied to.
HARMLESS_EXTRAS = (*IGNORED_SUFFIXES, "lm_head.weight")
START_AGAIN = "start again when nothing writes to it any more"


def _identity(file: Path | int) -> tuple[int, int, int, int]:
    """Which file it is, and in which state."""
    try:
        found = os.stat(file)
    except OSError as error:
        refuse(Path(str(file)), f"cannot be read ({error.strerror})")
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class Checkpoint(TensorSource):
    """The named tensors of a model folder, mapped from disk.

    Tensors are CPU views of the files in the stored dtype: nothing is read before it is used, and
    the pages go back to the system when the last view dies. Writing to one changes a private
    copy, never the file. `finite_only` refuses floating-point tensors with NaN or infinity when
    they are asked for (one pass over bytes that are about to be read anyway).
    """

    chunk_bytes = 64 << 20  # that come out of a mapped file at once

    def __init__(
        self, entries: Mapping[str, tuple[Path, TensorEntry]], *, finite_only: bool = True
    ) -> None:
        self._entries = dict(entries)
        self._maps: dict[Path, mmap.mmap] = {}
        self._found = {path: _identity(path) for path in {path for path, _ in entries.values()}}
        self._finite_only = finite_only
        self._closed = False

    def names(self) -> list[str]:
        """All tensor names, in the order of their data on disk."""
        return sorted(
            self._entries, key=lambda name: (self._entries[name][0], self._entries[name][1].start)
        )

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """The stored dtype in the format's own words: F32, BF16, F8_E4M3, ..."""
        return self._entry(name).dtype

    def file(self, name: str) -> Path:
        self._entry(name)
        return self._entries[name][0]

    def entry(self, name: str) -> TensorEntry:
        """Where in its file the tensor is."""
        return self._entry(name)

    def num_bytes(self, name: str) -> int:
        entry = self._entry(name)
        return entry.end - entry.start

    def total_bytes(self) -> int:
        return sum(self.num_bytes(name) for name in self._entries)

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU, in the stored dtype."""
        return self._checked(name, self._view(name))

    def slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        """Entries start .. start+length-1 along dimension `dim`; the rest is never read."""
        shape = self.shape(name)
        inside = 0 <= dim < len(shape) and start >= 0 and length >= 0
        check(inside and start + length <= shape[dim], "slice outside its tensor", name=name)
        return self._checked(name, self._view(name).narrow(dim, start, length))

    def release(self, name: str) -> None:
        """Give the pages of a tensor back to the system; a view of it reads them again when it is
        used. What was written to a view is lost."""
        entry, mapped = self._entry(name), self._maps.get(self._entries[name][0])
        if mapped is None or entry.start == entry.end:
            return
        begin = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, begin, entry.end - begin)

    @contextmanager
    def bring(self, pieces: Iterable[Piece]) -> Iterator[Iterator[int]]:
        """Some rows are copied out of the mapped file, then its pages go back to the system: at
        most a chunk of it counts as memory of this process, however large its tensors are.
        ConfigError when a tensor holds NaN or infinity, before the piece is reported."""
        yield (self.fill(piece) for piece in pieces)

    def fill(self, piece: Piece) -> int:
        """Copy one piece to where it belongs; the bytes read."""
        name, target = piece.name, piece.target
        shape, wanted = self.shape(name), list(target.shape)
        if piece.dim is not None and len(wanted) == len(shape):
            wanted[piece.dim] = shape[piece.dim]
        check(tuple(wanted) == shape, "a piece fits", name=name, got=shape)
        total = 0
        for values, part in self._chunks(piece):
            part.copy_(values)
            total += values.numel() * values.element_size()
            self.release(name)
        return total

    def _chunks(self, piece: Piece) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is copied at once, and where to; of columns all."""
        name, target = piece.name, piece.target
        if not target.dim():
            yield self.tensor(name), target
            return
        if piece.dim or not target.numel():
            dim = piece.dim or 0
            yield self.slice(name, dim, piece.start, target.shape[dim]), target
            return
        step = max(1, self.chunk_bytes * len(target) // target.nbytes)
        for begin in range(0, len(target), step):
            part = target[begin : begin + step]
            yield self.slice(name, 0, piece.start + begin, len(part)), part

    def close(self) -> None:
        """Let go of the files; views handed out stay good for as long as they live."""
        self._maps.clear()
        self._closed = True

    def _entry(self, name: str) -> TensorEntry:
        found = self._entries.get(name)
        if found is None:
            raise ConfigError(f"the checkpoint has no tensor {name[:80]!r}")
        return found[1]

    def _view(self, name: str) -> torch.Tensor:
        entry = self._entry(name)
        dtype = DTYPES[entry.dtype]
        if entry.start == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        mapped = self._map(self._entries[name][0])
        size = entry.end - entry.start
        raw = torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=entry.start)
        if entry.start % ITEM_BYTES[entry.dtype]:
            raw = raw.clone()  # the format does not promise alignment, the processor wants it
        return raw.view(dtype).view(entry.shape)

    def _map(self, path: Path) -> mmap.mmap:
        check(not self._closed, "checkpoint used after close", path=str(path))
        if path not in self._maps:
            try:
                with open_file(path) as file:
                    if _identity(file.fileno()) != self._found[path]:
                        refuse(path, f"changed while the model was loaded; {START_AGAIN}")
                    # ACCESS_COPY: torch wants a writable buffer; writes stay private to us.
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                refuse(path, f"cannot be mapped into memory ({error})")
        return self._maps[path]

    def _checked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self._finite_only:
            check_finite(name, tensor, self.file(name))
        return tensor


def open_checkpoint(
    folder: Path, *, finite_only: bool = True, written: Sequence[tuple[str, str]] = ()
) -> Checkpoint:
    """The weights of a model folder, one file or many, after a check of every header.

    Takes milliseconds and no memory for the weights themselves. ConfigError names file and reason.
    """
    return Checkpoint(find_tensors(folder, written), finite_only=finite_only)


def check_finite(name: str, tensor: torch.Tensor, path: Path | None = None) -> None:
    """ConfigError when a floating-point tensor (any device) holds NaN or infinity."""
    if (bad := is_damaged(tensor)) is not None and bool(bad):
        refuse_damaged(name, path)


def refuse_damaged(name: str, path: Path | None = None) -> NoReturn:
    where = f"{path}: " if path else ""
    raise ConfigError(f"{where}tensor {name!r} holds NaN or infinity; the weights are damaged")


def is_damaged(tensor: torch.Tensor) -> torch.Tensor | None:
    """One bool where the tensor is: does it hold NaN or infinity? None: it cannot."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return None
    if tensor.dtype == torch.float8_e4m3fn:
        return ((tensor.view(torch.uint8) & 0x7F) == 0x7F).any()
    if tensor.dtype == torch.float8_e5m2:
        return ((tensor.view(torch.uint8) & 0x7C) == 0x7C).any()
    low, high = torch.aminmax(tensor)  # one pass, no temporary, and NaN wins
    return ~(torch.isfinite(low) & torch.isfinite(high))


def check_tensors(
    checkpoint: Checkpoint,
    expected: Mapping[str, tuple[int, ...]],
    folder: Path,
    *,
    optional: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Does the checkpoint hold just what the architecture asks for?

    ConfigError for a tensor that is missing, has another shape than expected, or that nobody
    asked for (a sign that config.json describes another model; a few known leftovers are let
    through).
    """
    names = set(checkpoint.names())
    shapes = {**(optional or {}), **expected}
    missing = [name for name in expected if name not in names]
    if missing:
        raise ConfigError(f"{folder}: the checkpoint lacks {_some(missing)} that config.json needs")
    for name in names & set(shapes):
        if checkpoint.shape(name) != tuple(shapes[name]):
            refuse(
                checkpoint.file(name),
                f"tensor {name[:80]!r} has shape {list(checkpoint.shape(name))}, but config.json "
                f"makes it {list(shapes[name])}",
            )
    extra = [n for n in sorted(names - set(shapes)) if not n.endswith(HARMLESS_EXTRAS)]
    if extra:
        raise ConfigError(
            f"{folder}: the checkpoint holds {_some(extra)} that this architecture does not use; "
            "config.json and weights do not belong together, or the architecture is read wrongly"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name[:120]) for name in names[:3])
    kind = "tensor" if len(names) == 1 else "tensors"
    return f"{kind} {shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class CheckpointSource(TensorSource):
    """A checkpoint that is read in another way."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def names(self) -> list[str]:
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def tensor(self, name: str) -> torch.Tensor:
        return self._checkpoint.tensor(name)

    def slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        return self._checkpoint.slice(name, dim, start, length)
