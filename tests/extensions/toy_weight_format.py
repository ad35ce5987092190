"""A weight format from outside: 8 bits, one scale for 16 neighbours of a row, rounded to nearest.

Its table line: `WEIGHT_FORMATS["toy_int8"] = LINE`. Letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ridgeline.formats import WeightFormatLine
from ridgeline.quantization import Fusion, Parameters

GROUP = 16
LINE = WeightFormatLine(
    "tests.extensions.toy_weight_format:Int8Groups", bits=8, group=GROUP, scale_bytes=4
)


class Int8Groups:
    name = "toy_int8"
    bits: int | None = 8

    def parameters(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> Parameters:
        return {"weight": torch.empty(outputs, inputs, dtype=dtype, device=device)}

    def finish(self, parameters: Parameters) -> Parameters:
        weight = parameters["weight"]
        groups = weight.float().view(weight.shape[0], -1, GROUP)
        scales = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
        return {"codes": (groups / scales).round().to(torch.int8), "scales": scales}

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return functional.linear(x_TI, self.dequantize(parameters).to(x_TI.dtype), bias_O)

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> None:
        """There is no kernel for more than the product."""

    def dequantize(self, parameters: Parameters) -> torch.Tensor:
        return (parameters["codes"] * parameters["scales"]).flatten(1)
