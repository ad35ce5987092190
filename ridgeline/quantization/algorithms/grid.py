"""Which numbers can a quantized weight be, and how are scales and codes found for them?

Codes are signed integers of `bits` bits, -2^(bits-1) .. 2^(bits-1) - 1; a weight is
(code - zero) * scale with one scale (and zero) for each group of neighbours of a row. Letters: O
outputs, I inputs, G groups of a row, g numbers of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ridgeline.errors import ConfigError, check

Errors = Callable[[torch.Tensor], torch.Tensor]  # differences [O, G, g] -> what they cost [O, G]


@dataclass(frozen=True, slots=True)
class Grid:
    """`group` 0: one scale for a whole row. `scale_dtype`: as the scales are stored; codes are
    found for the stored scales, so that nothing is lost when they are written."""

    bits: int
    group: int = 0
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check(2 <= self.bits <= 8, "codes have 2 to 8 bits", bits=self.bits)
        check(self.group >= 0, "a group is no negative number of weights", group=self.group)

    @property
    def low(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def high(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def size(self, inputs: int) -> int:
        """Weights that share a scale; ConfigError if groups do not divide a row."""
        size = self.group or inputs
        if inputs % size:
            divisors = [n for n in range(1, inputs + 1) if inputs % n == 0 and n < size]
            raise ConfigError(
                f"group_size {self.group} does not divide a row of {inputs} weights; choose one"
                f" that does, such as {max(divisors)}, or 0 for one scale a row"
            )
        return size

    def grouped(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """[O, I] -> [O, G, g], a view."""
        outputs, inputs = weight_OI.shape
        size = self.size(inputs)
        return weight_OI.reshape(outputs, inputs // size, size)


@dataclass(frozen=True, slots=True)
class Scales:
    """`scale_OG` in the grid's dtype; `zero_OG` is the code of 0, int8, None if symmetric."""

    scale_OG: torch.Tensor
    zero_OG: torch.Tensor | None

    def group(self, index: int) -> Scales:
        """Those of one group of each row, [O, 1]."""
        part = slice(index, index + 1)
        return Scales(
            self.scale_OG[:, part], None if self.zero_OG is None else self.zero_OG[:, part]
        )


@dataclass(frozen=True, slots=True)
class Quantized:
    """`codes_OI` int8, one number each: packing is the writer's."""

    grid: Grid
    codes_OI: torch.Tensor
    scales: Scales

    def dequantize(self) -> torch.Tensor:
        """(code - zero) * scale, [O, I] float32; exact for scales of 16 bits."""
        codes_OGg = self.grid.grouped(self.codes_OI)
        return decode(codes_OGg, self.scales).reshape(self.codes_OI.shape)


def fit(weight_OGg: torch.Tensor, grid: Grid, shrink: float | torch.Tensor = 1.0) -> Scales:
    """Scales that span each group, or `shrink` of its span (a factor, or one for each group).

    Symmetric: largest magnitude / largest code. Asymmetric: (largest - smallest) / (2^bits - 1),
    0 included, so that 0 stays 0. A group of zeros has scale 1: nothing is divided by zero.
    ConfigError if a weight is infinite or NaN, or a scale too large for its dtype.
    """
    if grid.symmetric:
        scale_OG = weight_OGg.abs().amax(-1) * shrink / grid.high
        return Scales(_stored(scale_OG, grid), None)
    top_OG = weight_OGg.amax(-1).clamp(min=0) * shrink
    bottom_OG = weight_OGg.amin(-1).clamp(max=0) * shrink
    scale_OG = _stored((top_OG - bottom_OG) / (grid.high - grid.low), grid)
    zero_OG = (grid.low - bottom_OG / scale_OG.float()).round().clamp(grid.low, grid.high)
    return Scales(scale_OG, zero_OG.to(torch.int8))


def _stored(scale_OG: torch.Tensor, grid: Grid) -> torch.Tensor:
    stored_OG = scale_OG.to(grid.scale_dtype)
    if not bool(torch.isfinite(stored_OG).all()):
        raise ConfigError(
            "weights are infinite, NaN or too large for scales of"
            f" {str(grid.scale_dtype).removeprefix('torch.')}; repair the checkpoint"
        )
    return torch.where(stored_OG == 0, torch.ones_like(stored_OG), stored_OG)


def encode(weight_OGg: torch.Tensor, scales: Scales, grid: Grid) -> torch.Tensor:
    """The nearest codes, as float32 [O, G, g]."""
    codes_OGg = (weight_OGg / scales.scale_OG.float()[..., None]).round()
    if scales.zero_OG is not None:
        codes_OGg = codes_OGg + scales.zero_OG[..., None]
    return codes_OGg.clamp(grid.low, grid.high)


def decode(codes_OGg: torch.Tensor, scales: Scales) -> torch.Tensor:
    """What codes mean, float32 [O, G, g]."""
    codes_OGg = codes_OGg.float()
    if scales.zero_OG is not None:
        codes_OGg = codes_OGg - scales.zero_OG[..., None]
    return codes_OGg * scales.scale_OG.float()[..., None]


def quantize(weight_OI: torch.Tensor, scales: Scales, grid: Grid) -> Quantized:
    """Every weight to its nearest code."""
    codes_OGg = encode(grid.grouped(weight_OI.float()), scales, grid)
    return Quantized(grid, codes_OGg.to(torch.int8).reshape(weight_OI.shape), scales)


def fit_best(
    weight_OGg: torch.Tensor, grid: Grid, errors: Errors, *, smallest: float, steps: int
) -> Scales:
    """Of the spans 1, ..., `smallest` in `steps` even steps, for each group the one whose rounding
    costs least; the whole span on a tie. A smaller span cuts a few large weights and holds all
    others better."""
    best_OG = torch.full(weight_OGg.shape[:2], torch.inf, device=weight_OGg.device)
    shrink_OG = torch.ones_like(best_OG)
    for step in range(steps):
        shrink = 1.0 - (1.0 - smallest) * step / max(1, steps - 1)
        scales = fit(weight_OGg, grid, shrink)
        cost_OG = errors(weight_OGg - decode(encode(weight_OGg, scales, grid), scales))
        better_OG = cost_OG < best_OG
        best_OG = torch.where(better_OG, cost_OG, best_OG)
        shrink_OG = torch.where(better_OG, torch.full_like(shrink_OG, shrink), shrink_OG)
    return fit(weight_OGg, grid, shrink_OG)


def round_to_nearest(weight_OI: torch.Tensor, grid: Grid) -> Quantized:
    """Each weight for itself, the measure that every other method is compared with: off by at most
    half a scale each (asymmetric: a whole one at the ends of a span). At 4 bits
    [0.12, -0.83, 0.45, -0.21] is [1, -7, 4, -2] * 0.118571."""
    return quantize(weight_OI, fit(grid.grouped(weight_OI.float()), grid), grid)
