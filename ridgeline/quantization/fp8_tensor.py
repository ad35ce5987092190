"""Weights as e4m3 with one float32 scale for the whole matrix, products as in `fp8`.

The largest magnitude of the matrix becomes 448: off by at most 1/16 of itself, or 2^-10 scales if a
weight is small, and the scale is that of the largest row. The kernels read a scale for each row, so
as many are kept, all of them the same. A matrix is what a layer multiplies by at once: q, k and v
are one, and so are gate and up.
"""

from __future__ import annotations

import torch

from ridgeline.kernels.quantize_rows import E4M3, LARGEST, LEAST
from ridgeline.quantization.contract import Parameters
from ridgeline.quantization.fp8 import (
    PIECE_NUMBERS,
    Fp8Weights,
    InvariantFp8Weights,
    check_finite,
)


class Fp8TensorWeights(Fp8Weights):
    name = "fp8-tensor"

    def finish(self, parameters: Parameters) -> Parameters:
        """ConfigError if a weight is infinite or NaN."""
        weight_OI = parameters["weight"]
        outputs, inputs = weight_OI.shape
        step = max(1, PIECE_NUMBERS // max(1, inputs))
        parts = [slice(begin, begin + step) for begin in range(0, outputs, step)]
        largest_O = weight_OI.new_full((outputs,), LEAST, dtype=torch.float32)
        for part in parts if inputs else ():
            largest_O[part] = weight_OI[part].abs().amax(1).float().clamp_min_(LEAST)
        check_finite(largest_O, inputs, self.name)
        largest = largest_O.amax() if outputs else largest_O.new_tensor(LEAST)
        codes_OI = torch.empty_like(weight_OI, dtype=E4M3)
        for part in parts:
            codes_OI[part] = (weight_OI[part].float() * (LARGEST / largest)).to(E4M3)
        return {"codes": codes_OI, "scale": (largest / LARGEST).expand(outputs).contiguous()}

    def invariant(self) -> Fp8Weights:
        return InvariantFp8TensorWeights()


class InvariantFp8TensorWeights(InvariantFp8Weights, Fp8TensorWeights):
    """Each row of a product has the same bits in any company."""
