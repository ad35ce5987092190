"""silu(x @ W1.T) * (x @ W2.T) for the many rows of a prompt, where the tensor cores are the time.

A library would write the product, twice as wide as the result, for another kernel to read. Without
a gate it is as fast as we are. Letters as in `small_linear`.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ridgeline.kernels.silu_mul import silu_mul
from ridgeline.kernels.small_linear import Fusion

LEAST_ROWS = 1024
LEAST_NUMBERS = 1 << 22  # of W: the tiles of smaller ones do not come out even
ALIGNED = 16  # bytes: where the copy engine may begin a row
HOPPER = (9, 0)


def fits_large_m(x_MK: torch.Tensor, weight_NK: torch.Tensor, fusion: Fusion) -> bool:
    """Is one kernel for all of it known to be the fastest here?"""
    is_gate = fusion == Fusion(is_gated=True) and weight_NK.numel() >= LEAST_NUMBERS
    return is_gate and x_MK.shape[0] >= LEAST_ROWS and _can_run(x_MK, weight_NK)


def large_m_linear(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, *, out_MO: torch.Tensor | None = None
) -> torch.Tensor:
    """[M, K], gate above up [N, K] -> [M, N / 2]: added up in float32, gated and rounded once. What
    the kernel cannot take (another device or dtype, odd strides) the library and `silu_mul` do."""
    if _can_run(x_MK, weight_NK) and (out_MO is None or _is_aligned(out_MO)):
        from ridgeline.kernels.large_m_linear_gluon import gated_linear_gluon

        return gated_linear_gluon(x_MK, weight_NK, out_MO=out_MO)
    y_MO = silu_mul(functional.linear(x_MK, weight_NK))
    return y_MO if out_MO is None else out_MO.copy_(y_MO)


def _can_run(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> bool:
    if x_MK.device.type != "cuda" or x_MK.dtype != torch.bfloat16:
        return False
    if torch.cuda.get_device_capability(x_MK.device) != HOPPER or weight_NK.shape[0] % 16:
        return False
    return _is_aligned(x_MK) and _is_aligned(weight_NK)


def _is_aligned(tensor: torch.Tensor) -> bool:
    row = tensor.stride(0) * tensor.element_size()
    return tensor.stride(1) == 1 and row % ALIGNED == 0 and tensor.data_ptr() % ALIGNED == 0
