"""Keys and values as they are, one number of the serving dtype each.

Layout [N, S, 2, K, D]: all of a token lies together, so that one copy writes it, one copy gathers
it, and K and V are two strided views of one tensor.
"""

from __future__ import annotations

import torch

from ridgeline.formats import KV_FORMATS
from ridgeline.kernels.qk_norm_rope_write import PagedKV, plain_views
from ridgeline.kvcache.contract import Store
from ridgeline.kvcache.memory import zeros


class PlainKV:
    name = "auto"

    def bytes_per_token(self, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
        return KV_FORMATS["auto"].bytes_per_token(num_kv_heads, head_dim, dtype_bytes)

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Store:
        shape = (num_blocks, block_size, 2 * num_kv_heads * head_dim)
        return (zeros(shape, dtype, device),)

    def write(self, store: Store, slots_T: torch.Tensor, kv_TC: torch.Tensor) -> None:
        store[0].view(-1, kv_TC.shape[1]).index_copy_(0, slots_T, kv_TC)

    def gather(
        self, store: Store, slots_n: torch.Tensor, num_kv_heads: int, head_dim: int
    ) -> torch.Tensor:
        rows = store[0].view(-1, 2 * num_kv_heads * head_dim).index_select(0, slots_n)
        return rows.view(-1, 2, num_kv_heads, head_dim)

    def views(self, store: Store, num_kv_heads: int, head_dim: int) -> PagedKV:
        return plain_views(store[0], num_kv_heads)
