"""From the packed q, k, v product to turned queries and the cache: norms, rotation and the write.

All in float32, rounded once at the end. Letters: T tokens, X = (H + 2 * K) * D packed width,
H query heads, K KV heads, D head size, L positions, N blocks, S block size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.kernels.paged_kv import PagedKV, plain_views, write_tokens

__all__ = [
    "HeadNorms",
    "PagedKV",
    "plain_views",
    "qk_norm_rope_write",
    "qk_norm_rope_write_reference",
    "rotate_",
    "rotate_reference",
]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    q_weight_D: torch.Tensor
    k_weight_D: torch.Tensor
    eps: float


def qk_norm_rope_write(
    qkv_TX: torch.Tensor,
    table_L2D: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    kv: PagedKV,
    *,
    norms: HeadNorms | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Turned queries [T, H, D]; keys and values go to `slots_T` (block * S + offset), a negative
    slot is not written. `table_L2D` (float32) holds cosines, both halves alike, and sines, the
    first half negated, as `layers.rope.Rotation` makes them; every position has a row in it."""
    if qkv_TX.is_cuda:
        from ridgeline.kernels.qk_norm_rope_write_triton import qk_norm_rope_write_triton

        return qk_norm_rope_write_triton(
            qkv_TX, table_L2D, positions_T, slots_T, kv, norms=norms, pdl=pdl
        )
    return qk_norm_rope_write_reference(qkv_TX, table_L2D, positions_T, slots_T, kv, norms=norms)


def qk_norm_rope_write_reference(
    qkv_TX: torch.Tensor,
    table_L2D: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    kv: PagedKV,
    *,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    _, block_size, kv_heads, _ = kv.k_NSKD.shape
    size = kv.head_dim
    heads = qkv_TX.shape[1] // size - 2 * kv_heads
    split = [heads, kv_heads, kv_heads]
    tokens = qkv_TX.shape[0]
    q, k, v = torch.split(qkv_TX.float().reshape(tokens, -1, size), split, dim=1)
    if norms is not None:
        q, k = _norm(q, norms.q_weight_D, norms.eps), _norm(k, norms.k_weight_D, norms.eps)
    cos_T1D, sin_T1D = torch.split(table_L2D[positions_T].float(), 1, dim=1)
    q, k = (x * cos_T1D + x.roll(size // 2, -1) * sin_T1D for x in (q, k))
    kept = slots_T >= 0
    places = slots_T[kept] // block_size, slots_T[kept] % block_size
    write_tokens(kv, places, k[kept], v[kept])
    return q.to(qkv_TX.dtype)


def _norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return torch.mul(x * scale, weight_D.float())


def rotate_(x_TND: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> None:
    """Rotate pairs (i, i + D/2) of each head by an angle that grows with the position, in place;
    x is [T, heads, D] of any strides.

    `cos_T1D` is float32 with both halves alike; `sin_T1D` too, its first half negated. The
    arithmetic is float32 and rounded once, at the end.
    """
    swapped = x_TND.roll(x_TND.shape[-1] // 2, -1)
    torch.addcmul(torch.mul(x_TND, cos_T1D), swapped, sin_T1D, out=x_TND)


def rotate_reference(
    x_TND: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor
) -> torch.Tensor:
    """The definition, in float64."""
    wide = x_TND.double()
    first, second = wide.chunk(2, dim=-1)
    cos, sin = cos_T1D.double().chunk(2, dim=-1)[0], sin_T1D.double().chunk(2, dim=-1)[1]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x_TND.dtype)
