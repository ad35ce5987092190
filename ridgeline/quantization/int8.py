"""Weights as 8 bit integers with one float32 scale for each row.

Each output row is divided by its largest magnitude / 127 and rounded to the nearest integer: off by
at most half a scale. With the native CPU kernels the rows of x are rounded in the same way, each
with its own scale, at each product. Letters: I inputs, O outputs.
"""

from __future__ import annotations

import torch

from ridgeline.kernels.quantized_matrix import QuantizedMatrix, outline
from ridgeline.quantization.integers import IntegerWeights, InvariantIntegers

LARGEST = 127
BIAS = 128  # codes are kept as unsigned bytes, as the dot products want them


class RowRounding:
    def outline(self, outputs: int, inputs: int, device: torch.device) -> QuantizedMatrix:
        return outline(
            outputs,
            inputs,
            bits=8,
            group=0,
            scale_dtype=torch.float32,
            has_zero=False,
            device=device,
        )

    def round_rows(self, weight_OI: torch.Tensor) -> QuantizedMatrix:
        # By a tensor: a GPU divides by a Python number as it multiplies by its reciprocal.
        scale_O1 = weight_OI.abs().amax(1, keepdim=True) / weight_OI.new_full((), LARGEST)
        scale_O1 = torch.where(scale_O1 == 0, torch.ones_like(scale_O1), scale_O1)
        codes_OI = (weight_OI / scale_O1).round().clamp(-LARGEST, LARGEST)
        codes = (codes_OI + BIAS).to(torch.uint8)
        return QuantizedMatrix(codes, scale_O1, None, weight_OI.shape[1], 8, 0)


class Int8Weights(IntegerWeights):
    name = "int8"
    bits: int | None = 8
    rounding = RowRounding()

    def invariant(self) -> IntegerWeights:
        return InvariantInt8Weights()


class InvariantInt8Weights(InvariantIntegers, Int8Weights):
    """Each row of a product has the same bits in any company."""
