"""Round to nearest: what is a matrix when each weight is rounded for itself?

The measure that every other method is compared with; needs nothing but the weights.
"""

from __future__ import annotations

import torch

from ridgeline.quantization.algorithms.grid import Grid, Quantized, fit, quantize


def round_to_nearest(weight_OI: torch.Tensor, grid: Grid) -> Quantized:
    """Off by at most half a scale each (asymmetric: a whole one at the ends of a span). At 4 bits
    [0.12, -0.83, 0.45, -0.21] is [1, -7, 4, -2] * 0.118571."""
    return quantize(weight_OI, fit(grid.grouped(weight_OI.float()), grid), grid)
