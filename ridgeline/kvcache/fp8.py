"""Keys and values as e4m3, half the bytes of 16 bits, without scales.

A number is off by at most 1/16 of itself, or 2^-10 if it is below 2^-6; beyond 448 it becomes 448.
Layout as `plain`, [N, S, 2, K, D].
"""

from __future__ import annotations

import torch

from ridgeline.formats import KV_FORMATS
from ridgeline.kernels.qk_norm_rope_write import PagedKV, plain_views
from ridgeline.kernels.quantize_rows import E4M3, LARGEST
from ridgeline.kvcache.contract import Store
from ridgeline.kvcache.memory import zeros


class Fp8KV:
    name = "fp8"

    def __init__(self) -> None:
        self.dtype = torch.float32

    def bytes_per_token(self, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
        return KV_FORMATS["fp8"].bytes_per_token(num_kv_heads, head_dim, dtype_bytes)

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Store:
        """All stores of one object have the same serving `dtype`, which `gather` answers in."""
        self.dtype = dtype
        shape = (num_blocks, block_size, 2 * num_kv_heads * head_dim)
        return (zeros(shape, E4M3, device),)

    def write(self, store: Store, slots_T: torch.Tensor, kv_TC: torch.Tensor) -> None:
        codes_TC = kv_TC.clamp(-LARGEST, LARGEST).to(E4M3)
        rows = _as_bytes(store[0]).view(-1, kv_TC.shape[1])
        rows.index_copy_(0, slots_T, _as_bytes(codes_TC))

    def gather(
        self, store: Store, slots_n: torch.Tensor, num_kv_heads: int, head_dim: int
    ) -> torch.Tensor:
        rows = _as_bytes(store[0]).view(-1, 2 * num_kv_heads * head_dim).index_select(0, slots_n)
        return rows.view(E4M3).to(self.dtype).view(-1, 2, num_kv_heads, head_dim)

    def views(self, store: Store, num_kv_heads: int, head_dim: int) -> PagedKV:
        """[N, S, K, D] in e4m3 instead of the serving dtype: a number is what its code says."""
        return plain_views(store[0], num_kv_heads)


def _as_bytes(codes: torch.Tensor) -> torch.Tensor:
    """For indexing, which not every device has for e4m3."""
    return codes.view(torch.uint8)
