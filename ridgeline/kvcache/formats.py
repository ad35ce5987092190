"""How do keys and values lie in memory, in each format? The table of their names is
`ridgeline.formats.KV_FORMATS`.

Letters: T tokens, N blocks, S block size, K KV heads, H = 2 * K, D head size, n gathered tokens.
"""

from __future__ import annotations

import mmap
import sys
from abc import ABC, abstractmethod
from math import prod

import torch

from ridgeline.errors import ConfigError, InternalError
from ridgeline.formats import kv_line
from ridgeline.kernels.cpu import native
from ridgeline.kernels.paged_kv import (
    PagedKV,
    decode_4,
    decode_8,
    encode_4,
    encode_8,
    hadamard,
    indexable,
    plain_views,
)
from ridgeline.kernels.quantize_rows import E4M3, LARGEST

Store = tuple[torch.Tensor, ...]

HEAD_DIMS = {"cpu": (16, 1024), "cuda": (32, 128)}  # that kernels read in place; others gather


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

    # -------------------------------------------------------------------- latent attention

    def allocate_latent(
        self, num_blocks: int, block_size: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Store:
        """`allocate` of one vector of `width` numbers per token, which `write` takes as a row; of
        formats whose line says that they take it. So the two below."""
        raise InternalError(f"KV format {self.name} has no room for latent vectors")

    def gather_latent(self, store: Store, slots_n: torch.Tensor, width: int) -> torch.Tensor:
        """The vectors of these slots as [n, C] in the serving dtype."""
        raise InternalError(f"KV format {self.name} has no latent vectors")

    def view_latent(self, store: Store) -> torch.Tensor | None:
        """[N, S, C] in memory, where a number is what its code says; None where it is not."""
        return None


class PlainKV(KVFormat):
    """Keys and values as they are, one number of the serving dtype each.

    Layout [N, S, 2, K, D]: all of a token lies together, so that one copy writes it, one copy
    gathers it, and K and V are two strided views of one tensor."""

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

    def allocate_latent(
        self, num_blocks: int, block_size: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Store:
        return (zeros((num_blocks, block_size, width), dtype, device),)

    def gather_latent(self, store: Store, slots_n: torch.Tensor, width: int) -> torch.Tensor:
        return store[0].view(-1, width).index_select(0, slots_n)

    def view_latent(self, store: Store) -> torch.Tensor:
        return store[0]


Part = tuple[tuple[int, ...], torch.dtype]  # of one head of one token: its shape there


class CodedKV(KVFormat):
    """Keys and values in fewer bits than they are served in: tensors [N, S, 2 * K, ...], of each
    slot and head some codes, and what makes numbers of them. The K heads of a token come first,
    then its V heads. A format says `parts`, `encode`, `decode` and `views`."""

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
        slots = num_blocks, block_size, 2 * num_kv_heads
        return self._room(slots, head_dim, dtype, device)

    def allocate_latent(
        self, num_blocks: int, block_size: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Store:
        return self._room((num_blocks, block_size, 1), width, dtype, device)

    def _room(
        self, slots: tuple[int, ...], size: int, dtype: torch.dtype, device: torch.device
    ) -> Store:
        self.dtype = dtype
        return tuple(zeros((*slots, *shape), kind, device) for shape, kind in self.parts(size))

    def write(self, store: Store, slots_T: torch.Tensor, kv_TC: torch.Tensor) -> None:
        heads = store[0].shape[2]
        encoded = self.encode(kv_TC.view(len(kv_TC), heads, kv_TC.shape[1] // heads))
        for tensor, part in zip(store, encoded, strict=True):
            _rows(tensor).index_copy_(0, slots_T, indexable(part).flatten(1))

    def gather(
        self, store: Store, slots_n: torch.Tensor, num_kv_heads: int, head_dim: int
    ) -> torch.Tensor:
        return self._gathered(store, slots_n).view(-1, 2, num_kv_heads, head_dim)

    def gather_latent(self, store: Store, slots_n: torch.Tensor, width: int) -> torch.Tensor:
        return self._gathered(store, slots_n).view(-1, width)

    def _gathered(self, store: Store, slots_n: torch.Tensor) -> torch.Tensor:
        found = [
            _rows(tensor).index_select(0, slots_n).view(-1, *tensor.shape[2:]).view(tensor.dtype)
            for tensor in store
        ]
        return self.decode(*found).to(self.dtype)


def sides(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is of keys and what is of values, [N, S, K, ...]."""
    heads = tensor.shape[2] // 2
    return tensor[:, :, :heads], tensor[:, :, heads:]


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """A slot a row."""
    return indexable(tensor).flatten(0, 1).flatten(1)


class Fp8KV(CodedKV):
    """e4m3, half the bytes of 16 bits, without scales. A number is off by at most 1/16 of itself,
    or 2^-10 if it is below 2^-6; beyond 448 it becomes 448."""

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

    def view_latent(self, store: Store) -> torch.Tensor:
        return store[0].squeeze(2)


class Int8KV(CodedKV):
    """Whole numbers of 8 bits, about half the bytes of 16: a scale for each head of each token.

    A number is off by at most half a step, and 127 steps are the largest of its head and token: by
    1/250 of that, or by 1e-5 where that is more. Parts: codes [N, S, H, D], scales (float16)
    [N, S, H]."""

    name = "int8"

    def parts(self, head_dim: int) -> tuple[Part, ...]:
        return ((head_dim,), torch.int8), ((), torch.float16)

    def encode(self, x_THD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return encode_8(x_THD)

    def decode(self, *parts: torch.Tensor) -> torch.Tensor:
        return decode_8(*parts)

    def views(self, store: Store, num_kv_heads: int, head_dim: int) -> PagedKV:
        return PagedKV(*sides(store[0]), *sides(store[1]))


class Int4KV(CodedKV):
    """Numbers of 4 bits, about a quarter of the bytes of 16: a scale and a smallest number for each
    head of each token.

    Of a head's values, the smallest and the largest are codes 0 and 15, so a number is off by at
    most 1/29 of what lies between them. Keys are multiplied by Hadamard's matrix first, which
    spreads the few large places that keys have (QuaRot, arXiv 2404.00456), so that the same holds
    of rotated keys; `gather` rotates them back, kernels rotate the queries. Parts: codes
    [N, S, H, D / 2], two to a byte, and scales with smallest numbers (float16) [N, S, H, 2]."""

    name = "int4"

    def parts(self, head_dim: int) -> tuple[Part, ...]:
        if head_dim % 2:
            raise ConfigError(
                f"kv_cache_dtype int4 needs an even head size, not {head_dim}; choose int8 or auto"
            )
        return ((head_dim // 2,), torch.uint8), ((2,), torch.float16)

    def encode(self, x_THD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keys, values = x_THD.float().chunk(2, 1)
        codes, scales, lows = encode_4(torch.cat((hadamard(keys), values), 1))
        return codes, torch.stack((scales, lows), -1)

    def decode(self, *parts: torch.Tensor) -> torch.Tensor:
        codes, scaling = parts
        keys, values = decode_4(codes, *scaling.unbind(-1)).chunk(2, 1)
        return torch.cat((hadamard(keys), values), 1)

    def views(self, store: Store, num_kv_heads: int, head_dim: int) -> PagedKV | None:
        codes, scaling = store
        if not reads_in_place(codes.device, head_dim):
            return None
        scales, lows = scaling.unbind(-1)
        return PagedKV(*sides(codes), *sides(scales), *sides(lows))


def reads_in_place(device: torch.device, head_dim: int) -> bool:
    """Kernels rotate heads whose size is a power of two."""
    least, most = HEAD_DIMS.get(device.type, (1, 0))
    return least <= head_dim <= most and head_dim & (head_dim - 1) == 0


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As many as a pool may ever need. On a CPU the system hands out pages when they are first
    written, so that a large pool takes no time at start, and huge ones where it may. The whole of
    it counts as taken all the same."""
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or sys.platform != "linux" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = native.advise_huge(torch.frombuffer(pages, dtype=torch.uint8))
    return whole.view(dtype).view(shape)
