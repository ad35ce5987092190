"""Where does each checkpoint tensor go? Loading is one loop over these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ridgeline.errors import check


@dataclass(frozen=True, slots=True)
class Piece:
    """Entries [start, start + length) of dimension `dim` of checkpoint tensor `name` are copied
    into `target`, a view of a parameter. `dim` None: the whole tensor."""

    name: str
    target: torch.Tensor
    dim: int | None = None
    start: int = 0


class TensorSource(Protocol):
    """Named tensors: a checkpoint, or random numbers."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> torch.Tensor: ...

    def slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor: ...


def fill(piece: Piece, source: TensorSource) -> int:
    """Copy one piece, cast to the parameter's dtype; the bytes read."""
    target = piece.target
    if piece.dim is None:
        values = source.tensor(piece.name)
    else:
        values = source.slice(piece.name, piece.dim, piece.start, target.shape[piece.dim])
    check(values.shape == target.shape, "a piece fits", name=piece.name, got=tuple(values.shape))
    target.copy_(values)
    return values.numel() * values.element_size()
