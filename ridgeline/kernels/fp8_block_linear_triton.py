"""`fp8_block_linear` in Triton: a program takes a tile of rows of W and of x, and all of K or a
part of it, in steps of a block, whose scale is one number for the tile. Parts are added by a second
kernel, always in the order of K.

Letters: M rows, K inputs, N outputs, Q blocks of inputs, S parts of K.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.errors import check
from ridgeline.kernels.arrival_triton import await_inputs
from ridgeline.kernels.fp8_block_linear import BLOCK, BlockTile, Fp8Blocks
from ridgeline.kernels.launching import launches_early

ADDED = 1024  # numbers of y that a program of the second kernel adds


def fp8_block_linear_triton(
    x_MK: torch.Tensor,
    weight: Fp8Blocks,
    *,
    tile: BlockTile,
    bias_N: torch.Tensor | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    (rows, inputs), (outputs, columns) = x_MK.shape, weight.codes_NK.shape
    check(columns == inputs, "x and W agree", inputs=inputs, columns=columns)
    check(BLOCK % tile.block_n == 0, "a tile of W lies in one block", block_n=tile.block_n)
    check(weight.codes_NK.is_contiguous() and weight.scale_PQ.is_contiguous(), "no gaps in W")
    check(bias_N is None or bias_N.is_contiguous(), "the bias is contiguous")
    x_MK = x_MK if x_MK.stride(-1) == 1 else x_MK.contiguous()
    y_MN = x_MK.new_empty((rows, outputs))
    if y_MN.numel() == 0:
        return y_MN
    pdl = launches_early(x_MK.device) if pdl is None else pdl
    tiles_m, tiles_n = triton.cdiv(rows, tile.block_m), triton.cdiv(outputs, tile.block_n)
    sums = y_MN
    if tile.splits > 1:
        sums = x_MK.new_empty((tile.splits, rows, outputs), dtype=torch.float32)
    bias = y_MN if bias_N is None else bias_N
    _fp8_block_linear[(tiles_m * tiles_n * tile.splits,)](
        x_MK, weight.codes_NK, weight.scale_PQ, bias, sums, rows, tiles_m, outputs, x_MK.stride(0),
        INPUTS=inputs, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK=BLOCK, STAGES=tile.stages,
        SPLITS=tile.splits, BIAS=bias_N is not None and tile.splits == 1, PDL=pdl,
        num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip
    if tile.splits > 1:
        _add_parts[(triton.cdiv(y_MN.numel(), ADDED),)](
            sums, bias, y_MN, y_MN.numel(), outputs, SPLITS=tile.splits, SIZE=ADDED,
            BIAS=bias_N is not None, PDL=pdl, launch_pdl=pdl,
        )  # fmt: skip
    return y_MN


@triton.jit(do_not_specialize=["rows", "tiles_m"])
def _fp8_block_linear(
    x_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, rows, tiles_m, outputs, x_stride,
    INPUTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    EVEN_K: tl.constexpr = INPUTS % BLOCK == 0
    Q: tl.constexpr = (INPUTS + BLOCK - 1) // BLOCK
    SHARE: tl.constexpr = (Q + SPLITS - 1) // SPLITS
    split = tl.program_id(0) % SPLITS
    tile_m = tl.program_id(0) // SPLITS % tiles_m  # neighbours share rows of W
    tile_n = tl.program_id(0) // SPLITS // tiles_m
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK)
    m_read = tl.minimum(m, rows - 1).to(tl.int64)
    n_read = tl.minimum(n, outputs - 1).to(tl.int64)
    x_places = x_ptr + m_read[:, None] * x_stride + k[None]
    w_places = w_ptr + n_read[:, None] * INPUTS + k[None]
    scales = scale_ptr + tile_n * BLOCK_N // BLOCK * Q
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for q in tl.range(split * SHARE, tl.minimum(Q, (split + 1) * SHARE), num_stages=STAGES):
        at = q * BLOCK
        if EVEN_K:
            w = tl.load(w_places + at, eviction_policy="evict_first")
            x = tl.load(x_places + at)
        else:
            inside = (at + k < INPUTS)[None]
            w = tl.load(w_places + at, inside, 0.0, eviction_policy="evict_first")
            x = tl.load(x_places + at, inside, 0.0)
        # By way of float32: straight to bfloat16 goes through the slow unit for conversions.
        wide = w.to(tl.float16).to(tl.float32).to(x.dtype)
        total += tl.dot(wide, tl.trans(x), input_precision="ieee") * tl.load(scales + q)
    if BIAS:
        total += tl.load(bias_ptr + n, n < outputs, 0.0).to(tl.float32)[:, None]
    given = (n < outputs)[:, None] & (m < rows)[None]
    m_here = split.to(tl.int64) * rows + m
    y_places = y_ptr + m_here[None] * outputs + n[:, None]
    tl.store(y_places, total.to(y_ptr.dtype.element_ty), given)


@triton.jit
def _add_parts(
    sums_ptr, bias_ptr, y_ptr, numbers, outputs, SPLITS: tl.constexpr, SIZE: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    given = at < numbers
    total = tl.zeros((SIZE,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums_ptr + split * numbers + at, given, 0.0)
    if BIAS:
        total += tl.load(bias_ptr + at % outputs, given, 0.0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), given)
