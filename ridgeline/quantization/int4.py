"""Weights as 4 bit integers in groups of 32, 64 or 128 neighbours of a row.

Symmetric (`int4`, of 128, `int4-g64` and `int4-g32`): one bfloat16 scale for a group. The number of
the largest magnitude becomes -8, so that all codes are of use; a number is off by at most half a
scale, or by a whole one if it is the opposite end. Asymmetric (`int4-asym`, `int4-g64-asym` and
`int4-g32-asym`): a byte more for the code of 0, and the 15 steps span a group's smallest and
largest number, 0 included; a number is off by half a scale, or a whole one at the ends.

With the native CPU kernels the rows of x are rounded to 8 bits at each product, with a scale for
each group. Letters: I inputs, O outputs, G groups of a row, g numbers of a group.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ridgeline.formats import WEIGHT_FORMATS
from ridgeline.kernels.quantized_matrix import QuantizedMatrix, outline
from ridgeline.quantization.integers import IntegerWeights, InvariantIntegers

LOW, HIGH = -8, 7
STEPS = HIGH - LOW


class GroupRounding:
    """Symmetric, with one scale for `group` neighbours."""

    has_zero = False

    def __init__(self, group: int) -> None:
        self.group = group

    def outline(self, outputs: int, inputs: int, device: torch.device) -> QuantizedMatrix:
        return outline(
            outputs,
            inputs,
            bits=4,
            group=self.group,
            scale_dtype=torch.bfloat16,
            has_zero=self.has_zero,
            device=device,
        )

    def round_rows(self, weight_OI: torch.Tensor) -> QuantizedMatrix:
        outputs, inputs = weight_OI.shape
        groups = -(-inputs // self.group)
        padded = functional.pad(weight_OI, (0, groups * self.group - inputs))
        codes_OGg, scale_OG, zero_OG = self._round(padded.view(outputs, groups, self.group))
        codes_OI = codes_OGg.to(torch.uint8).view(outputs, -1)
        both = codes_OI[:, 0::2] | codes_OI[:, 1::2] << 4
        codes = both[:, : -(-inputs // 2)].contiguous()
        return QuantizedMatrix(codes, scale_OG, zero_OG, inputs, 4, self.group)

    def _round(
        self, grouped_OGg: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        scale_OG = (_extreme(grouped_OGg) / LOW).to(torch.bfloat16)
        divisor_OG = _divisor(scale_OG)
        codes_OGg = (grouped_OGg / divisor_OG[..., None]).round().clamp(LOW, HIGH) - LOW
        codes_OGg[(scale_OG == 0)] = -LOW
        return codes_OGg, scale_OG, None


class SpanRounding(GroupRounding):
    """Asymmetric, with the code of 0 beside the scale."""

    has_zero = True

    def _round(
        self, grouped_OGg: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        top_OG = grouped_OGg.amax(-1).clamp(min=0)
        bottom_OG = grouped_OGg.amin(-1).clamp(max=0)
        # By a tensor: a GPU divides by a Python number as it multiplies by its reciprocal.
        scale_OG = ((top_OG - bottom_OG) / top_OG.new_full((), STEPS)).to(torch.bfloat16)
        divisor_OG = _divisor(scale_OG)
        zero_OG = (-bottom_OG / divisor_OG).round().clamp(0, STEPS)
        codes_OGg = (grouped_OGg / divisor_OG[..., None]).round() + zero_OG[..., None]
        return codes_OGg.clamp(0, STEPS), scale_OG, zero_OG.to(torch.uint8)


class Int4Weights(IntegerWeights):
    name = "int4"
    bits: int | None = 4
    rounding = GroupRounding(WEIGHT_FORMATS["int4"].group)

    def invariant(self) -> IntegerWeights:
        return InvariantInt4Weights()


class Int4AllWeights(Int4Weights):
    """The same, beside a vocabulary of 4 bits in groups of 32."""

    name = "int4-all"

    def invariant(self) -> IntegerWeights:
        return InvariantInt4AllWeights()


class Int4G64Weights(Int4Weights):
    name = "int4-g64"
    rounding = GroupRounding(WEIGHT_FORMATS["int4-g64"].group)

    def invariant(self) -> IntegerWeights:
        return InvariantInt4G64Weights()


class Int4G32Weights(Int4Weights):
    name = "int4-g32"
    rounding = GroupRounding(WEIGHT_FORMATS["int4-g32"].group)

    def invariant(self) -> IntegerWeights:
        return InvariantInt4G32Weights()


class Int4AsymWeights(Int4Weights):
    name = "int4-asym"
    rounding = SpanRounding(WEIGHT_FORMATS["int4-asym"].group)

    def invariant(self) -> IntegerWeights:
        return InvariantInt4AsymWeights()


class Int4G64AsymWeights(Int4Weights):
    name = "int4-g64-asym"
    rounding = SpanRounding(WEIGHT_FORMATS["int4-g64-asym"].group)

    def invariant(self) -> IntegerWeights:
        return InvariantInt4G64AsymWeights()


class Int4G32AsymWeights(Int4Weights):
    name = "int4-g32-asym"
    rounding = SpanRounding(WEIGHT_FORMATS["int4-g32-asym"].group)

    def invariant(self) -> IntegerWeights:
        return InvariantInt4G32AsymWeights()


class InvariantInt4Weights(InvariantIntegers, Int4Weights):
    """Each row of a product has the same bits in any company; so below."""


class InvariantInt4AllWeights(InvariantIntegers, Int4AllWeights): ...


class InvariantInt4G64Weights(InvariantIntegers, Int4G64Weights): ...


class InvariantInt4G32Weights(InvariantIntegers, Int4G32Weights): ...


class InvariantInt4AsymWeights(InvariantIntegers, Int4AsymWeights): ...


class InvariantInt4G64AsymWeights(InvariantIntegers, Int4G64AsymWeights): ...


class InvariantInt4G32AsymWeights(InvariantIntegers, Int4G32AsymWeights): ...


def _divisor(scale_OG: torch.Tensor) -> torch.Tensor:
    return torch.where(scale_OG == 0, torch.ones_like(scale_OG), scale_OG).float()


def _extreme(grouped_OGg: torch.Tensor) -> torch.Tensor:
    """The largest magnitude with its sign, the positive one of two: [O, G]."""
    high_OG, low_OG = grouped_OGg.amax(-1), grouped_OGg.amin(-1)
    return torch.where(high_OG >= -low_OG, high_OG, low_OG)
