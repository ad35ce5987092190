"""Rows in e4m3 or int8 with a scale each, in the pass that makes them: from a norm, a SiLU, or as
they are.

The largest number of a row becomes 448, the largest that e4m3 has, or 127. All in float32, rounded
once.
Letters: M rows, K their width, W the width of x: 2 * K where it is gate and up, else K.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn import functional

from ridgeline.errors import check
from ridgeline.kernels.small_linear import InputNorm

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = 448.0  # of e4m3
LARGEST_OF = {E4M3: LARGEST, INT8: 127.0}
LEAST = 1e-30  # a row of smaller numbers counts as this large: no scale is zero
MAX_SIZE = 16384  # a row lies in the registers of one program
FIRST_CAPABILITY = (8, 9)  # of NVIDIA GPUs that convert to and multiply in e4m3


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """code * scale, in e4m3 or int8, and float32."""

    codes_MK: torch.Tensor
    scale_M: torch.Tensor


@lru_cache(maxsize=64)
def has_e4m3(device: torch.device) -> bool:
    """This device converts to and from e4m3 and multiplies in it."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def quantize_rows(
    x_MW: torch.Tensor,
    *,
    silu: bool = False,
    norm: InputNorm | None = None,
    residual_MK: torch.Tensor | None = None,
    dtype: torch.dtype = E4M3,
    pdl: bool | None = None,
) -> QuantizedRows:
    """Of x; or, in this order and as far as asked for, of silu(gate) * up where x is gate and up,
    of its sum with `residual_MK`, which becomes that sum, and of the RMS norm. A row with NaN or
    infinity stays one that no product hides."""
    if has_e4m3(x_MW.device) and x_MW.shape[1] // (2 if silu else 1) <= MAX_SIZE:
        from ridgeline.kernels.quantize_rows_triton import quantize_rows_triton

        x_MW = x_MW if x_MW.stride(-1) == 1 else x_MW.contiguous()
        return quantize_rows_triton(
            x_MW, silu=silu, norm=norm, residual_MK=residual_MK, dtype=dtype, pdl=pdl
        )
    return quantize_rows_reference(x_MW, silu=silu, norm=norm, residual_MK=residual_MK, dtype=dtype)


def quantize_rows_reference(
    x_MW: torch.Tensor,
    *,
    silu: bool = False,
    norm: InputNorm | None = None,
    residual_MK: torch.Tensor | None = None,
    dtype: torch.dtype = E4M3,
) -> QuantizedRows:
    wide_MK = x_MW.float()
    if silu:
        check(x_MW.shape[1] % 2 == 0, "gate and up have one width", both=x_MW.shape[1])
        gate_MK, up_MK = wide_MK.chunk(2, -1)
        wide_MK = functional.silu(gate_MK) * up_MK
    if residual_MK is not None:
        wide_MK = residual_MK.copy_(residual_MK.float() + wide_MK).float()
    if norm is not None:
        variance_M1 = wide_MK.pow(2).mean(-1, keepdim=True)
        wide_MK = wide_MK * torch.rsqrt(variance_M1 + norm.eps) * norm.weight_K.float()
    return _round(wide_MK, dtype)


def _round(wide_MK: torch.Tensor, dtype: torch.dtype) -> QuantizedRows:
    if wide_MK.shape[1] == 0:
        return QuantizedRows(wide_MK.to(dtype), wide_MK.new_ones(wide_MK.shape[0]))
    largest_M = wide_MK.abs().amax(-1).clamp_min_(LEAST)
    scaled_MK = wide_MK * (LARGEST_OF[dtype] / largest_M)[:, None]
    if dtype == INT8:  # which has no NaN: the scale says it
        scaled_MK = scaled_MK.round_().nan_to_num_()
    return QuantizedRows(scaled_MK.to(dtype), largest_M.div_(LARGEST_OF[dtype]))
