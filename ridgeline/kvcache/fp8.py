"""Keys and values as e4m3, half the bytes of 16 bits, without scales.

A number is off by at most 1/16 of itself, or 2^-10 if it is below 2^-6; beyond 448 it becomes 448.
"""

from __future__ import annotations

import torch

from ridgeline.kernels.paged_kv import PagedKV
from ridgeline.kernels.quantize_rows import E4M3, LARGEST
from ridgeline.kvcache.coded import CodedKV, Part, sides
from ridgeline.kvcache.contract import Store


class Fp8KV(CodedKV):
    name = "fp8"

    def parts(self, head_dim: int) -> tuple[Part, ...]:
        return (((head_dim,), E4M3),)

    def encode(self, x_THD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x_THD.clamp(-LARGEST, LARGEST).to(E4M3),)

    def decode(self, *parts: torch.Tensor) -> torch.Tensor:
        return parts[0].float()

    def views(self, store: Store, num_kv_heads: int, head_dim: int) -> PagedKV:
        """[N, S, K, D] in e4m3 instead of the serving dtype: a number is what its code says."""
        return PagedKV(*sides(store[0]))
