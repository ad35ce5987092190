"""What must a KV format be able to do, and how are keys and values kept as they are?

`gather` makes any format work with any attention backend. Letters: T tokens, N blocks, S block
size, K KV heads, D head size, n gathered tokens.
"""

from __future__ import annotations

import mmap
import sys
from abc import ABC, abstractmethod
from math import prod

import torch

from ridgeline.formats import KV_FORMATS
from ridgeline.kernels.cpu import native
from ridgeline.kernels.paged_kv import PagedKV, plain_views

Store = tuple[torch.Tensor, ...]


class KVFormat(ABC):
    """How the keys and values of one layer lie in memory. `name` is that of its line in
    `formats`."""

    name: str

    def bytes_per_token(self, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
        """Bytes of one token's K and V in one layer, served in a dtype of `dtype_bytes`."""
        return KV_FORMATS[self.name].bytes_per_token(num_kv_heads, head_dim, dtype_bytes)

    @abstractmethod
    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Store:
        """The memory of one layer. The first dimension of each tensor is the block."""

    @abstractmethod
    def write(self, store: Store, slots_T: torch.Tensor, kv_TC: torch.Tensor) -> None:
        """Put tokens into slots (block * block_size + offset). A row of `kv_TC` is the K heads,
        then the V heads: C = 2 * K * D. Padding tokens all name the slots of block 0."""

    @abstractmethod
    def gather(
        self, store: Store, slots_n: torch.Tensor, num_kv_heads: int, head_dim: int
    ) -> torch.Tensor:
        """The tokens of these slots as [n, 2, K, D] in the serving dtype: K is [:, 0]."""

    @abstractmethod
    def views(self, store: Store, num_kv_heads: int, head_dim: int) -> PagedKV | None:
        """K and V as they lie in memory, for kernels that read and write blocks in place: in one of
        the ways that `paged_kv` describes; None in any other."""


class PlainKV(KVFormat):
    """One number of the serving dtype each. Layout [N, S, 2, K, D]: all of a token lies together,
    so that one copy writes it, one copy gathers it, and K and V are two strided views."""

    name = "auto"

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


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The memory of a pool. On a CPU the system hands out pages when they are first written, so
    that a large pool takes no time at start, and huge ones where it may. The whole of it counts as
    taken all the same."""
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or sys.platform != "linux" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = native.advise_huge(torch.frombuffer(pages, dtype=torch.uint8))
    return whole.view(dtype).view(shape)
