"""`qk_norm_rope_write` in Triton: one program a few heads of a token, both halves side by side.

Letters as in `qk_norm_rope_write`.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.errors import check
from ridgeline.kernels.launching import launches_early
from ridgeline.kernels.qk_norm_rope_write import HeadNorms, PagedKV

FEW_TOKENS = 64  # up to here a program takes few heads, so that all of the device has work


def qk_norm_rope_write_triton(
    qkv_TX: torch.Tensor,
    table_L2D: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    kv: PagedKV,
    *,
    norms: HeadNorms | None = None,
    block_heads: int | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    tokens, width = qkv_TX.shape
    _, block_size, kv_heads, size = kv.k_NSKD.shape
    heads = width // size - 2 * kv_heads
    _check(qkv_TX, table_L2D, positions_T, slots_T, kv, heads)
    q_THD = qkv_TX.new_empty((tokens, heads, size))
    if tokens == 0:
        return q_THD
    pdl = launches_early(qkv_TX.device) if pdl is None else pdl
    tile = block_heads or (4 if tokens <= FEW_TOKENS else 16)
    _qk_norm_rope_write[(tokens, triton.cdiv(heads + 2 * kv_heads, tile))](
        qkv_TX,
        table_L2D,
        positions_T,
        slots_T,
        norms.q_weight_D if norms else qkv_TX,
        norms.k_weight_D if norms else qkv_TX,
        q_THD,
        kv.k_NSKD,
        kv.v_NSKD,
        heads,
        kv_heads,
        norms.eps if norms else 0.0,
        qkv_TX.stride(0),
        *kv.k_NSKD.stride()[:3],
        *kv.v_NSKD.stride()[:3],
        BLOCK_SIZE=block_size,
        SIZE=size,
        HALF=triton.next_power_of_2(size // 2),
        HEADS=tile,
        NORM=norms is not None,
        PDL=pdl,
        num_warps=1 if tile <= 4 else 4,
        launch_pdl=pdl,
    )
    return q_THD


def _check(
    qkv_TX: torch.Tensor,
    table_L2D: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    kv: PagedKV,
    heads: int,
) -> None:
    _, _, kv_heads, size = kv.k_NSKD.shape
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
    qkv_ptr,
    table_ptr,
    positions_ptr,
    slots_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    heads,
    kv_heads,
    eps,
    qkv_stride,
    k_block,
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_q = head < heads
    is_v = (head >= heads + kv_heads) & (head < heads + 2 * kv_heads)
    is_k = (head >= heads) & (head < heads + kv_heads)
    d = tl.arange(0, HALF)
    inside = d < SIZE // 2
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
    turned_first = (x * cos - y * sin).to(q_ptr.dtype.element_ty)
    turned_second = (y * cos + x * sin).to(q_ptr.dtype.element_ty)

    to = q_ptr + (token * heads + head[:, None]) * SIZE + d[None]
    chosen = is_q[:, None] & inside[None]
    tl.store(to, turned_first, chosen)
    tl.store(to + SIZE // 2, turned_second, chosen)

    written = slot >= 0
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    to = k_cache_ptr + block * k_block + offset * k_slot + (head - heads)[:, None] * k_head
    to += d[None]
    chosen = (is_k & written)[:, None] & inside[None]
    tl.store(to, turned_first, chosen)
    tl.store(to + SIZE // 2, turned_second, chosen)
    to = v_cache_ptr + block * v_block + offset * v_slot
    to += (head - heads - kv_heads)[:, None] * v_head + d[None]
    chosen = (is_v & written)[:, None] & inside[None]
    tl.store(to, first.to(v_cache_ptr.dtype.element_ty), chosen)
    tl.store(to + SIZE // 2, second.to(v_cache_ptr.dtype.element_ty), chosen)
