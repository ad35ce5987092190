"""How do weights come into the memory of a CPU without their file staying there too?

Some rows are copied out of the mapped file, then its pages go back to the system: at most a chunk
of it counts as memory of this process, however large its tensors are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ridgeline.errors import check
from ridgeline.layers.piece import Piece
from ridgeline.loader.checkpoint import Checkpoint

CHUNK_BYTES = 64 << 20


class MappedSource:
    """A checkpoint for tensors on the CPU. A TensorSource that BringsPieces."""

    def __init__(self, checkpoint: Checkpoint, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._checkpoint = checkpoint
        self._chunk_bytes = chunk_bytes

    def names(self) -> list[str]:
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def tensor(self, name: str) -> torch.Tensor:
        return self._checkpoint.tensor(name)

    def slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        return self._checkpoint.slice(name, dim, start, length)

    @contextmanager
    def bring(self, pieces: Iterable[Piece]) -> Iterator[Iterator[int]]:
        """ConfigError when a tensor holds NaN or infinity, before the piece is reported."""
        yield (self._fill(piece) for piece in pieces)

    def _fill(self, piece: Piece) -> int:
        name, target = piece.name, piece.target
        shape, wanted = self._checkpoint.shape(name), list(target.shape)
        if piece.dim is not None and len(wanted) == len(shape):
            wanted[piece.dim] = shape[piece.dim]
        check(tuple(wanted) == shape, "a piece fits", name=name, got=shape)
        total = 0
        for values, part in self._parts(piece):
            part.copy_(values)
            total += values.numel() * values.element_size()
            self._checkpoint.release(name)
        return total

    def _parts(self, piece: Piece) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is copied at once, and where to; of columns all."""
        name, target = piece.name, piece.target
        if not target.dim():
            yield self._checkpoint.tensor(name), target
            return
        if piece.dim or not target.numel():
            dim = piece.dim or 0
            yield self._checkpoint.slice(name, dim, piece.start, target.shape[dim]), target
            return
        step = max(1, self._chunk_bytes * len(target) // target.nbytes)
        for begin in range(0, len(target), step):
            part = target[begin : begin + step]
            yield self._checkpoint.slice(name, 0, piece.start + begin, len(part)), part
