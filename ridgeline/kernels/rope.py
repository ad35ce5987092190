"""Rotate pairs (i, i + D/2) of each head by an angle that grows with the position.

Letters: T tokens, N heads, D head size.
"""

from __future__ import annotations

import torch


def rotate_(x_TND: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> None:
    """Turn heads in place; any strides.

    `cos_T1D` is float32 with both halves alike; `sin_T1D` too, its first half negated. The
    arithmetic is float32 and rounded once, at the end.
    """
    swapped = x_TND.roll(x_TND.shape[-1] // 2, -1)
    torch.addcmul(torch.mul(x_TND, cos_T1D), swapped, sin_T1D, out=x_TND)


def rotate_reference(
    x_TND: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor
) -> torch.Tensor:
    """The definition, in float64."""
    wide = x_TND.double()
    first, second = wide.chunk(2, dim=-1)
    cos, sin = cos_T1D.double().chunk(2, dim=-1)[0], sin_T1D.double().chunk(2, dim=-1)[1]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_TND.dtype)
