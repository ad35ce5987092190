"""Weights as e4m3 with one float32 scale for each block of 128 x 128 of them.

The largest magnitude of a block becomes 448: off by at most 1/16 of itself, or 2^-10 scales if a
weight is small. As in "DeepSeek-V3 Technical Report" (2024), whose checkpoints have such blocks;
those at the ends of the matrix may be smaller. Products are as `kernels.fp8_block_linear` says: x
is not rounded. Letters: T tokens, O outputs, I inputs, P and Q blocks of outputs and of inputs.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ridgeline.kernels.fp8_block_linear import (
    BLOCK,
    Fp8Blocks,
    dequantize_blocks,
    fp8_block_linear,
    num_blocks,
    piece_rows,
)
from ridgeline.kernels.invariant_linear import invariant_linear
from ridgeline.kernels.quantize_rows import E4M3, LARGEST, LEAST
from ridgeline.kernels.small_linear import Unfused
from ridgeline.quantization.contract import Parameters
from ridgeline.quantization.fp8 import check_finite

__all__ = ["BLOCK", "Fp8BlockWeights", "InvariantFp8BlockWeights"]


class Fp8BlockWeights(Unfused):
    name = "fp8-block"
    bits: int | None = 8

    def parameters(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> Parameters:
        return {"weight": torch.empty(outputs, inputs, dtype=dtype, device=device)}

    def finish(self, parameters: Parameters) -> Parameters:
        """ConfigError if a weight is infinite or NaN."""
        weight_OI = parameters["weight"]
        outputs, inputs = weight_OI.shape
        codes_OI = torch.empty_like(weight_OI, dtype=E4M3)
        scale_PQ = weight_OI.new_empty(num_blocks(outputs), num_blocks(inputs), dtype=torch.float32)
        largest_O = weight_OI.new_zeros(outputs, dtype=torch.float32)
        for block in range(num_blocks(outputs)):
            rows = slice(block * BLOCK, (block + 1) * BLOCK)
            wide = weight_OI[rows].float()
            if inputs:
                largest_O[rows] = wide.abs().amax(1)
            largest_Q = _largest(wide)
            scale_PQ[block] = largest_Q / LARGEST
            factor_I = (LARGEST / largest_Q).repeat_interleave(BLOCK)[:inputs]
            codes_OI[rows] = (wide * factor_I).to(E4M3)
        check_finite(largest_O, inputs, self.name)
        return self.keep(codes_OI, scale_PQ)

    def keep(self, codes_OI: torch.Tensor, scale_PQ: torch.Tensor) -> Parameters:
        """Of a matrix that is in blocks already: e4m3 [O, I] and float32, a weight is code *
        scale."""
        kept = Fp8Blocks(codes_OI.contiguous(), scale_PQ.contiguous())
        return {"codes": kept.codes_NK, "scale": kept.scale_PQ}

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return fp8_block_linear(x_TI, self.matrix(parameters), bias_N=bias_O)

    def dequantize(self, parameters: Parameters) -> torch.Tensor:
        """In float32."""
        return dequantize_blocks(self.matrix(parameters))

    def matrix(self, parameters: Parameters) -> Fp8Blocks:
        """What the kernels take."""
        return Fp8Blocks(parameters["codes"], parameters["scale"])

    def invariant(self) -> Fp8BlockWeights:
        return InvariantFp8BlockWeights()


class InvariantFp8BlockWeights(Fp8BlockWeights):
    """One way of multiplying for any number of rows."""

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        matrix, (outputs, inputs) = self.matrix(parameters), parameters["codes"].shape
        y_TO = x_TI.new_empty(x_TI.shape[0], outputs)
        step = piece_rows(inputs)
        for begin in range(0, outputs, step):
            end = min(outputs, begin + step)
            weight_OI = dequantize_blocks(matrix.part(begin, end)).to(x_TI.dtype)
            bias = None if bias_O is None else bias_O[begin:end]
            invariant_linear(x_TI, weight_OI, bias_N=bias, out_MN=y_TO[:, begin:end])
        return y_TO


def _largest(some_OI: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each block of a row of blocks, [Q]; of zeros a least one."""
    inputs = some_OI.shape[1]
    padded = functional.pad(some_OI.abs().amax(0), (0, num_blocks(inputs) * BLOCK - inputs))
    return padded.view(-1, BLOCK).amax(1).clamp_min_(LEAST)
