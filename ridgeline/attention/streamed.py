"""Which decodes are answered straight from the product of q, k and v, in one CUDA kernel?

The kernel norms, turns and caches what is new and attends to all; `kernels.paged_decode_cuda` says
where it runs.
"""

from __future__ import annotations

import torch

from ridgeline.architectures.spec import AttentionSpec
from ridgeline.attention.backend import softmax_scale
from ridgeline.attention.dealt import Dealt, room_for
from ridgeline.errors import InternalError
from ridgeline.kernels.paged_decode import DecodeBatch
from ridgeline.kernels.paged_decode_cuda import (
    PLAIN,
    STEP_KEYS,
    CudaSchedule,
    Front,
    decode_with_front,
    make_schedule,
    numbers_of,
    refresh,
    unsupported,
)
from ridgeline.kernels.paged_kv import PagedKV


class StreamedDecodes:
    """Layers that share a batch and a window run one after the other."""

    def __init__(self) -> None:
        self._dealt = Dealt(self._make, refresh)
        self._numbers = PLAIN
        self._block_size = STEP_KEYS

    def takes(
        self, views: PagedKV | None, dtype: torch.dtype, batch: DecodeBatch, spec: AttentionSpec
    ) -> bool:
        if views is None or not views.k_NSKD.is_cuda:
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
        front: Front,
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
        early = self._dealt.stands_for(batch, spec)  # else the schedule is just being written
        schedule = self._dealt.schedule(batch, qkv_TX.device, spec)
        if schedule is None:
            raise InternalError("takes has not been asked")
        decode_with_front(qkv_TX, front, views, batch, scale, schedule, out_THD, early=early)
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
