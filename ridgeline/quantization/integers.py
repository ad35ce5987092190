"""How do formats of 8 and 4 bits round a matrix while it is loaded, and who multiplies by it then?
A rounding says which numbers there are; a layout (see `weight_layouts`) keeps them and multiplies.

Of 8 bits: one float32 scale for each row, which is divided by its largest magnitude / 127 and
rounded to the nearest integer: off by at most half a scale.

Of 4 bits: groups of 32, 64 or 128 neighbours of a row. Symmetric (`int4`, of 128, `int4-g64` and
`int4-g32`): one bfloat16 scale for a group. The number of the largest magnitude becomes -8, so that
all codes are of use; a number is off by at most half a scale, or by a whole one if it is the
opposite end. Asymmetric (`int4-asym`, `int4-g64-asym` and `int4-g32-asym`): a byte more for the
code of 0, and the 15 steps span a group's smallest and largest number, 0 included; a number is off
by half a scale, or a whole one at the ends.

With the native CPU kernels the rows of x are rounded to 8 bits at each product, with a scale for
each row, or for each group of it. Letters: T tokens, I inputs, O outputs, G groups of a row, g
numbers of a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch.nn import functional

from ridgeline.errors import ConfigError
from ridgeline.formats import WEIGHT_FORMATS
from ridgeline.kernels.cpu.packed_linear import PackedMatrix
from ridgeline.kernels.grouped_experts import StackedMatrix
from ridgeline.kernels.quantized_matrix import (
    Parameters,
    QuantizedMatrix,
    WeightLayout,
    joined,
    outline,
)
from ridgeline.kernels.small_linear import Fusion
from ridgeline.quantization.contract import WeightFormat
from ridgeline.quantization.panels import packed_of
from ridgeline.quantization.weight_layouts import INVARIANT_LAYOUTS, LAYOUTS, Layouts, mark

PIECE_NUMBERS = 1 << 22  # of a matrix that are float32 at once while it is rounded
LARGEST = 127
BIAS = 128  # codes are kept as unsigned bytes, as the dot products want them
LOW, HIGH = -8, 7
STEPS = HIGH - LOW


# ------------------------------------------------------------------------ roundings


@dataclass(frozen=True, slots=True)
class Rounding(ABC):
    """Which numbers a matrix may be made of: the fields of the QuantizedMatrix that comes out."""

    bits: int
    group: int
    scale_dtype: torch.dtype
    has_zero: bool = False

    def outline(self, outputs: int, inputs: int, device: torch.device) -> QuantizedMatrix:
        """What `round_rows` of such a matrix would return, but for the numbers."""
        return outline(
            outputs,
            inputs,
            bits=self.bits,
            group=self.group,
            scale_dtype=self.scale_dtype,
            has_zero=self.has_zero,
            device=device,
        )

    @abstractmethod
    def round_rows(self, weight_OI: torch.Tensor) -> QuantizedMatrix:
        """Of some whole rows in float32. A scale is infinite or NaN where a weight is."""


class RowRounding(Rounding):
    """8 bits, one scale for a row."""

    def round_rows(self, weight_OI: torch.Tensor) -> QuantizedMatrix:
        # By a tensor: a GPU divides by a Python number as it multiplies by its reciprocal.
        scale_O1 = weight_OI.abs().amax(1, keepdim=True) / weight_OI.new_full((), LARGEST)
        scale_O1 = torch.where(scale_O1 == 0, torch.ones_like(scale_O1), scale_O1)
        codes_OI = (weight_OI / scale_O1).round().clamp(-LARGEST, LARGEST)
        codes = (codes_OI + BIAS).to(torch.uint8)
        return QuantizedMatrix(codes, scale_O1, None, weight_OI.shape[1], 8, 0)


class GroupRounding(Rounding):
    """4 bits, symmetric, with one scale for `group` neighbours."""

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


def _divisor(scale_OG: torch.Tensor) -> torch.Tensor:
    return torch.where(scale_OG == 0, torch.ones_like(scale_OG), scale_OG).float()


def _extreme(grouped_OGg: torch.Tensor) -> torch.Tensor:
    """The largest magnitude with its sign, the positive one of two: [O, G]."""
    high_OG, low_OG = grouped_OGg.amax(-1), grouped_OGg.amin(-1)
    return torch.where(high_OG >= -low_OG, high_OG, low_OG)


# ------------------------------------------------------------------------ formats


class PackedIntegers(WeightFormat):
    """Matrices that are codes and scales already, each in the first layout that takes it.

    `is_invariant`: each row of a product has the same bits in any batch. Native products of
    integers are exact and their groups are added in one order, so a row does not depend on others;
    elsewhere there is one way of multiplying for any number of rows."""

    serves_vocabulary = True

    def __init__(self, name: str, bits: int | None = None) -> None:
        self.name = name
        self.bits = bits
        self.layouts = Layouts(LAYOUTS)
        self.is_invariant = False

    def finish(self, parameters: Parameters) -> Parameters:
        """Nothing is rounded here; see `keep`."""
        return parameters

    def keep(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> Parameters:
        """Of a matrix that is quantized already: the same numbers, nothing is rounded again."""
        return self.layouts.keep(matrix, dtype)

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return self.layouts.of(parameters).linear(x_TI, parameters, bias_O)

    def linear_into(
        self, x_TI: torch.Tensor, parameters: Parameters, out_TO: torch.Tensor
    ) -> torch.Tensor:
        return self.layouts.of(parameters).linear_into(x_TI, parameters, out_TO)

    def rows(
        self, parameters: Parameters, rows_T: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        return self.layouts.of(parameters).rows(parameters, rows_T, dtype)

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        if self.is_invariant:
            return None
        return self.layouts.of(parameters).fused(x_TI, parameters, bias_O, fusion)

    def dequantize(self, parameters: Parameters) -> torch.Tensor:
        """In float32."""
        return self.matrix(parameters).dequantize()

    def matrix(self, parameters: Parameters) -> QuantizedMatrix:
        """The codes, scales and zero points that were kept."""
        return self.layout(parameters).matrix(parameters)

    def layout(self, parameters: Parameters) -> WeightLayout:
        return self.layouts.of(parameters)

    def invariant(self) -> Self:
        other = copy(self)
        other.layouts = replace(self.layouts, table=INVARIANT_LAYOUTS)
        other.is_invariant = True
        return other

    def of_experts(self) -> Self:
        other = copy(self)
        other.layouts = self.layouts.of_experts()
        return other

    def stacked(self, parameters: Parameters, bias_XN: torch.Tensor | None) -> StackedMatrix | None:
        return self.layouts.stacked(parameters, bias_XN)

    def packed(self, parameters: Parameters) -> PackedMatrix | None:
        return packed_of(parameters)

    def of_vocabulary(self) -> Self:
        """The same for embedding and output matrix: in layouts that look up rows."""
        other = copy(self)
        other.layouts = self.layouts.of_vocabulary()
        return other


class IntegerWeights(PackedIntegers):
    """What is rounded while it is loaded, as `rounding` says."""

    def __init__(self, name: str, rounding: Rounding) -> None:
        super().__init__(name, rounding.bits)
        self.rounding = rounding

    def finish(self, parameters: Parameters) -> Parameters:
        """ConfigError if a weight is infinite or NaN."""
        weight_OI = parameters["weight"]
        outputs, inputs = weight_OI.shape
        like = self.rounding.outline(outputs, inputs, weight_OI.device)
        name = self.layouts.choose(like, weight_OI.dtype)
        layout = self.layouts.named(name)
        try:
            kept = layout.rounded(weight_OI, like)
        except ValueError as error:
            raise self._not_finite(weight_OI) from error
        return mark(name, layout.keep(self._rounded(weight_OI)) if kept is None else kept)

    def _rounded(self, weight_OI: torch.Tensor) -> QuantizedMatrix:
        outputs, inputs = weight_OI.shape
        step = max(1, PIECE_NUMBERS // max(1, inputs))
        pieces = [
            self.rounding.round_rows(weight_OI[begin : begin + step].float())
            for begin in range(0, max(1, outputs), step)
        ]
        matrix = joined(pieces)
        if not bool(torch.isfinite(matrix.scale).all()):
            raise self._not_finite(weight_OI)
        return matrix

    def _not_finite(self, weight_OI: torch.Tensor) -> ConfigError:
        outputs, inputs = weight_OI.shape
        return ConfigError(
            f"cannot round a matrix of {outputs} x {inputs} weights to {self.name}: it has infinite"
            " or NaN weights, or such that their scales are; repair the checkpoint, or serve it as"
            " it is with weight_format plain"
        )


def int8() -> IntegerWeights:
    return IntegerWeights("int8", RowRounding(8, 0, torch.float32))


def _int4(name: str) -> IntegerWeights:
    group, is_asymmetric = WEIGHT_FORMATS[name].group, name.endswith("-asym")
    kind = SpanRounding if is_asymmetric else GroupRounding
    return IntegerWeights(name, kind(4, group, torch.bfloat16, is_asymmetric))


int4 = partial(_int4, "int4")
int4_all = partial(_int4, "int4-all")  # beside a vocabulary of 4 bits in groups of 32
int4_g64, int4_g32 = partial(_int4, "int4-g64"), partial(_int4, "int4-g32")
int4_asym = partial(_int4, "int4-asym")
int4_g64_asym, int4_g32_asym = partial(_int4, "int4-g64-asym"), partial(_int4, "int4-g32-asym")
