"""What should fused products give? Each in float32, rounded once; for tests and benchmarks."""

from __future__ import annotations

import torch
from torch.nn import functional

from ridgeline.kernels.fp8_block_linear import Fp8Blocks, dequantize_blocks
from ridgeline.kernels.fp8_linear import Fp8Matrix, dequantize_rows
from ridgeline.kernels.int8_linear import Int8Matrix
from ridgeline.kernels.quantize_rows import E4M3, INT8, LARGEST_OF, LEAST, QuantizedRows
from ridgeline.kernels.rms_norm import rms_norm_reference
from ridgeline.kernels.small_linear import InputNorm
from ridgeline.kernels.stream_linear import ROUNDED_TOGETHER


def add_norm_reference(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> torch.Tensor:
    residual_TE.copy_(residual_TE.float() + x_TE.float())
    return rms_norm_reference(residual_TE, weight_E, eps)


def dequantize_int8(weight: Int8Matrix) -> torch.Tensor:
    """[N, K] float32."""
    return weight.codes_NK.float().mul_(weight.scale_N.float()[:, None])


def fp8_block_linear_reference(
    x_MK: torch.Tensor, weight: Fp8Blocks, *, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """In float32, rounded once."""
    bias = None if bias_N is None else bias_N.float()
    return functional.linear(x_MK.float(), dequantize_blocks(weight), bias).to(x_MK.dtype)


def fp8_linear_reference(
    x_MK: torch.Tensor,
    weight: Fp8Matrix,
    *,
    norm: InputNorm | None = None,
    bias_N: torch.Tensor | None = None,
    gated: bool = False,
    residual_MO: torch.Tensor | None = None,
) -> torch.Tensor:
    """In float32, rounded once."""
    normed_MK = x_MK if norm is None else rms_norm_reference(x_MK, norm.weight_K, norm.eps)
    y_MN = normed_MK.float() @ dequantize_rows(weight).T
    y_MN = y_MN if bias_N is None else y_MN + bias_N.float()
    if gated:
        gate_MO, up_MO = y_MN.chunk(2, -1)
        y_MN = functional.silu(gate_MO) * up_MO
    y_MN = y_MN if residual_MO is None else y_MN + residual_MO.float()
    return y_MN.to(x_MK.dtype)


def int8_linear_reference(
    rows: QuantizedRows,
    weight: Int8Matrix,
    dtype: torch.dtype,
    *,
    bias_N: torch.Tensor | None = None,
    residual_MO: torch.Tensor | None = None,
) -> torch.Tensor:
    """`int8_product` without a gate, to the last bit: whole numbers added up, then four operations
    in float32, each rounded."""
    sums_MN = (rows.codes_MK.double() @ weight.codes_NK.double().T).float()
    y_MN = sums_MN * (rows.scale_M.float()[:, None] * weight.scale_N.float()[None])
    y_MN = y_MN if bias_N is None else y_MN + bias_N.float()
    return (y_MN if residual_MO is None else y_MN + residual_MO.float()).to(dtype)


def invariant_fp8_reference(
    rows: QuantizedRows,
    weight: Fp8Matrix,
    dtype: torch.dtype,
    *,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Of rounded rows, in float32, rounded once."""
    x_MK = rows.codes_MK.float() * rows.scale_M[:, None]
    bias = None if bias_N is None else bias_N.float()
    return functional.linear(x_MK, dequantize_rows(weight), bias).to(dtype)


def rounded_reference(x_MK: torch.Tensor, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """[M, K] float32: each 128 numbers of a row as codes times a scale, the largest of them being
    448 of e4m3 or 127 of int8."""
    blocks_MBk = x_MK.float().view(x_MK.shape[0], -1, ROUNDED_TOGETHER)
    scale_MB1 = blocks_MBk.abs().amax(-1, keepdim=True) / LARGEST_OF[dtype]
    codes_MBk = blocks_MBk / scale_MB1.clamp(min=LEAST)
    codes_MBk = codes_MBk.round() if dtype == INT8 else codes_MBk.to(dtype).float()
    return (codes_MBk * scale_MB1).flatten(1)


def silu_mul_reference(gate_up_TG: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up_TG.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(gate_up_TG.dtype)


def small_linear_reference(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    norm: InputNorm | None = None,
    bias_N: torch.Tensor | None = None,
    gated: bool = False,
    residual_MO: torch.Tensor | None = None,
) -> torch.Tensor:
    """All in float32; rounded once, to the dtype of x."""
    x_dtype, x_MK = x_MK.dtype, x_MK.float()
    normed_MK = x_MK if norm is None else rms_norm_reference(x_MK, norm.weight_K.float(), norm.eps)
    y_MO = normed_MK @ weight_NK.float().T
    y_MO = y_MO if bias_N is None else y_MO + bias_N.float()
    if gated:
        gate_MO, up_MO = y_MO.chunk(2, -1)
        y_MO = functional.silu(gate_MO) * up_MO
    return (y_MO if residual_MO is None else y_MO + residual_MO.float()).to(x_dtype)
