"""Keys and values as whole numbers of 8 bits, about half the bytes of 16: a scale for each head of
each token.

A number is off by at most half a step, and 127 steps are the largest of its head and token: by
1/250 of that, or by 1e-5 where that is more. Parts: codes [N, S, H, D], scales (float16) [N, S, H].
"""

from __future__ import annotations

import torch

from ridgeline.kernels.paged_kv import PagedKV, decode_8, encode_8
from ridgeline.kvcache.coded import CodedKV, Part, sides
from ridgeline.kvcache.contract import Store


class Int8KV(CodedKV):
    name = "int8"

    def parts(self, head_dim: int) -> tuple[Part, ...]:
        return ((head_dim,), torch.int8), ((), torch.float16)

    def encode(self, x_THD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return encode_8(x_THD)

    def decode(self, *parts: torch.Tensor) -> torch.Tensor:
        return decode_8(*parts)

    def views(self, store: Store, num_kv_heads: int, head_dim: int) -> PagedKV:
        return PagedKV(*sides(store[0]), *sides(store[1]))
