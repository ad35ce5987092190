"""What do all formats share that keep keys and values in fewer bits than they are served in?

Tensors [N, S, 2 * K, ...]: of each slot and head some codes, and what makes numbers of them. The K
heads of a token come first, then its V heads. Letters: T tokens, N blocks, S block size, K KV
heads, H = 2 * K, D head size, n gathered tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ridgeline.formats import KV_FORMATS
from ridgeline.kernels.paged_kv import PagedKV, indexable
from ridgeline.kvcache.contract import Store
from ridgeline.kvcache.memory import zeros

Part = tuple[tuple[int, ...], torch.dtype]  # of one head of one token: its shape there


class CodedKV(ABC):
    """A format has a `name` with a line in `formats`, and says `parts`, `encode`, `decode` and
    `views`."""

    name: str

    def __init__(self) -> None:
        self.dtype = torch.float32

    @abstractmethod
    def parts(self, head_dim: int) -> tuple[Part, ...]:
        """What is kept of a head of a token; the codes first."""

    @abstractmethod
    def encode(self, x_THD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of these tokens, [T, H, ...]."""

    @abstractmethod
    def decode(self, *parts: torch.Tensor) -> torch.Tensor:
        """The other way, [n, H, D] in float32."""

    def bytes_per_token(self, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
        return KV_FORMATS[self.name].bytes_per_token(num_kv_heads, head_dim, dtype_bytes)

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
        slots = num_blocks, block_size, 2 * num_kv_heads
        return tuple(zeros((*slots, *shape), kind, device) for shape, kind in self.parts(head_dim))

    def write(self, store: Store, slots_T: torch.Tensor, kv_TC: torch.Tensor) -> None:
        heads = store[0].shape[2]
        encoded = self.encode(kv_TC.view(len(kv_TC), heads, kv_TC.shape[1] // heads))
        for tensor, part in zip(store, encoded, strict=True):
            _rows(tensor).index_copy_(0, slots_T, indexable(part).flatten(1))

    def gather(
        self, store: Store, slots_n: torch.Tensor, num_kv_heads: int, head_dim: int
    ) -> torch.Tensor:
        found = [
            _rows(tensor).index_select(0, slots_n).view(-1, *tensor.shape[2:]).view(tensor.dtype)
            for tensor in store
        ]
        return self.decode(*found).to(self.dtype).view(-1, 2, num_kv_heads, head_dim)

    @abstractmethod
    def views(self, store: Store, num_kv_heads: int, head_dim: int) -> PagedKV | None:
        """See `contract.KVFormat`."""


def sides(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is of keys and what is of values, [N, S, K, ...]."""
    heads = tensor.shape[2] // 2
    return tensor[:, :, :heads], tensor[:, :, heads:]


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """A slot a row."""
    return indexable(tensor).flatten(0, 1).flatten(1)
