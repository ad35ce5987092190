"""Which share of the model does this process hold? Tensor parallelism as one small object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ridgeline.errors import ConfigError, check


class Collective(ABC):
    """What ranks say to each other. Every rank calls the same methods in the same order. The ways
    to talk are the lines of `ridgeline.distributed.collectives`."""

    captures = False  # its calls may be part of a captured step

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, with the same bits on every rank; may write into `x`."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks (same shape), in rank order."""

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Rank `source`'s tensor, on every rank; may write into `x`."""
        return self.all_gather(x)[source]

    def send(self, x: torch.Tensor, to: int) -> None:
        """To one rank, which calls `recv`; `x` may be written to when this returns."""
        check(False, "these ranks only talk all together", collective=type(self).__name__, to=to)

    def recv(self, into: torch.Tensor, source: int) -> None:
        """What rank `source` sends, of the same shape and dtype."""
        check(False, "these ranks only talk all together", collective=type(self).__name__)

    def close(self) -> None:  # noqa: B027  (most have nothing to end)
        """Nothing is said any more; what another rank still waits for fails."""


@dataclass(frozen=True, slots=True)
class Shard:
    """`length` of a dimension's entries from `start` on."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Placement:
    rank: int = 0
    size: int = 1
    collective: Collective | None = None

    def __post_init__(self) -> None:
        check(0 <= self.rank < self.size, "rank lies inside size", rank=self.rank, size=self.size)
        check(self.size == 1 or self.collective is not None, "more than one rank can talk")

    def shard(self, total: int, what: str) -> Shard:
        """This rank's equal share of `total`; ConfigError names `what` if it does not divide."""
        if total % self.size:
            raise ConfigError(
                f"{what} ({total}) cannot be split over {self.size} ranks; use a divisor of it"
            )
        return Shard(self.rank * (total // self.size), total // self.size)

    def shard_heads(self, num_kv_heads: int) -> Shard:
        """This rank's KV heads: a share, or one head held by several ranks."""
        if self.size <= num_kv_heads:
            return self.shard(num_kv_heads, "num_key_value_heads")
        if self.size % num_kv_heads:
            raise ConfigError(
                f"{self.size} ranks cannot share {num_kv_heads} KV heads evenly; use a multiple"
            )
        return Shard(self.rank // (self.size // num_kv_heads), 1)

    def shard_rows(self, total: int) -> Shard:
        """A share of ceil(total / size) rows, shorter or empty at the end."""
        rows = -(-total // self.size)
        start = min(self.rank * rows, total)
        return Shard(start, min(rows, total - start))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.collective is None else self.collective.all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x] if self.collective is None else self.collective.all_gather(x)
