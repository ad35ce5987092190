"""`qk_norm_rope_write` in Triton: one program a few heads of a token, both halves side by side.

Letters as in `qk_norm_rope_write`.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.errors import check
from ridgeline.kernels.arrival_triton import await_inputs
from ridgeline.kernels.launching import launches_early
from ridgeline.kernels.paged_kv import PagedKV
from ridgeline.kernels.paged_kv_triton import (
    encoded_4,
    encoded_8,
    rotated_halves,
    scaling,
    scaling_strides,
)
from ridgeline.kernels.qk_norm_rope_write import HeadNorms

FEW_TOKENS = 64  # up to here a program takes few heads, so that all of the device has work
PRODUCT_ROWS = 16  # of tl.dot, which turns keys of 4 bits


def qk_norm_rope_write_triton(
    qkv_TX: torch.Tensor, table_L2D: torch.Tensor, positions_T: torch.Tensor, slots_T: torch.Tensor,
    kv: PagedKV, *, norms: HeadNorms | None = None, block_heads: int | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    tokens, width = qkv_TX.shape
    _, block_size, kv_heads, _ = kv.k_NSKD.shape
    size = kv.head_dim
    heads = width // size - 2 * kv_heads
    _check(qkv_TX, table_L2D, positions_T, slots_T, kv, heads)
    q_THD = qkv_TX.new_empty((tokens, heads, size))
    if tokens == 0:
        return q_THD
    pdl = launches_early(qkv_TX.device) if pdl is None else pdl
    tile = block_heads or (4 if tokens <= FEW_TOKENS else 16)
    if kv.code_bits == 4:
        tile = PRODUCT_ROWS
    _qk_norm_rope_write[(tokens, triton.cdiv(heads + 2 * kv_heads, tile))](
        qkv_TX, table_L2D, positions_T, slots_T, norms.q_weight_D if norms else qkv_TX,
        norms.k_weight_D if norms else qkv_TX, q_THD, kv.k_NSKD, kv.v_NSKD, *scaling(kv), heads,
        kv_heads, norms.eps if norms else 0.0, qkv_TX.stride(0), *kv.k_NSKD.stride()[:3],
        *kv.v_NSKD.stride()[:3], *scaling_strides(kv), BLOCK_SIZE=block_size, SIZE=size,
        HALF=triton.next_power_of_2(size // 2), HEADS=tile, NORM=norms is not None,
        CODES=kv.code_bits, PRECISION="ieee" if qkv_TX.dtype == torch.float32 else "tf32", PDL=pdl,
        num_warps=1 if tile <= 4 else 4, launch_pdl=pdl,
    )  # fmt: skip
    return q_THD


def _check(
    qkv_TX: torch.Tensor,
    table_L2D: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    kv: PagedKV,
    heads: int,
) -> None:
    kv_heads, size = kv.k_NSKD.shape[2], kv.head_dim
    tokens, width = qkv_TX.shape
    fits = heads > 0 and width == (heads + 2 * kv_heads) * size and size % 2 == 0
    check(fits, "the packed width is (H + 2 K) heads of even size", width=width, size=size)
    check(kv.v_NSKD.shape == kv.k_NSKD.shape, "keys and values have one shape")
    named = positions_T.shape == slots_T.shape == (tokens,)
    check(named, "each token has a position and a slot", tokens=tokens)
    dense = positions_T.is_contiguous() and slots_T.is_contiguous() and table_L2D.is_contiguous()
    inner = qkv_TX.stride(1) == kv.k_NSKD.stride(3) == kv.v_NSKD.stride(3) == 1
    check(dense and inner, "heads, tables and indices are contiguous")
    check(table_L2D.shape[1:] == (2, size), "the table has cosines and sines of a head")


@triton.jit
def _qk_norm_rope_write(
    qkv_ptr, table_ptr, positions_ptr, slots_ptr, q_weight_ptr, k_weight_ptr, q_ptr, k_cache_ptr,
    v_cache_ptr, k_scales_ptr, v_scales_ptr, k_lows_ptr, v_lows_ptr, heads, kv_heads, eps,
    qkv_stride, k_block, k_slot, k_head, v_block, v_slot, v_head, scale_block, scale_slot,
    scale_head, BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, NORM: tl.constexpr, CODES: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_q = head < heads
    is_v = (head >= heads + kv_heads) & (head < heads + 2 * kv_heads)
    is_k = (head >= heads) & (head < heads + kv_heads)
    d = tl.arange(0, HALF)
    inside = d < SIZE // 2
    await_inputs(PDL)
    given = (head < heads + 2 * kv_heads)[:, None] & inside[None]
    places = qkv_ptr + token * qkv_stride + head[:, None] * SIZE + d[None]
    first = tl.load(places, given, 0.0).to(tl.float32)
    second = tl.load(places + SIZE // 2, given, 0.0).to(tl.float32)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    turn = table_ptr + position * 2 * SIZE + d
    cos = tl.load(turn, inside, 1.0)[None]
    sin = tl.load(turn + SIZE + SIZE // 2, inside, 0.0)[None]
    x, y = first, second
    if NORM:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / SIZE + eps)[:, None]
        q_first = tl.load(q_weight_ptr + d, inside, 0.0).to(tl.float32)
        q_second = tl.load(q_weight_ptr + SIZE // 2 + d, inside, 0.0).to(tl.float32)
        k_first = tl.load(k_weight_ptr + d, inside, 0.0).to(tl.float32)
        k_second = tl.load(k_weight_ptr + SIZE // 2 + d, inside, 0.0).to(tl.float32)
        x = first * scale * tl.where(is_q[:, None], q_first[None], k_first[None])
        y = second * scale * tl.where(is_q[:, None], q_second[None], k_second[None])
    wide_first = x * cos - y * sin
    wide_second = y * cos + x * sin
    rotated_first = wide_first.to(q_ptr.dtype.element_ty)
    rotated_second = wide_second.to(q_ptr.dtype.element_ty)

    to = q_ptr + (token * heads + head[:, None]) * SIZE + d[None]
    chosen = is_q[:, None] & inside[None]
    tl.store(to, rotated_first, chosen)
    tl.store(to + SIZE // 2, rotated_second, chosen)

    written = slot >= 0
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    key, value = head - heads, head - heads - kv_heads
    k_to = k_cache_ptr + block * k_block + offset * k_slot + key[:, None] * k_head + d[None]
    v_to = v_cache_ptr + block * v_block + offset * v_slot + value[:, None] * v_head + d[None]
    is_k, is_v = tl.where(written, is_k, False), tl.where(written, is_v, False)
    k_chosen, v_chosen = is_k[:, None] & inside[None], is_v[:, None] & inside[None]
    if CODES == 0:
        tl.store(k_to, wide_first.to(k_cache_ptr.dtype.element_ty), k_chosen)
        tl.store(k_to + SIZE // 2, wide_second.to(k_cache_ptr.dtype.element_ty), k_chosen)
        tl.store(v_to, first.to(v_cache_ptr.dtype.element_ty), v_chosen)
        tl.store(v_to + SIZE // 2, second.to(v_cache_ptr.dtype.element_ty), v_chosen)
    else:
        first = tl.where(is_k[:, None], wide_first, first)
        second = tl.where(is_k[:, None], wide_second, second)
        at = block * scale_block + offset * scale_slot
        k_at, v_at = at + key * scale_head, at + value * scale_head
        if CODES == 8:
            first_code, second_code, scale = encoded_8(first, second)
            tl.store(k_to, first_code, k_chosen)
            tl.store(k_to + SIZE // 2, second_code, k_chosen)
            tl.store(v_to, first_code, v_chosen)
            tl.store(v_to + SIZE // 2, second_code, v_chosen)
        else:
            k_first, k_second = rotated_halves(first, second, HALF, PRECISION)
            first = tl.where(is_k[:, None], k_first, first)
            second = tl.where(is_k[:, None], k_second, second)
            pair, scale, low = encoded_4(first, second)
            tl.store(k_to, pair, k_chosen)
            tl.store(v_to, pair, v_chosen)
            tl.store(k_lows_ptr + k_at, low.to(tl.float16), is_k)
            tl.store(v_lows_ptr + v_at, low.to(tl.float16), is_v)
        tl.store(k_scales_ptr + k_at, scale.to(tl.float16), is_k)
        tl.store(v_scales_ptr + v_at, scale.to(tl.float16), is_v)
