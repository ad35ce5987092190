"""`quantize_rows` in Triton: one program a row, the whole row in registers.

Letters as in `quantize_rows`.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from ridgeline.errors import check
from ridgeline.kernels.arrival_triton import await_inputs
from ridgeline.kernels.launching import launches_early
from ridgeline.kernels.quantize_rows import E4M3, INT8, LARGEST_OF, LEAST, QuantizedRows
from ridgeline.kernels.small_linear import InputNorm

(LEAST_BITS,) = struct.unpack("<i", struct.pack("<f", LEAST))
WHOLE = 1.5 * 2**23  # what is added to it in float32 becomes a whole number


def quantize_rows_triton(
    x_MW: torch.Tensor,
    *,
    silu: bool = False,
    norm: InputNorm | None = None,
    residual_MK: torch.Tensor | None = None,
    dtype: torch.dtype = E4M3,
    pdl: bool | None = None,
) -> QuantizedRows:
    """`dtype` float32 keeps what would be e4m3: Triton's interpreter rounds to that wrongly."""
    rows, size = x_MW.shape[0], x_MW.shape[1] // (2 if silu else 1)
    _check(x_MW, size, silu, norm, residual_MK)
    codes_MK = torch.empty((rows, size), dtype=dtype, device=x_MW.device)
    scale_M = torch.empty(rows, dtype=torch.float32, device=x_MW.device)
    if codes_MK.numel() == 0:
        return QuantizedRows(codes_MK, scale_M.fill_(1.0))
    block = triton.next_power_of_2(size)
    pdl = launches_early(x_MW.device) if pdl is None else pdl
    _quantize_rows[(rows,)](
        x_MW, x_MW if residual_MK is None else residual_MK, norm.weight_K if norm else x_MW,
        codes_MK, scale_M, size, x_MW.stride(0),
        0 if residual_MK is None else residual_MK.stride(0), norm.eps if norm else 0.0,
        LARGEST=LARGEST_OF.get(dtype, LARGEST_OF[E4M3]), LEAST=LEAST, LEAST_BITS=LEAST_BITS,
        WHOLE=WHOLE, INTEGER=dtype == INT8, BLOCK=block, SILU=silu,
        RESIDUAL=residual_MK is not None, NORM=norm is not None, PDL=pdl,
        num_warps=min(max(block // 512, 1), 16), launch_pdl=pdl,
    )  # fmt: skip
    return QuantizedRows(codes_MK, scale_M)


def _check(
    x_MW: torch.Tensor,
    size: int,
    silu: bool,
    norm: InputNorm | None,
    residual_MK: torch.Tensor | None,
) -> None:
    check(not silu or x_MW.shape[1] % 2 == 0, "gate and up have one width", both=x_MW.shape[1])
    check(norm is None or norm.weight_K.shape == (size,), "the norm has the width of x")
    fits = residual_MK is None or residual_MK.shape == (x_MW.shape[0], size)
    check(fits, "the residual has the shape of the rows", size=size)
    beside = residual_MK, None if norm is None else norm.weight_K
    tensors = [x_MW, *(t for t in beside if t is not None)]
    dense = all(t.stride(-1) == 1 or t.shape[-1] <= 1 for t in tensors)
    check(dense, "rows of quantize_rows are contiguous")


@triton.jit
def _quantize_rows(
    x_ptr, residual_ptr, norm_ptr, codes_ptr, scale_ptr, size, x_stride, residual_stride, eps,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, LEAST_BITS: tl.constexpr, WHOLE: tl.constexpr,
    INTEGER: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < size
    weight = tl.load(norm_ptr + k, inside, 0.0).to(tl.float32) if NORM else 1.0
    await_inputs(PDL)
    places = x_ptr + row * x_stride + k
    x = tl.load(places, inside, 0.0).to(tl.float32)
    if SILU:
        x = x / (1.0 + tl.exp(-x)) * tl.load(places + size, inside, 0.0).to(tl.float32)
    if RESIDUAL:
        places = residual_ptr + row * residual_stride + k
        total = x + tl.load(places, inside, 0.0).to(tl.float32)
        rounded = total.to(residual_ptr.dtype.element_ty)
        tl.store(places, rounded, inside)
        x = rounded.to(tl.float32)
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * weight
    if INTEGER:
        # As whole numbers, of which NaN is the largest: a scale of NaN is what is left of it.
        bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 0)
        largest = tl.maximum(bits, LEAST_BITS).to(tl.float32, bitcast=True)
        wholes = x * (LARGEST / largest) + WHOLE
        codes = wholes.to(tl.int32, bitcast=True).to(codes_ptr.dtype.element_ty)
    else:
        largest = tl.maximum(tl.max(tl.abs(x), 0), LEAST)
        codes = (x * (LARGEST / largest)).to(codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row * size + k, codes, inside)
    tl.store(scale_ptr + row, largest / LARGEST)
