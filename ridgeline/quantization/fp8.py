"""Weights as e4m3 with float32 scales, products in e4m3 where the device has it.

Format `fp8` has a scale for each row: after loading, each output row is divided by its largest
magnitude / 448 and rounded to the nearest e4m3: off by at most 1/16 of itself, or 2^-10 scales if
it is small. NVIDIA GPUs from capability 8.9 on multiply as `kernels.fp8_linear` says: x is rounded
to e4m3 too, of a few rows in pieces of 128 numbers, of more each row with one scale (or not at all,
if there is one row). Elsewhere, for float32 and for sizes that are no multiples of 16, weights
become the dtype of x before each product: smaller, not faster.

Format `fp8-tensor` has one scale for the whole matrix. The kernels read a scale for each row, so as
many are kept, all of them the same. A matrix is what a layer multiplies by at once: q, k and v are
one, and so are gate and up.

Format `fp8-block` has one for each block of 128 x 128 weights, as in "DeepSeek-V3 Technical Report"
(2024), whose checkpoints have such blocks; those at the ends of the matrix may be smaller. Products
are as `kernels.fp8_block_linear` says: x is not rounded.
Letters: T tokens, O outputs, I inputs, P and Q blocks of outputs and of inputs.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ridgeline.errors import ConfigError
from ridgeline.kernels.fp8_block_linear import (
    BLOCK,
    Fp8Blocks,
    dequantize_blocks,
    fp8_block_linear,
    num_blocks,
    piece_rows,
)
from ridgeline.kernels.fp8_linear import (
    Fp8Matrix,
    adds_to_residual,
    dequantize_rows,
    fp8_linear,
    keeps_rows,
    takes_e4m3,
)
from ridgeline.kernels.grouped_experts import StackedMatrix
from ridgeline.kernels.invariant_linear import invariant_fp8_linear, invariant_linear
from ridgeline.kernels.quantize_rows import E4M3, LARGEST, LEAST, quantize_rows_reference
from ridgeline.kernels.quantized_matrix import Parameters
from ridgeline.kernels.silu_mul import silu_mul
from ridgeline.kernels.small_linear import Fusion, Unfused
from ridgeline.quantization.contract import WeightFormat

PIECE_NUMBERS = 1 << 22  # of a matrix that are float32 at once while it is rounded


class Fp8Weights(WeightFormat):
    name = "fp8"
    bits: int | None = 8

    def finish(self, parameters: Parameters) -> Parameters:
        """ConfigError if a weight is infinite or NaN."""
        weight_OI = parameters["weight"]
        outputs, inputs = weight_OI.shape
        codes_OI = torch.empty_like(weight_OI, dtype=E4M3)
        scale_O = torch.empty(outputs, dtype=torch.float32, device=weight_OI.device)
        step = max(1, PIECE_NUMBERS // max(1, inputs))
        for begin in range(0, outputs, step):
            part = slice(begin, begin + step)
            rounded = quantize_rows_reference(weight_OI[part])
            codes_OI[part], scale_O[part] = rounded.codes_MK, rounded.scale_M
        check_finite(scale_O, inputs, self.name)
        return {"codes": codes_OI, "scale": scale_O}

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return fp8_linear(x_TI, self.matrix(parameters), bias_N=bias_O)

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        """Of a few rows all is in the kernel of the product but a sum before the norm. Of more the
        sum, the norm and the gate of x are in the kernel that rounds them, the residual is in our
        product where that is chosen, and the gate of y is nowhere: the next layer takes it."""
        matrix = self.matrix(parameters)
        if not self._has_kernel(x_TI, matrix, fusion):
            return None
        return fp8_linear(
            x_TI,
            matrix,
            silu=fusion.of_gated,
            norm=fusion.norm,
            sum_MK=fusion.sum_TI,
            bias_N=bias_O,
            gated=fusion.is_gated,
            residual_MO=fusion.residual_TO,
            out_MO=fusion.residual_TO,
        )

    def _has_kernel(self, x_TI: torch.Tensor, matrix: Fp8Matrix, fusion: Fusion) -> bool:
        rows = x_TI.shape[0]
        if rows == 0 or not takes_e4m3(x_TI, matrix):
            return False
        if keeps_rows(x_TI, matrix):
            return not fusion.of_gated
        if fusion.is_gated:
            return False
        return fusion.residual_TO is None or adds_to_residual(rows, matrix)

    def gates_input(self, x_TI: torch.Tensor, parameters: Parameters) -> bool:
        """A layer before this one, with input x, leaves its gate to `linear_of_gated`."""
        matrix = self.matrix(parameters)
        return takes_e4m3(x_TI, matrix) and not keeps_rows(x_TI, matrix)

    def linear_of_gated(
        self, x_TG: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        """`linear` of silu(gate) * up, where a row of x is gate and up: many rows are gated in the
        kernel that rounds them."""
        return fp8_linear(x_TG, self.matrix(parameters), silu=True, bias_N=bias_O)

    def dequantize(self, parameters: Parameters) -> torch.Tensor:
        """In float32."""
        return dequantize_rows(self.matrix(parameters))

    def stacked(self, parameters: Parameters, bias_XN: torch.Tensor | None) -> StackedMatrix | None:
        return StackedMatrix(parameters["codes"], parameters["scale"], bias_XN)

    def matrix(self, parameters: Parameters) -> Fp8Matrix:
        """What the kernels take."""
        return Fp8Matrix(parameters["codes"], parameters["scale"])

    def invariant(self) -> Fp8Weights:
        return InvariantFp8Weights()


class InvariantFp8Weights(Unfused, Fp8Weights):
    """One way of multiplying for any number of rows, so a single one is rounded to e4m3 too."""

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return invariant_fp8_linear(x_TI, self.matrix(parameters), bias_N=bias_O)

    def gates_input(self, x_TI: torch.Tensor, parameters: Parameters) -> bool:
        return False

    def linear_of_gated(
        self, x_TG: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return self.linear(silu_mul(x_TG), parameters, bias_O)


def check_finite(scale_O: torch.Tensor, inputs: int, name: str) -> None:
    """ConfigError names the first row of a matrix that has weights that are not finite."""
    broken = torch.nonzero(~torch.isfinite(scale_O)).flatten().tolist()
    if broken:
        raise ConfigError(
            f"cannot round a matrix of {scale_O.numel()} x {inputs} weights to {name}:"
            f" row {broken[0]} ({len(broken)} rows in all) has infinite or NaN weights;"
            " repair the checkpoint, or serve it as it is with weight_format plain"
        )


class Fp8TensorWeights(Fp8Weights):
    """One scale for the whole matrix, that of its largest row."""

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
    """Each row of a product has the same bits in any batch."""


class Fp8BlockWeights(WeightFormat):
    """One scale for each block of 128 x 128 weights; x is not rounded."""

    name = "fp8-block"
    bits: int | None = 8

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
            largest_Q = _largest_of_blocks(wide)
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

    def stacked(self, parameters: Parameters, bias_XN: torch.Tensor | None) -> StackedMatrix | None:
        """Where gate and up are whole blocks together: a tile of either lies in one then."""
        codes_XNK = parameters["codes"]
        if codes_XNK.shape[1] % BLOCK:
            return None
        return StackedMatrix(codes_XNK, parameters["scale"], bias_XN)

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


def _largest_of_blocks(some_OI: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each block of a row of blocks, [Q]; of zeros a least one."""
    inputs = some_OI.shape[1]
    padded = functional.pad(some_OI.abs().amax(0), (0, num_blocks(inputs) * BLOCK - inputs))
    return padded.view(-1, BLOCK).amax(1).clamp_min_(LEAST)
