"""Which share of the model does this process hold? Tensor parallelism as one small object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ridgeline.architectures.shares import Shard as Shard
from ridgeline.architectures.shares import fitting, kv_shard, query_shard, shard
from ridgeline.errors import ConfigError, check
from ridgeline.kernels.rms_norm import add_norm

if TYPE_CHECKING:
    from ridgeline.distributed.pipeline import Pipeline
    from ridgeline.distributed.wave import Wave


class Collective(ABC):
    """What ranks say to each other. Every rank calls the same methods in the same order. The ways
    to talk are the lines of `ridgeline.distributed.collectives`."""

    captures = False  # its calls may be part of a captured step
    fuses_norms = False  # it is one kernel for sums that are normed
    devices: tuple[str, ...] = "cpu", "cuda"  # where what it adds up may be

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, with the same bits on every rank; may write into `x`."""

    def all_reduce_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """[T, E], the RMS norm of the residual with the sum over ranks, which the residual
        becomes; may write into `x_TE`."""
        return add_norm(self.all_reduce(x_TE), residual_TE, weight_E, eps)

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks (same shape), in rank order."""

    def gather_columns(self, x_TC: torch.Tensor, out_TN: torch.Tensor) -> None:
        """Those of all ranks side by side, in rank order; what is more than N is left out."""
        every_TN = torch.cat(self.all_gather(x_TC), dim=-1)
        out_TN.copy_(every_TN[:, : out_TN.shape[1]])

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Rank `source`'s tensor, on every rank; may write into `x`."""
        return self.all_gather(x)[source]

    def send(self, x: torch.Tensor, to: int) -> None:
        """To one rank, which calls `recv`; `x` may be written to when this returns."""
        check(False, "these ranks only talk all together", collective=type(self).__name__, to=to)

    def post(self, x: torch.Tensor, to: int) -> Callable[[], None]:
        """`send` that does not wait: `x` must stay as it is until what is returned has been called,
        which waits until it has gone."""
        self.send(x, to)
        return lambda: None

    def recv(self, into: torch.Tensor, source: int) -> None:
        """What rank `source` sends, of the same shape and dtype."""
        check(False, "these ranks only talk all together", collective=type(self).__name__)

    def abandon(self) -> None:  # noqa: B027  (most see by themselves that a rank has ended)
        """From any thread, when a rank has ended: what waits for it on the device does so no
        longer."""

    def waited_s(self) -> float | None:
        """Seconds that this rank has waited for others, where the way to talk counts them (so those
        of captured steps are among them); None: what each call takes is measured from outside."""
        return None

    def close(self) -> None:  # noqa: B027  (most have nothing to end)
        """Nothing is said any more; what another rank still waits for fails."""


class Partial(Collective):
    """Leaves every sum as it is on each rank: who asked for it sums later."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        check(False, "partial sums are not gathered")
        return [x]


@dataclass(frozen=True, slots=True)
class Placement:
    """`ep` groups of the ranks divide the experts of a layer; those within a group divide each.
    With a `pipeline` all of them are one of its stages; with a `wave` they are one of several
    groups that attend for tokens of their own, and experts are divided among the ranks of all."""

    rank: int = 0
    size: int = 1
    collective: Collective | None = None
    ep: int = 1
    pipeline: Pipeline | None = None
    wave: Wave | None = None

    def __post_init__(self) -> None:
        check(0 <= self.rank < self.size, "rank lies inside size", rank=self.rank, size=self.size)
        check(self.size == 1 or self.collective is not None, "more than one rank can talk")
        size = self.for_experts.size
        check(size % self.ep == 0, "groups for experts are alike", ep=self.ep, size=size)

    def shard(self, total: int, what: str, unit: int = 1) -> Shard:
        """This rank's share of `total`, whole units of it if there are enough. ConfigError names
        `what` if there are more ranks than that."""
        if total < self.size:
            raise ConfigError(
                f"{what} ({total}) cannot be divided among {self.size} ranks; use at most {total}"
            )
        return shard(total, self.rank, self.size, fitting(total, self.size, unit))

    def shard_heads(self, num_kv_heads: int) -> Shard:
        """This rank's KV heads: a share, or one head held by several ranks."""
        return kv_shard(num_kv_heads, self.rank, self.size)

    def shard_queries(self, num_heads: int, num_kv_heads: int, unit: int = 1) -> Shard:
        """The query heads that ask them, a multiple of `unit` if there are enough."""
        if num_heads < self.size:
            raise ConfigError(
                f"num_attention_heads ({num_heads}) cannot be divided among {self.size} ranks; use"
                f" at most {num_heads}"
            )
        return query_shard(num_heads, num_kv_heads, self.rank, self.size, unit)

    def is_first_of(self, num_kv_heads: int) -> bool:
        """Of the ranks that hold the same KV heads."""
        before = kv_shard(num_kv_heads, max(0, self.rank - 1), self.size)
        return self.rank == 0 or before != self.shard_heads(num_kv_heads)

    @property
    def for_experts(self) -> Placement:
        """Among all ranks that divide experts."""
        if (wave := self.wave) is None:
            return self
        return Placement(wave.rank, wave.size, wave.collective, self.ep)

    @property
    def partial(self) -> Placement:
        """The same ranks, whose sums stay partial."""
        return replace(self, collective=None if self.size == 1 else Partial())

    @property
    def of_experts(self) -> Placement:
        """Among the ranks that divide each expert; sums stay partial."""
        every = self.for_experts
        size = every.size // self.ep
        return Placement(every.rank % size, size, None if size == 1 else Partial())

    def shard_experts(self, num_experts: int, group: int | None = None) -> Shard:
        """Those of this rank's group, or of that one."""
        if num_experts < self.ep:
            raise ConfigError(f"ep is {self.ep}; {num_experts} experts are for at most as many")
        every = self.for_experts
        group = every.rank * self.ep // every.size if group is None else group
        return shard(num_experts, group, self.ep)

    def shard_rows(self, total: int) -> Shard:
        """A share of ceil(total / size) rows, shorter or empty at the end."""
        rows = -(-total // self.size)
        start = min(self.rank * rows, total)
        return Shard(start, min(rows, total - start))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.collective is None else self.collective.all_reduce(x)

    def gather_columns(self, x_TC: torch.Tensor, out_TN: torch.Tensor) -> None:
        if self.collective is None:
            out_TN.copy_(x_TC[:, : out_TN.shape[1]])
        else:
            self.collective.gather_columns(x_TC, out_TN)
