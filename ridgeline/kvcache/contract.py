"""What must a KV format be able to do? `gather` makes any format work with any attention backend.

Letters: T tokens, N blocks, S block size, K KV heads, D head size, n gathered tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ridgeline.formats import kv_line
from ridgeline.kernels.paged_kv import PagedKV

Store = tuple[torch.Tensor, ...]


class KVFormat(ABC):
    """How the keys and values of one layer lie in memory; `name` has a line in `formats`."""

    name: str

    def bytes_per_token(self, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
        """Bytes of one token's K and V in one layer, served in a dtype of `dtype_bytes`; what its
        line says."""
        return kv_line(self.name).bytes_per_token(num_kv_heads, head_dim, dtype_bytes)

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

    def views(self, store: Store, num_kv_heads: int, head_dim: int) -> PagedKV | None:
        """K and V as they lie in memory, for kernels that read and write blocks in place: in one of
        the ways that `paged_kv` describes; None in any other."""
        return None
