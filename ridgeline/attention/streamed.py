"""Which decodes are answered straight from the product of q, k and v, in one CUDA kernel?

The kernel norms, turns and caches what is new and attends to all; `kernels.paged_decode_cuda` says
where it runs. Schedules are kept, because captured steps hold on to their memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ridgeline.architectures.spec import AttentionSpec
from ridgeline.attention.backend import softmax_scale
from ridgeline.kernels.paged_decode import DecodeBatch
from ridgeline.kernels.paged_decode_cuda import (
    CudaSchedule,
    Front,
    decode_with_front,
    make_schedule,
    refresh,
    unsupported,
)
from ridgeline.kernels.qk_norm_rope_write import PagedKV

Key = tuple[int | None, int, int, int, int]


@dataclass(slots=True)
class StreamedDecodes:
    """Layers that share a batch and a window run one after the other."""

    _schedules: dict[Key, CudaSchedule] = field(default_factory=dict)
    _dealt_for: dict[Key, DecodeBatch] = field(default_factory=dict)

    def takes(self, views: PagedKV | None, dtype: torch.dtype, spec: AttentionSpec) -> bool:
        if views is None or not views.k_NSKD.is_cuda:
            return False
        device = views.k_NSKD.device
        return unsupported(device, dtype, views, num_heads=spec.num_heads) is None

    def attend(
        self,
        qkv_TX: torch.Tensor,
        front: Front,
        views: PagedKV,
        batch: DecodeBatch,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """[T, H, D], of one new token of each request."""
        tokens = qkv_TX.shape[0]
        out_THD = qkv_TX.new_empty((tokens, spec.num_heads, spec.head_dim))
        schedule = self._dealt(batch, qkv_TX.device, spec)
        decode_with_front(qkv_TX, front, views, batch, softmax_scale(spec), schedule, out_THD)
        return out_THD

    def _dealt(self, batch: DecodeBatch, device: torch.device, spec: AttentionSpec) -> CudaSchedule:
        """Dealt out by the first layer, and again if another batch was answered since."""
        room = 1 << (len(batch.seq_lens_B) - 1).bit_length()
        key = (batch.window, room, spec.num_heads, spec.num_kv_heads, spec.head_dim)
        if key not in self._schedules:
            self._schedules[key] = make_schedule(
                device,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                max_requests=room,
            )
        schedule = self._schedules[key]
        if self._dealt_for.get(key) is not batch:
            refresh(schedule, batch)
            self._dealt_for[key] = batch
        return schedule
