"""Weights as e4m3 with one float32 scale for each row, products in e4m3 where the device has it.

After loading, each output row is divided by its largest magnitude / 448 and rounded to the nearest
e4m3: off by at most 1/16 of itself, or 2^-10 scales if it is small. NVIDIA GPUs from capability 8.9
on multiply as `kernels.fp8_linear` says: x is rounded to e4m3 too, of a few rows in pieces of 128
numbers, of more each row with one scale (or not at all, if there is one row). Elsewhere, for
float32 and for sizes that are no multiples of 16, weights become the dtype of x before each
product: smaller, not faster.
"""

from __future__ import annotations

import torch

from ridgeline.errors import ConfigError
from ridgeline.kernels.fp8_linear import (
    Fp8Matrix,
    adds_to_residual,
    dequantize_rows,
    fp8_linear,
    keeps_rows,
    takes_e4m3,
)
from ridgeline.kernels.invariant_linear import invariant_fp8_linear
from ridgeline.kernels.quantize_rows import E4M3, quantize_rows_reference
from ridgeline.kernels.silu_mul import silu_mul
from ridgeline.kernels.small_linear import Fusion, Unfused
from ridgeline.quantization.contract import Parameters

PIECE_NUMBERS = 1 << 22  # of a matrix that are float32 at once while it is rounded


class Fp8Weights:
    name = "fp8"
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
