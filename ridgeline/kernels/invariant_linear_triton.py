"""`invariant_linear` in Triton: one program a tile of outputs, which adds all of K by itself.

Rows behind the last one stand for the last one again, so that a program never does less than its
whole tile; they are not stored. What is compiled depends on shapes of W, dtypes and the device:
the number of rows is an ordinary argument, and rows of x always lie K apart.
Letters as in `invariant_linear`.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.errors import check
from ridgeline.kernels.arrival_triton import await_inputs
from ridgeline.kernels.invariant_linear import InvariantTile
from ridgeline.kernels.launching import launches_early

NEIGHBOURS = 8  # tiles of rows of x that are multiplied with the same weights one after the other
ALIGNMENT = 16  # bytes; other addresses are another kernel


def invariant_linear_triton(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, *, tile: InvariantTile,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None, dtype: torch.dtype | None = None,
    bias_N: torch.Tensor | None = None, out_MN: torch.Tensor | None = None, pdl: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """`scales` of the rows of x and of W (float32), if they are codes; `dtype` of y is that of x
    unless given."""
    (rows, inputs), outputs = x_MK.shape, weight_NK.shape[0]
    _check(x_MK, weight_NK, scales, bias_N, out_MN)
    x_MK = _in_rows(x_MK)
    y_MN = out_MN
    if y_MN is None:
        y_MN = x_MK.new_empty((rows, outputs), dtype=dtype or x_MK.dtype)
    if y_MN.numel() == 0:
        return y_MN
    pdl = launches_early(x_MK.device) if pdl is None else pdl
    tiles_m, tiles_n = triton.cdiv(rows, tile.block_m), triton.cdiv(outputs, tile.block_n)
    _invariant_linear[(tiles_m * tiles_n,)](
        x_MK, weight_NK, scales[0] if scales else x_MK, scales[1] if scales else x_MK,
        x_MK if bias_N is None else bias_N, y_MN, rows, tiles_m, outputs, weight_NK.stride(0),
        y_MN.stride(0), INPUTS=inputs, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, NEIGHBOURS=NEIGHBOURS, STAGES=tile.stages,
        PRECISION="ieee" if x_MK.dtype == torch.float32 else "tf32", SCALED=scales is not None,
        BIAS=bias_N is not None, PDL=pdl, num_warps=tile.warps, num_stages=tile.stages,
        launch_pdl=pdl,
    )  # fmt: skip
    return y_MN


def _in_rows(x_MK: torch.Tensor) -> torch.Tensor:
    """Contiguous and aligned, as nearly all are, so that all take the same kernel."""
    if x_MK.is_contiguous() and x_MK.data_ptr() % ALIGNMENT == 0:
        return x_MK
    return x_MK.clone(memory_format=torch.contiguous_format)


def _check(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor | None,
) -> None:
    (rows, inputs), outputs = x_MK.shape, weight_NK.shape[0]
    check(weight_NK.shape[1] == inputs, "x and W have the same inputs", x=inputs)
    check(x_MK.dtype == weight_NK.dtype, "x and W have one dtype", x=str(x_MK.dtype))
    check(weight_NK.stride(1) == 1 or inputs == 1, "rows of W are contiguous")
    check(bias_N is None or bias_N.is_contiguous(), "the bias is contiguous")
    if scales is not None:
        sizes = [scale.shape[0] for scale in scales]
        check(sizes == [rows, outputs], "each row has a scale", rows=rows, outputs=outputs)
    if out_MN is not None:
        check(out_MN.shape == (rows, outputs), "out has the shape of y", rows=rows)
        check(out_MN.stride(1) == 1 or outputs == 1, "rows of out are contiguous")


@triton.jit
def _place(program, tiles_m, outputs, BLOCK_N: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Tile of rows and tile of outputs: a few tiles of rows go through all outputs together, so
    that weights are read from the cache for all but the first of them."""
    tiles_n = (outputs + BLOCK_N - 1) // BLOCK_N
    band = program // (NEIGHBOURS * tiles_n)
    first = band * NEIGHBOURS
    height = tl.minimum(tiles_m - first, NEIGHBOURS)
    inner = program - first * tiles_n
    return first + inner % height, inner // height


@triton.jit(do_not_specialize=["rows", "tiles_m"])
def _invariant_linear(
    x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, rows, tiles_m, outputs, w_stride,
    y_stride, INPUTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NEIGHBOURS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    EVEN_K: tl.constexpr = INPUTS % BLOCK_K == 0
    tile_m, tile_n = _place(tl.program_id(0), tiles_m, outputs, BLOCK_N, NEIGHBOURS)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_read = tl.minimum(m, rows - 1)
    n_read = tl.minimum(n, outputs - 1)
    x_places = x_ptr + (m_read.to(tl.int64) * INPUTS)[:, None] + k[None]
    w_places = w_ptr + (n_read.to(tl.int64) * w_stride)[:, None] + k[None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in tl.range(0, INPUTS, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            x = tl.load(x_places + begin)
            w = tl.load(w_places + begin)
        else:
            inside = (k < INPUTS - begin)[None]
            x = tl.load(x_places + begin, inside, 0.0)
            w = tl.load(w_places + begin, inside, 0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision=PRECISION)
    if SCALED:
        total *= tl.load(x_scale_ptr + m_read)[:, None] * tl.load(w_scale_ptr + n_read)[None]
    if BIAS:
        total += tl.load(bias_ptr + n_read).to(tl.float32)[None]
    given = (m < rows)[:, None] & (n < outputs)[None]
    y_places = y_ptr + (m.to(tl.int64) * y_stride)[:, None] + n[None]
    tl.store(y_places, total.to(y_ptr.dtype.element_ty), given)
