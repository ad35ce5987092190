"""Weights as 4 bit integers, -8 .. 7, with one bfloat16 scale for 128 neighbours of a row.

The number of the largest magnitude of a group becomes -8, so that all codes are of use; a number
is off by at most half a scale, or by a whole one if it is the opposite end. With the native CPU
kernels the rows of x are rounded to 8 bits at each product, with a scale for each group.
Letters: I inputs, O outputs, G groups of a row, g numbers of a group.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ridgeline.formats import WEIGHT_FORMATS
from ridgeline.kernels.cpu.packed_linear import Codes
from ridgeline.quantization.integers import IntegerWeights, InvariantIntegerWeights

LOW, HIGH = -8, 7


class GroupRounding:
    kind = Codes.INT4

    def __init__(self, group: int) -> None:
        self.group = group

    def round_rows(self, weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [O, ceil(I / 2)], two in a byte, the even ones in its low half; scales [O, G]."""
        outputs, inputs = weight_OI.shape
        groups = -(-inputs // self.group)
        padded = functional.pad(weight_OI, (0, groups * self.group - inputs))
        grouped_OGg = padded.view(outputs, groups, self.group)
        scale_OG = (_extreme(grouped_OGg) / LOW).to(torch.bfloat16)
        divisor_OG = torch.where(scale_OG == 0, torch.ones_like(scale_OG), scale_OG).float()
        codes_OGg = (grouped_OGg / divisor_OG[..., None]).round().clamp(LOW, HIGH) - LOW
        codes_OGg[(scale_OG == 0)] = -LOW
        codes_OI = codes_OGg.to(torch.uint8).view(outputs, -1)
        both = codes_OI[:, 0::2] | codes_OI[:, 1::2] << 4
        return both[:, : -(-inputs // 2)].contiguous(), scale_OG

    def read_rows(self, codes: torch.Tensor, scales: torch.Tensor, inputs: int) -> torch.Tensor:
        codes_OI = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, :inputs]
        scales_OI = scales.float().repeat_interleave(self.group, 1)[:, :inputs]
        return (codes_OI.float() + LOW) * scales_OI


class Int4Weights(IntegerWeights):
    name = "int4"
    bits: int | None = 4
    rounding = GroupRounding(WEIGHT_FORMATS["int4"].group)

    def invariant(self) -> Int4Weights:
        return InvariantInt4Weights()


class InvariantInt4Weights(InvariantIntegerWeights, Int4Weights):
    """Each row of a product has the same bits in any company."""


def _extreme(grouped_OGg: torch.Tensor) -> torch.Tensor:
    """The largest magnitude with its sign, the positive one of two: [O, G]."""
    high_OG, low_OG = grouped_OGg.amax(-1), grouped_OGg.amin(-1)
    return torch.where(high_OG >= -low_OG, high_OG, low_OG)
