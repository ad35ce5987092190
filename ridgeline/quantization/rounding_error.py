"""What does a weight format make of a matrix: which numbers can it hold, and how far off is it?

Everything is asked of the format that serves, as `finish` rounds and `dequantize` reads. The levels
of a scale are found by rounding a sweep: numbers between the smallest and the largest weight that
share the scale take the place of the others, so that the scale stays what it is.
Letters: O outputs, I inputs, g weights that share a scale.
"""

from __future__ import annotations

import math

import torch

from ridgeline.formats import weight_line
from ridgeline.quantization import open_weight_format

SWEEP = 2048  # numbers in even steps, and as many each side of 0 in even ratios
LEAST = 1e-6  # of the largest magnitude: the smallest number of the sweep


def rounded(weight_OI: torch.Tensor, name: str) -> torch.Tensor:
    """The weights that the format multiplies by, float32. ConfigError if one is not finite."""
    opened = open_weight_format(name)
    outputs, inputs = weight_OI.shape
    parameters = opened.parameters(outputs, inputs, weight_OI.dtype, weight_OI.device)
    parameters["weight"].copy_(weight_OI)
    back_OI = opened.dequantize(opened.finish(parameters))
    return back_OI[:outputs, :inputs].to(torch.float32)


def sharing(row_I: torch.Tensor, name: str) -> slice:
    """The weights of a row that share a scale with its largest one."""
    line = weight_line(name)
    if not line.group:
        return slice(0, row_I.numel())
    start = int(row_I.abs().argmax()) // line.group * line.group
    return slice(start, min(start + line.group, row_I.numel()))


def levels(row_I: torch.Tensor, name: str) -> torch.Tensor:
    """All numbers between the smallest and the largest of the weights that share a scale with the
    largest of the row that one of them can become, in their order."""
    shared_g = row_I[sharing(row_I, name)]
    low, high = int(shared_g.argmin()), int(shared_g.argmax())
    free = [index for index in range(shared_g.numel()) if index not in (low, high)]
    sweep = _sweep(float(shared_g.min()), float(shared_g.max()))
    copies = math.ceil(sweep.numel() / len(free))
    rows_Og = shared_g.expand(copies, -1).clone()
    padded = torch.cat([sweep, sweep[-1:].expand(copies * len(free) - sweep.numel())])
    rows_Og[:, free] = padded.view(copies, -1).to(row_I.dtype)
    found: torch.Tensor = torch.unique(rounded(rows_Og, name))
    return found


def _sweep(low: float, high: float) -> torch.Tensor:
    """Numbers from `low` to `high`, denser towards 0, where floats are denser too."""
    ratios = torch.logspace(math.log10(LEAST), 0, SWEEP)
    sides = [ratios * end for end in (low, high) if end]
    return torch.cat([torch.linspace(low, high, SWEEP), *sides]).clamp(low, high)


def relative_rms(weight_OI: torch.Tensor, other_OI: torch.Tensor) -> float:
    """Root mean square of the differences, over that of the weights; 0 for weights of 0."""
    whole = float(weight_OI.float().norm())
    return float((weight_OI.float() - other_OI.float()).norm()) / whole if whole else 0.0


def signal_to_noise_db(share: float) -> float:
    """In decibels, of an error with this relative root mean square; infinite without an error."""
    return -20 * math.log10(share) if share else math.inf
