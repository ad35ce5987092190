"""Weights as 8 bit integers with one float32 scale for each row.

Each output row is divided by its largest magnitude / 127 and rounded to the nearest integer: off by
at most half a scale. With the native CPU kernels the rows of x are rounded in the same way, each
with its own scale, at each product. Letters: I inputs, O outputs.
"""

from __future__ import annotations

import torch

from ridgeline.kernels.cpu.packed_linear import Codes
from ridgeline.quantization.integers import IntegerWeights, InvariantIntegerWeights

LARGEST = 127
BIAS = 128  # codes are kept as unsigned bytes, as the dot products want them


class RowRounding:
    kind = Codes.INT8
    group = 0

    def round_rows(self, weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale_O = weight_OI.abs().amax(1) / LARGEST
        scale_O = torch.where(scale_O == 0, torch.ones_like(scale_O), scale_O)
        codes_OI = (weight_OI / scale_O[:, None]).round().clamp(-LARGEST, LARGEST)
        return (codes_OI + BIAS).to(torch.uint8), scale_O

    def read_rows(self, codes: torch.Tensor, scales: torch.Tensor, inputs: int) -> torch.Tensor:
        return (codes.float() - BIAS) * scales[:, None]


class Int8Weights(IntegerWeights):
    name = "int8"
    bits: int | None = 8
    rounding = RowRounding()

    def invariant(self) -> Int8Weights:
        return InvariantInt8Weights()


class InvariantInt8Weights(InvariantIntegerWeights, Int8Weights):
    """Each row of a product has the same bits in any company."""
