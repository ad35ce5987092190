"""A weight format from outside: 8 bits, one scale for 16 neighbours of a row, rounded to nearest.

Its table line: `WEIGHT_FORMATS["toy_int8"] = LINE`.
"""

from __future__ import annotations

import torch

from ridgeline.formats import WeightFormatLine
from ridgeline.quantization import Parameters, WeightFormat

GROUP = 16
LINE = WeightFormatLine(
    "tests.extensions.toy_weight_format:Int8Groups", bits=8, group=GROUP, scale_bytes=4
)


class Int8Groups(WeightFormat):
    name = "toy_int8"
    bits = 8

    def finish(self, parameters: Parameters) -> Parameters:
        weight = parameters["weight"]
        groups = weight.float().view(weight.shape[0], -1, GROUP)
        scales = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
        return {"codes": (groups / scales).round().to(torch.int8), "scales": scales}

    def dequantize(self, parameters: Parameters) -> torch.Tensor:
        return (parameters["codes"] * parameters["scales"]).flatten(1)
