"""`int8_rows` in Triton: a program takes some columns of one row.

Letters as in `int8_rows`.
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

BLOCK = 2048  # columns: 16 bytes of codes for each thread of four warps


def int8_rows_triton(
    codes_NK: torch.Tensor,
    scale_N: torch.Tensor,
    rows_T: torch.Tensor,
    dtype: torch.dtype,
    *,
    pdl: bool | None = None,
) -> torch.Tensor:
    (tokens,), width = rows_T.shape, codes_NK.shape[1]
    check(codes_NK.stride(1) == 1 or width == 1, "rows of codes are contiguous")
    check(rows_T.is_contiguous() and scale_N.is_contiguous(), "rows and scales are contiguous")
    y_TK = torch.empty((tokens, width), dtype=dtype, device=codes_NK.device)
    if y_TK.numel() == 0:
        return y_TK
    pdl = launches_early(codes_NK.device) if pdl is None else pdl
    _int8_rows[(tokens, triton.cdiv(width, BLOCK))](
        codes_NK, scale_N, rows_T, y_TK, width, codes_NK.stride(0), BLOCK=BLOCK, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return y_TK


@triton.jit
def _int8_rows(
    codes_ptr, scale_ptr, rows_ptr, y_ptr, width, stride, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < width
    await_inputs(PDL)
    row = tl.load(rows_ptr + token).to(tl.int64)
    codes = tl.load(codes_ptr + row * stride + k, inside, 0).to(tl.float32)
    y = codes * tl.load(scale_ptr + row).to(tl.float32)
    tl.store(y_ptr + token * width + k, y.to(y_ptr.dtype.element_ty), inside)
