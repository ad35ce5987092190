"""Which schedule of a decode kernel stands for these lengths, and have they been dealt out?

A schedule says which program takes which keys. It is made once for a shape, because captured steps
hold on to its memory, and dealt out on the device by the first layer of each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from ridgeline.architectures.spec import AttentionSpec
from ridgeline.kernels.paged_decode import DecodeBatch

S = TypeVar("S")
Key = tuple[int | None, int, int, int, int, int]


@dataclass(slots=True)
class Dealt(Generic[S]):
    """`make` a schedule for a shape, so many requests and so many new tokens of each, None where
    there is no kernel; `refresh` it for the lengths of a batch."""

    make: Callable[[torch.device, AttentionSpec, int, int], S | None]
    refresh: Callable[[S, DecodeBatch], None]
    _schedules: dict[Key, S] = field(default_factory=dict)
    _dealt_for: dict[Key, DecodeBatch] = field(default_factory=dict)

    def stands_for(self, batch: DecodeBatch, spec: AttentionSpec) -> bool:
        """An earlier layer has had it dealt out."""
        return self._dealt_for.get(_key(batch, spec)) is batch

    def schedule(self, batch: DecodeBatch, device: torch.device, spec: AttentionSpec) -> S | None:
        """Layers that share a batch share the schedule; it is dealt out again if another batch was
        answered since."""
        key = _key(batch, spec)
        schedule = self._schedules.get(key)
        if schedule is None:
            schedule = self.make(device, spec, room_for(batch), batch.max_new)
            if schedule is None:
                return None
            self._schedules[key] = schedule
        if self._dealt_for.get(key) is not batch:
            self.refresh(schedule, batch)
            self._dealt_for[key] = batch
        return schedule


def room_for(batch: DecodeBatch) -> int:
    """Requests of a schedule that serves this many."""
    return 1 << (len(batch.seq_lens_B) - 1).bit_length()


def _key(batch: DecodeBatch, spec: AttentionSpec) -> Key:
    return (
        batch.window,
        room_for(batch),
        batch.max_new,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
    )
