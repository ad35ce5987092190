"""x @ W.T whose rows do not depend, to the last bit, on how many rows there are or which they are.

Every number of the result is the sum of the same products in the same order: one tile size for
each shape and dtype of W, whatever the number of rows, and a program adds all of K, from the first
column to the last. A library chooses by the number of rows, and so do our kernels for few of them.
After "Defeating Nondeterminism in LLM Inference" (Thinking Machines Lab, 2025), where the cause is
told: not races, but the size of the batch.
Letters: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from ridgeline.kernels.fp8_linear import MANY_NUMBERS, Fp8Matrix, dequantize_rows, takes_e4m3
from ridgeline.kernels.quantize_rows import quantize_rows

WIDE = 8192  # outputs above which tiles of 128 of them still keep a device busy


@dataclass(frozen=True, slots=True)
class InvariantTile:
    """Rows of x, rows of W and columns of both that a program multiplies in one step."""

    block_m: int = 64
    block_n: int = 64
    block_k: int = 64
    warps: int = 4
    stages: int = 4


def invariant_linear(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    bias_N: torch.Tensor | None = None,
    out_MN: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ W.T + bias, added up in float32 and rounded once to the dtype of x (of `out_MN`, if it
    is given). On a CPU the reference, which promises nothing about bits."""
    if not x_MK.is_cuda:
        dtype = x_MK.dtype if out_MN is None else out_MN.dtype
        y_MN = invariant_linear_reference(x_MK, weight_NK, bias_N=bias_N, dtype=dtype)
        return y_MN if out_MN is None else out_MN.copy_(y_MN)
    from ridgeline.kernels.invariant_linear_triton import invariant_linear_triton

    tile = invariant_tile(weight_NK.shape[0], weight_NK.dtype)
    return invariant_linear_triton(x_MK, weight_NK, tile=tile, bias_N=bias_N, out_MN=out_MN)


def invariant_fp8_linear(
    x_MK: torch.Tensor, weight: Fp8Matrix, *, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """The same with weights in e4m3. Each row of x, be it the only one, becomes e4m3 as well where
    `takes_e4m3` says so; elsewhere the weights become the dtype of x, some rows at a time."""
    if not takes_e4m3(x_MK, weight):
        return _by_pieces(x_MK, weight, bias_N)
    from ridgeline.kernels.invariant_linear_triton import invariant_linear_triton

    rows = quantize_rows(x_MK)
    return invariant_linear_triton(
        rows.codes_MK,
        weight.codes_NK,
        tile=invariant_tile(weight.codes_NK.shape[0], weight.codes_NK.dtype),
        scales=(rows.scale_M, weight.scale_N),
        dtype=x_MK.dtype,
        bias_N=bias_N,
    )


def invariant_tile(outputs: int, dtype: torch.dtype) -> InvariantTile:
    """By the shape and the dtype of W alone."""
    if dtype == torch.float32:
        return InvariantTile(block_k=32, stages=2)
    block_n = 128 if outputs > WIDE else 64
    return InvariantTile(block_n=block_n, block_k=64 if dtype.itemsize == 2 else 128)


def invariant_linear_reference(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    bias_N: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """In float32, rounded once, to the dtype of x unless told."""
    bias = None if bias_N is None else bias_N.float()
    return functional.linear(x_MK.float(), weight_NK.float(), bias).to(dtype or x_MK.dtype)


def _by_pieces(x_MK: torch.Tensor, weight: Fp8Matrix, bias_N: torch.Tensor | None) -> torch.Tensor:
    """Where the cuts fall depends on W alone."""
    outputs, inputs = weight.codes_NK.shape
    step = max(1, MANY_NUMBERS // max(1, inputs))
    y_MN = x_MK.new_empty((x_MK.shape[0], outputs))
    for begin in range(0, outputs, step):
        part = slice(begin, begin + step)
        some = Fp8Matrix(weight.codes_NK[part], weight.scale_N[part])
        bias = None if bias_N is None else bias_N[part]
        weight_NK = dequantize_rows(some).to(x_MK.dtype)
        invariant_linear(x_MK, weight_NK, bias_N=bias, out_MN=y_MN[:, part])
    return y_MN
