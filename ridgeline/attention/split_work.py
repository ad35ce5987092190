"""How do layers that share a batch split the work of a decode kernel, and which decodes are
answered straight from the product of q, k and v?

A schedule says which program takes which keys. It is made once for a shape, because captured steps
hold on to its memory, and written on the device by the first layer of each step. The CUDA kernel
that norms, turns and caches what is new and attends to all has such schedules of its own;
`kernels.paged_decode_cuda` says where it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from ridgeline.architectures.spec import AttentionSpec
from ridgeline.attention.backend import softmax_scale
from ridgeline.errors import InternalError
from ridgeline.kernels.paged_decode import DecodeBatch
from ridgeline.kernels.paged_decode_cuda import (
    PLAIN,
    STEP_KEYS,
    CudaSchedule,
    Prologue,
    decode_with_prologue,
    make_schedule,
    numbers_of,
    refresh,
    unsupported,
)
from ridgeline.kernels.paged_kv import PagedKV

S = TypeVar("S")
Key = tuple[int | None, int, int, int, int, int]


@dataclass(slots=True)
class SplitWork(Generic[S]):
    """`make` a schedule for a shape, so many requests and so many new tokens of each, None where
    there is no kernel; `refresh` it for the lengths of a batch."""

    make: Callable[[torch.device, AttentionSpec, int, int], S | None]
    refresh: Callable[[S, DecodeBatch], None]
    _schedules: dict[Key, S] = field(default_factory=dict)
    _split_for: dict[Key, DecodeBatch] = field(default_factory=dict)

    def stands_for(self, batch: DecodeBatch, spec: AttentionSpec) -> bool:
        """An earlier layer has had it written."""
        return self._split_for.get(_key(batch, spec)) is batch

    def schedule(self, batch: DecodeBatch, device: torch.device, spec: AttentionSpec) -> S | None:
        """Layers that share a batch share the schedule; it is written again if another batch was
        answered since."""
        key = _key(batch, spec)
        schedule = self._schedules.get(key)
        if schedule is None:
            schedule = self.make(device, spec, room_for(batch), batch.max_new)
            if schedule is None:
                return None
            self._schedules[key] = schedule
        if self._split_for.get(key) is not batch:
            self.refresh(schedule, batch)
            self._split_for[key] = batch
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


class StreamedDecodes:
    """Layers that share a batch and a window run one after the other."""

    def __init__(self) -> None:
        self._work = SplitWork(self._make, refresh)
        self._numbers = PLAIN
        self._block_size = STEP_KEYS

    def takes(
        self, views: PagedKV | None, dtype: torch.dtype, batch: DecodeBatch, spec: AttentionSpec
    ) -> bool:
        if views is None or not views.k_NSKD.is_cuda or spec.norms_rotated:
            return False
        device = views.k_NSKD.device
        reason = unsupported(
            device,
            dtype,
            views,
            num_heads=spec.num_heads,
            num_new=batch.max_new,
            num_requests=room_for(batch),
        )
        return reason is None

    def attend(
        self,
        qkv_TX: torch.Tensor,
        prologue: Prologue,
        views: PagedKV,
        batch: DecodeBatch,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """[T, H, D], of as many new tokens of each request as the batch says."""
        tokens = qkv_TX.shape[0]
        out_THD = qkv_TX.new_empty((tokens, spec.num_heads, spec.head_dim))
        scale = softmax_scale(spec)
        self._numbers = numbers_of(views)  # the same for all layers of an engine
        self._block_size = views.k_NSKD.shape[1]
        early = self._work.stands_for(batch, spec)  # else the schedule is just being written
        schedule = self._work.schedule(batch, qkv_TX.device, spec)
        if schedule is None:
            raise InternalError("takes has not been asked")
        decode_with_prologue(qkv_TX, prologue, views, batch, scale, schedule, out_THD, early=early)
        return out_THD

    def _make(
        self, device: torch.device, spec: AttentionSpec, max_requests: int, max_new: int
    ) -> CudaSchedule:
        return make_schedule(
            device,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=self._block_size,
            max_requests=max_requests,
            numbers=self._numbers,
            num_new=max_new,
        )
