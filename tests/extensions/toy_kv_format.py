"""A KV format from outside: 8 bits with one float32 scale per token, side and head.

Its table line: `KV_FORMATS["toy_int8"] = LINE`.
"""

from __future__ import annotations

import torch

from ridgeline.formats import KVFormatLine
from ridgeline.kvcache import KVFormat, Store

LINE = KVFormatLine("tests.extensions.toy_kv_format:Int8KV", element_bits=8, head_bytes=4)


class Int8KV(KVFormat):
    name = "toy_int8"

    def __init__(self) -> None:
        self.dtype = torch.float32

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Store:
        self.dtype = dtype
        sides = (num_blocks, block_size, 2, num_kv_heads)
        codes = torch.zeros(*sides, head_dim, dtype=torch.int8, device=device)
        return codes, torch.zeros(sides, dtype=torch.float32, device=device)

    def write(self, store: Store, slots_T: torch.Tensor, kv_TC: torch.Tensor) -> None:
        codes, scales = store
        kv = kv_TC.float().reshape(-1, *codes.shape[2:])
        scale = kv.abs().amax(-1).clamp_min(1e-12) / 127
        codes.flatten(0, 1)[slots_T] = (kv / scale[..., None]).round().to(torch.int8)
        scales.flatten(0, 1)[slots_T] = scale

    def gather(
        self, store: Store, slots_n: torch.Tensor, num_kv_heads: int, head_dim: int
    ) -> torch.Tensor:
        codes, scales = (x.flatten(0, 1)[slots_n] for x in store)
        return (codes * scales[..., None]).to(self.dtype)
