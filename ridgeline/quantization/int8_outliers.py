"""Weights as in int8, and large numbers of x multiplied in their own dtype beside the rest.

After "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale" (Dettmers et al., 2022): a
few columns of x in large models are so large that one scale for a row leaves little of its other
numbers. Numbers of x beyond THRESHOLD (the paper's 6.0) are taken out of the row before it is
rounded to 8 bits and multiplied by the columns of the weights that belong to them, as these are
kept: in int8 too, so nothing is stored twice (the paper's own program does the same). Each row is
judged alone, where the paper takes a column out of all rows if one has it large: what a request
gets does not depend on the rest of its batch. Where x is not rounded at all nothing has to be taken
out. Letters: T tokens, I inputs, O outputs, C columns with outliers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.kernels.quantized_matrix import Parameters
from ridgeline.kernels.small_linear import Fusion
from ridgeline.quantization.integers import IntegerWeights, RowRounding
from ridgeline.quantization.weight_layouts import LAYOUTS, Layouts

THRESHOLD = 6.0
# Layouts that tell columns, or that do not round x.
OUTLIER_LAYOUTS = {name: LAYOUTS[name] for name in ("panels", "portable")}


@dataclass(frozen=True, slots=True)
class Split:
    """x = rest + loud, where loud has numbers in the columns of `columns_C` alone."""

    rest_TI: torch.Tensor
    loud_TC: torch.Tensor
    columns_C: torch.Tensor


def split_outliers(x_TI: torch.Tensor) -> Split | None:
    """None if there are no outliers."""
    is_loud_TI = x_TI.abs() > THRESHOLD
    columns_C = is_loud_TI.any(0).nonzero().flatten()
    if not len(columns_C):
        return None
    loud_TC = torch.where(is_loud_TI, x_TI, 0)[:, columns_C]
    return Split(x_TI.masked_fill(is_loud_TI, 0), loud_TC, columns_C)


class Int8OutlierWeights(IntegerWeights):
    def __init__(self) -> None:
        super().__init__("int8-outliers", RowRounding(8, 0, torch.float32))
        self.layouts = Layouts(OUTLIER_LAYOUTS)

    def stacked(self, parameters: Parameters, bias_XN: torch.Tensor | None) -> None:
        """Each product looks for the outliers of its own rows."""

    def packed(self, parameters: Parameters) -> None:
        """The same."""

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        layout = self.layout(parameters)
        split = split_outliers(x_TI) if layout.reads_columns else None
        if split is None:
            return super().linear(x_TI, parameters, bias_O)
        y_TO = super().linear(split.rest_TI, parameters, bias_O).float()
        weight_OC = layout.columns(parameters, split.columns_C)
        return y_TO.add_(self._of_loud(split.loud_TC.float(), weight_OC)).to(x_TI.dtype)

    def linear_into(
        self, x_TI: torch.Tensor, parameters: Parameters, out_TO: torch.Tensor
    ) -> torch.Tensor:
        layout = self.layout(parameters)
        split = split_outliers(x_TI) if layout.reads_columns else None
        if split is None:
            return super().linear_into(x_TI, parameters, out_TO)
        super().linear_into(split.rest_TI, parameters, out_TO)
        weight_OC = layout.columns(parameters, split.columns_C)[: out_TO.shape[1]]
        return out_TO.add_(self._of_loud(split.loud_TC.float(), weight_OC))

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        """Only where x has no outliers."""
        if self.layout(parameters).reads_columns:
            begins_with_x = fusion.norm is None and fusion.sum_TI is None and not fusion.of_gated
            if not begins_with_x or split_outliers(x_TI) is not None:
                return None
        return super().fused(x_TI, parameters, bias_O, fusion)

    def _of_loud(self, loud_TC: torch.Tensor, weight_OC: torch.Tensor) -> torch.Tensor:
        """Where the format is invariant, outliers of a row are added one after the other, in the
        order of their columns: those that it has not got are zeros, which change no sum."""
        if not self.is_invariant:
            return loud_TC @ weight_OC.T
        y_TO = loud_TC.new_zeros(len(loud_TC), len(weight_OC))
        for column in range(loud_TC.shape[1]):
            y_TO += loud_TC[:, column, None] * weight_OC[None, :, column]
        return y_TO
