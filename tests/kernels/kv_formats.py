"""Caches of every format for tests: what may not be read is NaN, as number or as scale."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ridgeline.kernels.paged_kv import PagedKV
from ridgeline.kvcache.formats import Fp8KV, Int4KV, Int8KV, KVFormat, PlainKV, Store

FORMATS: dict[str, Callable[[], KVFormat]] = {
    "auto": PlainKV,
    "fp8": Fp8KV,
    "int8": Int8KV,
    "int4": Int4KV,
}
CODES = ("int8", "int4")


def poisoned(kind: KVFormat, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Store:
    """A cache of (blocks, block size, KV heads, head size) that gives NaN wherever it is read."""
    store = kind.allocate(*shape, dtype, torch.device("cpu"))
    for tensor in store:
        if tensor.element_size() == 1:
            tensor.view(torch.uint8).fill_(0x7F)  # NaN in e4m3
        else:
            tensor.fill_(torch.nan)
    return store


def cache_of(kv_NS2KD: torch.Tensor, name: str, device: torch.device) -> PagedKV:
    """The same numbers in a format; a head with a NaN is all NaN."""
    blocks, size, _, heads, head_dim = kv_NS2KD.shape
    kind = FORMATS[name]()
    store = kind.allocate(blocks, size, heads, head_dim, kv_NS2KD.dtype, torch.device("cpu"))
    kind.write(store, torch.arange(blocks * size), kv_NS2KD.reshape(blocks * size, -1))
    views = kind.views(tuple(tensor.to(device) for tensor in store), heads, head_dim)
    assert views is not None
    return views


def bits_of(store: Store) -> torch.Tensor:
    return torch.cat([tensor.flatten().view(torch.uint8) for tensor in store])


def digits(part: torch.Tensor) -> torch.Tensor:
    """As float32, of two codes in a byte both."""
    if part.dtype == torch.uint8:
        part = torch.cat((part & 15, part >> 4), -1)
    return part.float()


def check_near(mine: Store, other: Store, slots: torch.Tensor) -> None:
    """What two writes of as good as the same numbers leave: a code on the border of two may be the
    next one, which is seldom."""
    for ours, theirs in zip(mine, other, strict=True):
        a, b = (digits(x).flatten(0, 1)[slots] for x in (ours, theirs))
        near = {torch.float16: 2e-3, torch.float8_e4m3fn: 1 / 7}.get(ours.dtype)
        step = 1.0 if near is None else near * b.abs() + 1e-3
        assert bool(((a - b).abs() <= step).all())
        if near is None:
            assert float((a != b).float().mean()) < 0.02
