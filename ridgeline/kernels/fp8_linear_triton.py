"""`fp8_linear` in Triton: W is read in e4m3 and multiplied in e4m3 as well, or in the dtype of x.

Work is cut as in `small_linear`: a program takes tiles of rows of W (and of x, if there are many),
and of each all or some of K. Where several programs share a tile, each leaves its sums in the
workspace and the last to arrive adds them up, always in the order of K. One row of x goes without
tensor cores; a norm of it is one factor and its squares are summed beside the products.
Scales, bias, gate and residual are applied to the finished sums.
Letters: M rows, K inputs, N rows of W, O outputs: N, or N / 2 if gated.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.errors import check
from ridgeline.kernels.fp8_linear import MAX_OWN, Fp8Matrix
from ridgeline.kernels.launching import Workspace, launches_early, shared_workspace
from ridgeline.kernels.quantize_rows import E4M3
from ridgeline.kernels.small_linear import InputNorm
from ridgeline.kernels.small_linear_triton import (
    Cut,
    _weight_rows,
    call_lines,
    cut_work,
    merged,
    multiprocessors,
    steps_of,
)
from ridgeline.kernels.tiles import Tile, bucket


def cut_fp8(tile: Tile, rows: int, outputs: int, inputs: int, multiprocessors: int) -> Cut:
    """As `cut_work`; tiles of rows of x that share rows of W are neighbours."""
    high = min(rows, tile.block_m or rows)
    tiles = -(-rows // high) * -(-outputs // tile.block_n)
    return cut_work(tile, high, tiles * tile.block_n, inputs, multiprocessors)


def fp8_linear_triton(
    x_MK: torch.Tensor, weight: Fp8Matrix, *, tile: Tile, x_scale_M: torch.Tensor | None = None,
    dtype: torch.dtype | None = None, norm: InputNorm | None = None,
    bias_N: torch.Tensor | None = None, gated: bool = False,
    residual_MO: torch.Tensor | None = None, out_MO: torch.Tensor | None = None,
    workspace: Workspace | None = None, pdl: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """`dtype` of y is that of x unless given. With x in e4m3, `x_scale_M` are its scales."""
    w_NK, (rows, inputs), outputs = weight.codes_NK, x_MK.shape, weight.codes_NK.shape[0]
    width = outputs // 2 if gated else outputs
    x_MK = x_MK if x_MK.stride(-1) == 1 else x_MK.contiguous()
    check(not gated or (outputs % 2 == 0 and not tile.tma), "gate and up have one height, no TMA")
    _check(x_MK, weight, tile, x_scale_M, norm, bias_N)
    ends = [t for t in (residual_MO, out_MO) if t is not None]
    check(all(t.shape == (rows, width) for t in ends), "residual and out have the shape of y")
    check(all(t.stride(-1) == 1 or width == 1 for t in ends), "rows of the ends are contiguous")
    y_MO = x_MK.new_empty((rows, width), dtype=dtype) if out_MO is None else out_MO
    if y_MO.numel() == 0:
        return y_MO
    cut = cut_fp8(tile, rows, outputs, inputs, multiprocessors(x_MK.device))
    room = _room(workspace, y_MO, cut, tile)
    pdl = (launches_early(x_MK.device) if pdl is None else pdl) and tile.pdl
    _fp8_linear[(cut.programs,)](
        x_MK, w_NK, _descriptor(x_MK, cut.rows, tile) if tile.tma else x_MK,
        _descriptor(w_NK, tile.block_n, tile) if tile.tma else w_NK, weight.scale_N,
        weight.scale_N if x_scale_M is None else x_scale_M, norm.weight_K if norm else x_MK,
        y_MO if bias_N is None else bias_N, y_MO if residual_MO is None else residual_MO, y_MO,
        room.partial_P if room else y_MO, room.arrivals_A if room else y_MO, rows, width, inputs,
        cut.tiles, cut.steps, cut.share, x_MK.stride(0), w_NK.stride(0),
        0 if residual_MO is None else residual_MO.stride(0), y_MO.stride(0),
        norm.eps if norm else 0.0, ROWS=cut.rows, MANY=rows > cut.rows, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, STAGES=tile.stages, DOT=tile.dot, TMA=tile.tma,
        PER_SM=tile.per_sm > 0, MERGE=cut.merges, EVEN_K=inputs % tile.block_k == 0, GATED=gated,
        SCALED=x_scale_M is not None, NORM=norm is not None, BIAS=bias_N is not None,
        RESIDUAL=residual_MO is not None, PDL=pdl, EARLY=tile.early,
        LINES=_lines(tile) if pdl else 0, num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip
    return y_MO


def _descriptor(codes: torch.Tensor, height: int, tile: Tile) -> TensorDescriptor:
    return TensorDescriptor(codes, [*codes.shape], [codes.stride(0), 1], [height, tile.block_k])


def _lines(tile: Tile) -> int:
    """Cache lines of each row of W to call before the wait: a power of two."""
    return bucket(max(1, tile.ahead * tile.block_k // 128)) if tile.ahead else 0


def _room(
    workspace: Workspace | None, y_MO: torch.Tensor, cut: Cut, tile: Tile
) -> Workspace | None:
    if not cut.merges:
        return None
    room = workspace or shared_workspace(y_MO.device)
    room.check_room(cut.slots * _slot_size(cut, tile), cut.tiles)
    return room


def _slot_size(cut: Cut, tile: Tile) -> int:
    """A single row leaves its length as well."""
    return cut.rows * tile.block_n if tile.dot else tile.block_n + 1


def _check(
    x_MK: torch.Tensor,
    weight: Fp8Matrix,
    tile: Tile,
    x_scale_M: torch.Tensor | None,
    norm: InputNorm | None,
    bias_N: torch.Tensor | None,
) -> None:
    (rows, inputs), (outputs, columns) = x_MK.shape, weight.codes_NK.shape
    check(rows <= MAX_OWN, "fp8_linear_triton is for few rows", rows=rows, limit=MAX_OWN)
    check(columns == inputs, "x and W agree", inputs=inputs, columns=columns)
    is_rounded = x_MK.dtype == E4M3
    check(is_rounded == (x_scale_M is not None), "x in e4m3 has scales", dtype=x_MK.dtype)
    alone = rows <= 1 and not is_rounded
    check(tile.dot or alone, "only one row, not rounded, goes without tensor cores", rows=rows)
    check(norm is None or not tile.dot, "no norm is in a product of tensor cores")
    check(is_rounded or not tile.tma, "the copy engine brings both in e4m3")
    vectors = [
        (weight.scale_N, outputs),
        (bias_N, outputs),
        (None if norm is None else norm.weight_K, inputs),
        (x_scale_M, rows),
    ]
    given = [(t, size) for t, size in vectors if t is not None]
    check(all(t.shape == (size,) for t, size in given), "scales, bias and norm have their widths")
    dense = [*(t for t, _ in given), weight.codes_NK]
    check(all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in dense), "rows are contiguous")
    reach = weight.codes_NK.stride(0) * outputs
    check(reach < 1 << 31, "W is within 32 bits of its first number", reach=reach)


@triton.jit
def _load_w(places, at, inputs, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    if EVEN_K:
        w = tl.load(places + at, eviction_policy="evict_first")
    else:
        inside = (at + tl.arange(0, BLOCK_K) < inputs)[None]
        w = tl.load(places + at, inside, 0.0, eviction_policy="evict_first")
    return w


@triton.jit
def _half(ptr, at, inputs, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Of each 16 numbers the first 8: what one load of a thread brings of 16 bits, while a load of
    e4m3 brings all 16. So x needs no exchange between threads."""
    k = at + tl.arange(0, BLOCK_K // 16)[:, None] * 16 + tl.arange(0, 8)[None]
    x = tl.load(ptr + k) if EVEN_K else tl.load(ptr + k, k < inputs, 0.0)
    return x.to(tl.float32)[None]


@triton.jit
def _add_row(
    w, total, squares, x_ptr, norm_ptr, at, inputs, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Adds one step of products to `total` and, for the norm, of squares to `squares`."""
    a = _half(x_ptr, at, inputs, BLOCK_K, EVEN_K)
    b = _half(x_ptr, at + 8, inputs, BLOCK_K, EVEN_K)
    if NORM:
        squares += a * a + b * b
        a *= _half(norm_ptr, at, inputs, BLOCK_K, EVEN_K)
        b *= _half(norm_ptr, at + 8, inputs, BLOCK_K, EVEN_K)
    halves = tl.permute(tl.reshape(w, (BLOCK_N, BLOCK_K // 16, 2, 8)), (0, 1, 3, 2))
    w_a, w_b = tl.split(halves)
    total += tl.sum(w_a.to(tl.float32) * a + w_b.to(tl.float32) * b, 2)
    return total, squares


@triton.jit
def _row_sums(
    x_ptr, norm_ptr, w_places, begin, count, inputs, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, EVEN_K: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The products [BLOCK_N, 1] and the sum of squares [1] of `count` steps, for one row of x."""
    total = tl.zeros((BLOCK_N, BLOCK_K // 16), tl.float32)
    squares = tl.zeros((1, BLOCK_K // 16, 8), tl.float32)
    at = begin * BLOCK_K
    if STAGES == 1:
        w = _load_w(w_places, at, inputs, BLOCK_K, EVEN_K)
        for _ in tl.range(1, count, num_stages=1):
            following = _load_w(w_places, at + BLOCK_K, inputs, BLOCK_K, EVEN_K)
            total, squares = _add_row(
                w, total, squares, x_ptr, norm_ptr, at, inputs, BLOCK_N, BLOCK_K, EVEN_K, NORM
            )
            w = following
            at += BLOCK_K
        total, squares = _add_row(
            w, total, squares, x_ptr, norm_ptr, at, inputs, BLOCK_N, BLOCK_K, EVEN_K, NORM
        )
    else:
        for step in tl.range(0, count, num_stages=STAGES):
            here = at + step * BLOCK_K
            w = _load_w(w_places, here, inputs, BLOCK_K, EVEN_K)
            total, squares = _add_row(
                w, total, squares, x_ptr, norm_ptr, here, inputs, BLOCK_N, BLOCK_K, EVEN_K, NORM
            )
    length = tl.sum(tl.sum(squares, 2), 1) if NORM else tl.zeros((1,), tl.float32)
    return tl.sum(total, 1)[:, None], length


@triton.jit
def _dot_sums(
    x_desc, w_desc, x_places, w_places, x_row, w_row, begin, count, inputs, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """The products [BLOCK_N, ROWS] of `count` steps: W is the tall operand of the tensor cores."""
    total = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for step in tl.range(0, count, num_stages=STAGES):
        at = (begin + step) * BLOCK_K
        if TMA:
            w = w_desc.load([w_row, at])
            x = x_desc.load([x_row, at])
        else:
            w = _load_w(w_places, at, inputs, BLOCK_K, EVEN_K)
            if EVEN_K:
                x = tl.load(x_places + at)
            else:
                x = tl.load(x_places + at, (at + tl.arange(0, BLOCK_K) < inputs)[None], 0.0)
        if x.dtype != w.dtype:
            # By way of float32: straight to bfloat16 goes through the slow unit for conversions.
            w = w.to(tl.float16).to(tl.float32).to(x.dtype)
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    return total


@triton.jit
def _finish(
    sums, lengths, scale_ptr, x_scale_ptr, bias_ptr, residual_ptr, y_ptr, tile, first_row, rows,
    width, inputs, residual_stride, y_stride, eps, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    H: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """From finished sums [BLOCK_N, ROWS] to outputs [ROWS, H], stored."""
    n = tile * H + _weight_rows(tl.arange(0, BLOCK_N), tile, width, H, GATED)
    m = first_row + tl.arange(0, ROWS)
    sums *= tl.load(scale_ptr + n)[:, None]
    if SCALED:
        sums *= tl.load(x_scale_ptr + m, m < rows, 0.0)[None]
    if NORM:
        sums *= tl.rsqrt(lengths / inputs + eps)[None]
    if BIAS:
        sums += tl.load(bias_ptr + n).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, H, ROWS)), (1, 2, 0)))
        sums = gate / (1.0 + tl.exp(-gate)) * up
    o = (tile * H + tl.arange(0, H))[:, None]
    given = (o < width) & (m < rows)[None]
    m = m[None].to(tl.int64)
    if RESIDUAL:
        sums += tl.load(residual_ptr + m * residual_stride + o, given, 0.0).to(tl.float32)
    tl.store(y_ptr + m * y_stride + o, sums.to(y_ptr.dtype.element_ty), given)


@triton.jit
def _part(
    x_ptr, w_ptr, x_desc, w_desc, scale_ptr, x_scale_ptr, norm_ptr, bias_ptr, residual_ptr, y_ptr,
    partial_ptr, arrivals_ptr, program, place, begin, count, rows, width, inputs, steps, share,
    x_stride, w_stride, residual_stride, y_stride, eps, ROWS: tl.constexpr, MANY: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, H: tl.constexpr, STAGES: tl.constexpr,
    DOT: tl.constexpr, TMA: tl.constexpr, PER_SM: tl.constexpr, MERGE: tl.constexpr,
    EVEN_K: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """Steps `begin` to `begin + count` of one tile; its outputs, if no sums are missing after."""
    tile = place
    first_row = 0
    if MANY:
        high = (rows + ROWS - 1) // ROWS
        tile = place // high
        first_row = place % high * ROWS
    i = tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    w_rows = tile * H + _weight_rows(i, tile, width, H, GATED)
    w_places = w_ptr + w_rows[:, None] * w_stride + k[None]
    lengths = tl.zeros((ROWS,), tl.float32)
    if DOT:
        x_rows = tl.minimum(first_row + m, rows - 1)[:, None]
        sums = _dot_sums(
            x_desc, w_desc, x_ptr + x_rows * x_stride + k[None], w_places, first_row, tile * H,
            begin, count, inputs, ROWS, BLOCK_N, BLOCK_K, STAGES, TMA, EVEN_K,
        )  # fmt: skip
    else:
        sums, lengths = _row_sums(
            x_ptr, norm_ptr, w_places, begin, count, inputs, BLOCK_N, BLOCK_K, STAGES, EVEN_K, NORM
        )
    if TRIGGER:
        gdc_launch_dependents()
    is_mine = True
    if MERGE:
        is_mine, sums, lengths = merged(
            sums, lengths, partial_ptr, arrivals_ptr, program, place, steps, share, i, m, ROWS,
            BLOCK_N, PER_SM, NORM, ROWS * BLOCK_N if DOT else BLOCK_N + 1,
        )  # fmt: skip
    if is_mine:
        _finish(
            sums, lengths, scale_ptr, x_scale_ptr, bias_ptr, residual_ptr, y_ptr, tile, first_row,
            rows, width, inputs, residual_stride, y_stride, eps, ROWS, BLOCK_N, H, GATED, SCALED,
            NORM, BIAS, RESIDUAL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "tiles", "steps", "share"])
def _fp8_linear(
    x_ptr, w_ptr, x_desc, w_desc, scale_ptr, x_scale_ptr, norm_ptr, bias_ptr, residual_ptr, y_ptr,
    partial_ptr, arrivals_ptr, rows, width, inputs, tiles, steps, share, x_stride, w_stride,
    residual_stride, y_stride, eps, ROWS: tl.constexpr, MANY: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, TMA: tl.constexpr,
    PER_SM: tl.constexpr, MERGE: tl.constexpr, EVEN_K: tl.constexpr, GATED: tl.constexpr,
    SCALED: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    PDL: tl.constexpr, EARLY: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    H: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    program = tl.program_id(0)
    at, end = steps_of(program, tiles, steps, share, PER_SM)

    # Weights depend on no earlier kernel: some are on their way before the wait.
    if LINES > 0:
        place = at // steps
        begin = at - place * steps
        tile = place // ((rows + ROWS - 1) // ROWS) if MANY else place
        last = tl.minimum(begin + end - at, steps) * BLOCK_K - 1
        ks = tl.minimum(begin * BLOCK_K + tl.arange(0, LINES) * 128, tl.minimum(last, inputs - 1))
        ns = tile * H + _weight_rows(tl.arange(0, BLOCK_N), tile, width, H, GATED)
        call_lines(w_ptr + (ns * w_stride)[:, None] + ks[None], 1)
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()

    while at < end:
        place = at // steps
        begin = at - place * steps
        count = tl.minimum(end - at, steps - begin) if PER_SM else end - at
        at += count
        _part(
            x_ptr, w_ptr, x_desc, w_desc, scale_ptr, x_scale_ptr, norm_ptr, bias_ptr, residual_ptr,
            y_ptr, partial_ptr, arrivals_ptr, program, place, begin, count, rows, width, inputs,
            steps, share, x_stride, w_stride, residual_stride, y_stride, eps, ROWS, MANY, BLOCK_N,
            BLOCK_K, H, STAGES, DOT, TMA, PER_SM, MERGE, EVEN_K, GATED, SCALED, NORM, BIAS,
            RESIDUAL, PDL and not EARLY,
        )  # fmt: skip
