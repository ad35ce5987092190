"""Weights as they are: one number of the serving dtype each."""

from __future__ import annotations

import torch
from torch.nn import functional

from ridgeline.kernels.small_linear import Fusion, fits_small, small_linear
from ridgeline.quantization.contract import Parameters


class PlainWeights:
    name = "plain"
    bits: int | None = None

    def parameters(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> Parameters:
        return {"weight": torch.empty(outputs, inputs, dtype=dtype, device=device)}

    def finish(self, parameters: Parameters) -> Parameters:
        return parameters

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
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
        if not fits_small(x_TI, parameters["weight"], fusion):
            return None
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
        return parameters["weight"]
