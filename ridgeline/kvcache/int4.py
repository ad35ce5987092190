"""Keys and values as whole numbers of 4 bits, about a quarter of the bytes of 16: a scale and a
smallest number for each head of each token.

Of a head's values, the smallest and the largest are codes 0 and 15, so a number is off by at most
1/29 of what lies between them. Keys are multiplied by Hadamard's matrix first, which spreads the
few large places that keys have (QuaRot, arXiv 2404.00456), so that the same holds of turned keys;
`gather` turns them back, kernels turn the queries. Parts: codes [N, S, H, D / 2], two to a byte,
and scales with smallest numbers (float16) [N, S, H, 2].
"""

from __future__ import annotations

import torch

from ridgeline.errors import ConfigError
from ridgeline.kernels.paged_kv import PagedKV, decode_4, encode_4, hadamard
from ridgeline.kvcache.coded import CodedKV, Part, sides
from ridgeline.kvcache.contract import Store

HEAD_DIMS = {"cpu": (16, 1024), "cuda": (32, 128)}  # that kernels read in place; others gather


class Int4KV(CodedKV):
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
    """Kernels turn heads whose size is a power of two."""
    least, most = HEAD_DIMS.get(device.type, (1, 0))
    return least <= head_dim <= most and head_dim & (head_dim - 1) == 0
