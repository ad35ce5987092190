"""In which layout do matrices of 4 and 8 bits lie, and who multiplies by them? A table: the first
layout that takes a matrix lays its numbers out for its kernels, exactly, and multiplies by them
from then on.

A layout is a class without arguments, in any room from `kernels` on (its base is in
`kernels.quantized_matrix`), and one line of LAYOUTS, before the last one, which takes every matrix.
Letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.nn import functional

from ridgeline.errors import InternalError
from ridgeline.kernels.grouped_experts import StackedMatrix
from ridgeline.kernels.invariant_linear import invariant_linear
from ridgeline.kernels.quantized_matrix import (
    SIZES,
    Parameters,
    QuantizedMatrix,
    WeightLayout,
    read_sizes,
    sizes_of,
)
from ridgeline.kernels.small_linear import multiply_into
from ridgeline.registry import opened

LAYOUTS = {
    "panels": "ridgeline.quantization.panels:NativePanels",
    "hopper-int4": "ridgeline.kernels.int4_linear:Int4Layout",
    "hopper-int8": "ridgeline.kernels.int8_layout:GpuInt8",
    "wide-int8": "ridgeline.kernels.int8_layout:WideInt8",
    "portable": "ridgeline.quantization.weight_layouts:PortableLayout",
}
# Those whose products have rows that depend on no other row.
INVARIANT_LAYOUTS = {
    "panels": "ridgeline.quantization.panels:NativePanels",
    "hopper-int8": "ridgeline.kernels.int8_layout:InvariantGpuInt8",
    "portable": "ridgeline.quantization.weight_layouts:InvariantLayout",
}
NOT_GROUPED = frozenset({"hopper-int4"})
STACKED_GROUPS = (32, 64, 128)
UNPACKED_NUMBERS = 1 << 26  # of a vocabulary that are numbers of the serving dtype at once
# And the name of the layout that kept it: a parameter without numbers, also in files of packed
# weights that earlier versions wrote.
MARK = "home:"


@dataclass(frozen=True, slots=True)
class Layouts:
    """A table of layouts. `looks_up`: only those that look up rows, and the last one."""

    table: Mapping[str, str]
    looks_up: bool = False

    def of_vocabulary(self) -> Layouts:
        return replace(self, looks_up=True)

    def of_experts(self) -> Layouts:
        """Those that grouped products of experts read, and all of other devices."""
        table = {name: where for name, where in self.table.items() if name not in NOT_GROUPED}
        return replace(self, table=table)

    def stacked(self, parameters: Parameters, bias_XN: torch.Tensor | None) -> StackedMatrix | None:
        """As that of a WeightFormat."""
        if "int8" in parameters:
            return StackedMatrix(parameters["int8"], parameters["scale"], bias_XN)
        if SIZES not in parameters:
            return None
        _, inputs, bits, group = read_sizes(parameters)
        if bits != 4 or group not in STACKED_GROUPS or inputs % 2:
            return None
        scale, zero = parameters["scale"], parameters.get("zero")
        return StackedMatrix(parameters["codes"], scale, bias_XN, zero, group)

    def choose(self, like: QuantizedMatrix, dtype: torch.dtype) -> str:
        """The name of the first layout that takes such a matrix."""
        for name, where in self.table.items():
            layout = _opened(where)
            if self.looks_up and not layout.looks_up:
                continue
            if layout.takes(like, dtype):
                return name
        raise InternalError("the last layout of a table takes every matrix")

    def keep(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> Parameters:
        """In the first layout that takes it, exactly, to be multiplied by rows of `dtype`."""
        name = self.choose(matrix, dtype)
        return mark(name, self.named(name).keep(matrix))

    def named(self, name: str) -> WeightLayout:
        return _opened(self.table[name])

    def of(self, parameters: Parameters) -> WeightLayout:
        """The layout that kept them."""
        for name, where in self.table.items():
            if MARK + name in parameters:
                return _opened(where)
        raise InternalError(f"no layout of {', '.join(self.table)} kept {', '.join(parameters)}")


def mark(name: str, kept: Parameters) -> Parameters:
    """With the name of the layout, which a later start reads."""
    return {**kept, MARK + name: torch.empty(0)}


@cache
def _opened(where: str) -> WeightLayout:
    found: WeightLayout = opened(where)()
    return found


class PortableLayout(WeightLayout):
    """Codes and scales as they are. They become numbers of the dtype of x before each product:
    smaller, not faster, and x is not rounded."""

    looks_up = True

    def takes(self, like: QuantizedMatrix, dtype: torch.dtype) -> bool:
        return True

    def keep(self, matrix: QuantizedMatrix) -> Parameters:
        kept = {"codes": matrix.codes.contiguous(), "scale": matrix.scale.contiguous()}
        if matrix.zero is not None:
            kept["zero"] = matrix.zero.contiguous()
        return {**kept, SIZES: sizes_of(matrix)}

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        weight_OI = self.matrix(parameters).dequantize().to(x_TI.dtype)
        return self._product(x_TI, weight_OI, bias_O)

    def linear_into(
        self, x_TI: torch.Tensor, parameters: Parameters, out_TO: torch.Tensor
    ) -> torch.Tensor:
        """Some rows of the matrix after the other, so that no more than UNPACKED_NUMBERS of it are
        unpacked at once. A CPU multiplies in the dtype of `out_TO`, which costs it no more."""
        matrix, outputs = self.matrix(parameters), out_TO.shape[1]
        x_TI = x_TI if x_TI.is_cuda else x_TI.to(out_TO.dtype)
        step = max(1, UNPACKED_NUMBERS // max(1, matrix.inputs))
        for begin in range(0, outputs, step):
            end = min(outputs, begin + step)
            weight_OI = matrix.part(begin, end).dequantize().to(x_TI.dtype)
            self._product_into(x_TI, weight_OI, out_TO[:, begin:end])
        return out_TO

    def rows(
        self, parameters: Parameters, rows_T: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        return self.matrix(parameters).rows(rows_T).dequantize().to(dtype)

    def matrix(self, parameters: Parameters) -> QuantizedMatrix:
        _, inputs, bits, group = read_sizes(parameters)
        zero = parameters.get("zero")
        return QuantizedMatrix(parameters["codes"], parameters["scale"], zero, inputs, bits, group)

    def _product(
        self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return functional.linear(x_TI, weight_OI, bias_O)

    def _product_into(
        self, x_TI: torch.Tensor, weight_OI: torch.Tensor, out_TO: torch.Tensor
    ) -> torch.Tensor:
        return multiply_into(x_TI, weight_OI, out_TO)


class InvariantLayout(PortableLayout):
    """One way of multiplying for any number of rows."""

    def _product(
        self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return invariant_linear(x_TI, weight_OI, bias_N=bias_O)

    def _product_into(
        self, x_TI: torch.Tensor, weight_OI: torch.Tensor, out_TO: torch.Tensor
    ) -> torch.Tensor:
        return invariant_linear(x_TI, weight_OI, out_MN=out_TO)
