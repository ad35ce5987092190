"""Weights as they are: one number of the serving dtype each. On the CPU those of bfloat16 stand in
the order of the native kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from ridgeline.formats import CHECKPOINT
from ridgeline.kernels.cpu import native
from ridgeline.kernels.cpu.packed_linear import (
    Codes,
    PackedMatrix,
    first_rows,
    gather,
    linear,
    pack,
)
from ridgeline.kernels.grouped_experts import StackedMatrix
from ridgeline.kernels.invariant_linear import invariant_linear
from ridgeline.kernels.large_m_linear import fits_large_m, large_m_linear
from ridgeline.kernels.quantized_matrix import Parameters
from ridgeline.kernels.small_linear import Fusion, Unfused, fits_small, multiply_into, small_linear
from ridgeline.quantization.contract import MatrixShare, Piece, WeightFormat
from ridgeline.quantization.panels import fits_panels, fused_packed, keep_packed, packed_of


class PlainWeights(WeightFormat):
    name = "plain"
    serves_vocabulary = True
    cuts_columns = True

    def parameters(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> Parameters:
        weight = torch.empty(outputs, inputs, dtype=dtype, device=device)
        return {"weight": native.advise_huge(weight)}

    def finish(self, parameters: Parameters) -> Parameters:
        """Packed where native kernels read them, in the same memory."""
        weight_OI = parameters["weight"]
        if weight_OI.dtype == torch.bfloat16 and fits_panels(weight_OI, Codes.BF16):
            return keep_packed(pack(weight_OI, Codes.BF16))
        return parameters

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        packed = self.packed(parameters)
        if packed is not None:
            return linear(x_TI.contiguous(), packed, bias_N=bias_O)
        if fits_small(x_TI, parameters["weight"], Fusion()):
            return small_linear(x_TI, parameters["weight"], bias_N=bias_O)
        return functional.linear(x_TI, parameters["weight"], bias_O)

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        packed = self.packed(parameters)
        if packed is not None:
            return fused_packed(x_TI, packed, bias_O, fusion)
        if bias_O is None and fits_large_m(x_TI, parameters["weight"], fusion):
            return large_m_linear(x_TI, parameters["weight"])
        if not fits_small(x_TI, parameters["weight"], fusion):
            return _added(x_TI, parameters["weight"], bias_O, fusion)
        return small_linear(
            x_TI,
            parameters["weight"],
            norm=fusion.norm,
            bias_N=bias_O,
            gated=fusion.is_gated,
            residual_MO=fusion.residual_TO,
            out_MO=fusion.residual_TO,
        )

    def dequantize(self, parameters: Parameters) -> torch.Tensor:
        packed = self.packed(parameters)
        if packed is not None:
            return gather(packed, None, torch.bfloat16)
        return parameters["weight"]

    def rows(
        self, parameters: Parameters, rows_T: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        packed = self.packed(parameters)
        if packed is not None:
            return gather(packed, rows_T, dtype)
        return functional.embedding(rows_T, parameters["weight"]).to(dtype)

    def linear_into(
        self, x_TI: torch.Tensor, parameters: Parameters, out_TO: torch.Tensor
    ) -> torch.Tensor:
        packed, outputs = self.packed(parameters), out_TO.shape[1]
        if packed is not None:
            return linear(x_TI, first_rows(packed, outputs), out_MO=out_TO)
        weight_OI = parameters["weight"][:outputs]
        if fits_small(x_TI, weight_OI, Fusion()):
            return small_linear(x_TI, weight_OI, out_MO=out_TO)
        return multiply_into(x_TI, weight_OI, out_TO)

    def stacked(self, parameters: Parameters, bias_XN: torch.Tensor | None) -> StackedMatrix | None:
        return StackedMatrix(parameters["weight"], None, bias_XN)

    def packed(self, parameters: Parameters) -> PackedMatrix | None:
        return packed_of(parameters)

    def invariant(self) -> PlainWeights:
        return InvariantPlainWeights()


class UnpackedWeights(WeightFormat):
    """Matrices as numbers of the serving dtype, however the checkpoint stores them, for those who
    multiply by parts of them."""

    name = "plain"

    def __init__(self, stored: WeightFormat, dtype: torch.dtype | None = None) -> None:
        self._stored = stored
        self._dtype = dtype

    @classmethod
    def beside(cls, weight_format: WeightFormat) -> UnpackedWeights:
        """What stands beside matrices in this format, which only a checkpoint's own applies to."""
        return cls(weight_format if weight_format.name == CHECKPOINT else PlainWeights())

    def of(self, shares: Sequence[MatrixShare], dtype: torch.dtype) -> UnpackedWeights:
        return UnpackedWeights(self._stored.of(shares, dtype), dtype)

    def parameters(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> Parameters:
        return self._stored.parameters(outputs, inputs, dtype, device)

    def pieces(self, parameters: Parameters, index: int) -> list[Piece] | None:
        return self._stored.pieces(parameters, index)

    def finish(self, parameters: Parameters) -> Parameters:
        weight_OI = self._stored.dequantize(self._stored.finish(parameters))
        return {"weight": weight_OI.to(self._dtype)}

    def dequantize(self, parameters: Parameters) -> torch.Tensor:
        return parameters["weight"]


def _added(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, fusion: Fusion
) -> torch.Tensor | None:
    """The library's product, added to states as it is written: one pass over memory less than if
    the next norm did that, and one rounding."""
    residual_TO = fusion.residual_TO
    if residual_TO is None or bias_O is not None or not x_TI.is_cuda:
        return None
    if fusion != Fusion(residual_TO=residual_TO):
        return None
    return residual_TO.addmm_(x_TI, weight_OI.T)


class InvariantPlainWeights(Unfused, PlainWeights):
    """One way of multiplying for any number of rows; see `kernels.invariant_linear`."""

    def finish(self, parameters: Parameters) -> Parameters:
        return parameters

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return invariant_linear(x_TI, parameters["weight"], bias_N=bias_O)

    def linear_into(
        self, x_TI: torch.Tensor, parameters: Parameters, out_TO: torch.Tensor
    ) -> torch.Tensor:
        weight_OI = parameters["weight"][: out_TO.shape[1]]
        return invariant_linear(x_TI, weight_OI, out_MN=out_TO)
