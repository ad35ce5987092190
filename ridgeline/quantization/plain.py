"""Weights as they are: one number of the serving dtype each."""

from __future__ import annotations

import torch
from torch.nn import functional

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
        return functional.linear(x_TI, parameters["weight"], bias_O)

    def dequantize(self, parameters: Parameters) -> torch.Tensor:
        return parameters["weight"]
