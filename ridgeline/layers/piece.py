"""Where does each checkpoint tensor go? Loading is one loop over these."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from ridgeline.distributed.placement import Shard
from ridgeline.errors import check
from ridgeline.quantization.contract import Piece as Piece

STD = 0.02  # what Transformers calls initializer_range


class TensorSource(ABC):
    """Named tensors: a checkpoint, or random numbers."""

    @abstractmethod
    def names(self) -> list[str]: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor: ...

    @abstractmethod
    def slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor: ...

    @contextmanager
    def bring(self, pieces: Iterable[Piece]) -> Iterator[Iterator[int]]:
        """Yields the bytes read of each piece, in the order asked for, when it is in place for
        all that the caller tells the device from then on. `pieces` is read a little ahead, and
        none is held for longer than it takes. Leaving the context ends every transfer and raises
        ConfigError when what came is damaged. Here: one piece after the other."""
        yield (fill(piece, self) for piece in pieces)


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


class Vector:
    """A rank's share of a list of numbers, in float32, or of a table of `columns`."""

    def __init__(
        self,
        name: str,
        share: Shard,
        device: torch.device,
        columns: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.values = torch.empty(share.length, *columns, dtype=dtype, device=device)
        self.share = share
        self.name = name

    def tensors(self) -> list[torch.Tensor]:
        return [self.values]

    def kept(self) -> dict[str, torch.Tensor]:
        """What a later start `adopt`s."""
        return {"values": self.values}

    def adopt(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Be as the vector that kept this."""
        self.values.copy_(kept["values"])

    def finish(self) -> None:
        """Nothing is left to do when the numbers are in place."""

    def pieces(self) -> list[Piece]:
        return [Piece(self.name, self.values, 0, self.share.start)]


class RandomSource(TensorSource):
    """Normal numbers of standard deviation 0.02, made on the device; norms are one, biases zero.

    A tensor depends on its name and the seed alone, so every sharding reads the same model.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shapes = shapes
        self._seed = seed
        self._dtype = dtype
        self._device = device

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str) -> torch.Tensor:
        values = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        if name.endswith(".bias"):
            return values.zero_()
        if values.dim() == 1:
            return values.fill_(1.0)
        if self._device.type == "meta":
            return values
        generator = torch.Generator(self._device)
        generator.manual_seed(zlib.crc32(name.encode(), self._seed & 0xFFFFFFFF))
        return values.normal_(0.0, STD, generator=generator)

    def slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        return self.tensor(name).narrow(dim, start, length)
