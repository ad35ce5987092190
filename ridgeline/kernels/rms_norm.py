"""x / rms(x) * weight: divide each row by its root mean square; and what stands between two parts
of a layer, residual += x, then the norm of the sum.

All in float32, rounded once at the end. (Transformers rounds before the weight as well, so in 16
bits we are as near to its results as its own rounding.) Letters: T
tokens, E the normalised dimension.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn import functional

MAX_SIZE = 16384  # a row lies in the registers of one program


def rms_norm(x: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., E] -> [..., E] in the dtype of x."""
    if x.device.type == "cpu" and x.dim() == 2:
        from ridgeline.kernels.cpu import elementwise

        if elementwise.serves(x):
            return elementwise.add_norm(None, x, weight_E, eps)
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return _float32(x, weight_E, eps)
    if x.is_cuda and x.dim() == 2 and x.stride(1) == 1 and x.shape[1] <= MAX_SIZE:
        from ridgeline.kernels.add_norm_triton import add_norm_triton

        return add_norm_triton(None, x, weight_E, eps)
    return functional.rms_norm(x, weight_E.shape, weight_E, eps)


def rms_norm_reference(x: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True)
    return (wide * torch.rsqrt(variance + eps) * weight_E).to(x.dtype)


def _float32(x: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """The same with fewer calls: for small models on a CPU the calls are the time."""
    length = torch.linalg.vector_norm(x, 2, -1, True)
    variance = torch.addcmul(_scalar(eps, x.device), length, length, value=1.0 / x.shape[-1])
    return torch.mul(x, variance.rsqrt_()).mul_(weight_E)


@lru_cache(maxsize=16)
def _scalar(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, device=device)


def add_norm(
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    *,
    pdl: bool | None = None,
) -> torch.Tensor:
    """The normed sum, [T, E]; `residual_TE` becomes the sum, which is rounded to its dtype and then
    normalised, as when both are done one after the other. Rows of both may have any stride."""
    if x_TE.is_cuda and x_TE.shape[1] <= MAX_SIZE:
        from ridgeline.kernels.add_norm_triton import add_norm_triton

        return add_norm_triton(x_TE, residual_TE, weight_E, eps, pdl=pdl)
    if x_TE.device.type == "cpu":
        from ridgeline.kernels.cpu import elementwise

        if elementwise.serves(x_TE) and elementwise.serves(residual_TE):
            return elementwise.add_norm(x_TE, residual_TE, weight_E, eps)
    return rms_norm(residual_TE.add_(x_TE), weight_E, eps)
