"""residual += x, then the RMS norm of the sum: what stands between two parts of a layer.

The sum is rounded to the dtype of the residual and then normalised, as when both are done one
after the other. Letters: T tokens, E hidden.
"""

from __future__ import annotations

import torch

from ridgeline.kernels.rms_norm import MAX_SIZE, rms_norm, rms_norm_reference


def add_norm(
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    *,
    pdl: bool | None = None,
) -> torch.Tensor:
    """The normed sum, [T, E]; `residual_TE` becomes the sum. Rows of both may have any stride."""
    if x_TE.is_cuda and x_TE.shape[1] <= MAX_SIZE:
        from ridgeline.kernels.add_norm_triton import add_norm_triton

        return add_norm_triton(x_TE, residual_TE, weight_E, eps, pdl=pdl)
    if x_TE.device.type == "cpu":
        from ridgeline.kernels.cpu import elementwise

        if elementwise.serves(x_TE) and elementwise.serves(residual_TE):
            return elementwise.add_norm(x_TE, residual_TE, weight_E, eps)
    return rms_norm(residual_TE.add_(x_TE), weight_E, eps)


def add_norm_reference(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> torch.Tensor:
    residual_TE.copy_(residual_TE.float() + x_TE.float())
    return rms_norm_reference(residual_TE, weight_E, eps)
