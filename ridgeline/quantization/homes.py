"""Where do matrices of 4 and 8 bits live, and who multiplies by them? A table: the first home that
takes a matrix lays its numbers out for its kernels, exactly, and multiplies by them from then on.

A home is a class without arguments, in any room from `kernels` on (the words it needs are in
`kernels.quantized_matrix`), and one line of HOMES, before the last one, which takes every matrix.
Letters: T tokens, I inputs, O outputs, C some columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol, runtime_checkable

import torch
from torch.nn import functional

from ridgeline.errors import InternalError
from ridgeline.kernels.invariant_linear import invariant_linear
from ridgeline.kernels.quantized_matrix import SIZES, QuantizedMatrix, read_sizes, sizes_of
from ridgeline.kernels.small_linear import Fusion, Unfused, multiply_into
from ridgeline.quantization.contract import Parameters
from ridgeline.registry import load

HOMES = {
    "panels": "ridgeline.quantization.panels:NativePanels",
    "hopper-int4": "ridgeline.kernels.int4_linear:Int4Home",
    "hopper-int8": "ridgeline.kernels.int8_home:GpuInt8",
    "wide-int8": "ridgeline.kernels.int8_home:WideInt8",
    "portable": "ridgeline.quantization.homes:PortableHome",
}
# Those whose products have rows that depend on no other row.
INVARIANT_HOMES = {
    "panels": "ridgeline.quantization.panels:NativePanels",
    "hopper-int8": "ridgeline.kernels.int8_home:InvariantGpuInt8",
    "portable": "ridgeline.quantization.homes:InvariantHome",
}
UNPACKED_NUMBERS = 1 << 26  # of a vocabulary that are numbers of the serving dtype at once
MARK = "home:"  # and the name of the home that kept it: a parameter without numbers


class Home(Protocol):
    def takes(self, like: QuantizedMatrix, dtype: torch.dtype) -> bool:
        """A matrix of this device, shape, bits, group, scales and zero points, multiplied by rows
        of `dtype`. The numbers are not looked at: it may be an `outline`."""
        ...

    def keep(self, matrix: QuantizedMatrix) -> Parameters:
        """Laid out for the kernels: the same codes, scales and zero points, in as many bytes."""
        ...

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        """x @ W.T + bias, [T, O] in the dtype of x."""
        ...

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        """As that of a WeightFormat; None where the caller is to do one after the other."""
        ...

    def matrix(self, parameters: Parameters) -> QuantizedMatrix:
        """What was kept, back again, to the last bit."""
        ...


@runtime_checkable
class LooksUp(Protocol):
    """A home for vocabularies too: without these two a look-up turns the whole matrix back."""

    def rows(
        self, parameters: Parameters, rows_T: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """These rows of W, [T, I]."""
        ...

    def linear_into(
        self, x_TI: torch.Tensor, parameters: Parameters, out_TO: torch.Tensor
    ) -> torch.Tensor:
        """`linear` of as many of the first rows of W as `out_TO` has columns."""
        ...


@runtime_checkable
class ReadsColumns(Protocol):
    """A home that rounds x, and can tell columns of W for those of x that should not be."""

    def columns(self, parameters: Parameters, columns_C: torch.Tensor) -> torch.Tensor:
        """[O, C] float32."""
        ...


@runtime_checkable
class RoundsWeights(Protocol):
    """A home whose kernels round a matrix and lay it out in one go."""

    def rounded(self, weight_OI: torch.Tensor, like: QuantizedMatrix) -> Parameters:
        """As `keep` of the rounded matrix, to the last bit. ValueError if a weight is infinite or
        NaN."""
        ...


@dataclass(frozen=True, slots=True)
class Homes:
    """A table of homes. `looks_up`: only those that look up rows, and the last one."""

    table: Mapping[str, str]
    looks_up: bool = False

    def of_vocabulary(self) -> Homes:
        return replace(self, looks_up=True)

    def choose(self, like: QuantizedMatrix, dtype: torch.dtype) -> str:
        """The name of the first home that takes such a matrix."""
        for name, where in self.table.items():
            home = _opened(where)
            if self.looks_up and not isinstance(home, LooksUp):
                continue
            if home.takes(like, dtype):
                return name
        raise InternalError("the last home of a table takes every matrix")

    def keep(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> Parameters:
        """In the first home that takes it, exactly, to be multiplied by rows of `dtype`."""
        name = self.choose(matrix, dtype)
        return mark(name, self.named(name).keep(matrix))

    def named(self, name: str) -> Home:
        return _opened(self.table[name])

    def of(self, parameters: Parameters) -> Home:
        """The home that kept them."""
        for name, where in self.table.items():
            if MARK + name in parameters:
                return _opened(where)
        raise InternalError(f"no home of {', '.join(self.table)} kept {', '.join(parameters)}")


def mark(name: str, kept: Parameters) -> Parameters:
    """With the name of the home, which a later start reads."""
    return {**kept, MARK + name: torch.empty(0)}


def keep(matrix: QuantizedMatrix, dtype: torch.dtype) -> Parameters:
    """In the first home of HOMES that takes it: exactly, nothing is rounded again."""
    return Homes(HOMES).keep(matrix, dtype)


@cache
def _opened(where: str) -> Home:
    opened: Home = load({where: where}, where, "home of quantized matrices")()
    return opened


class PortableHome(Unfused):
    """Codes and scales as they are. They become numbers of the dtype of x before each product:
    smaller, not faster, and x is not rounded."""

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


class InvariantHome(PortableHome):
    """One way of multiplying for any number of rows."""

    def _product(
        self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return invariant_linear(x_TI, weight_OI, bias_N=bias_O)

    def _product_into(
        self, x_TI: torch.Tensor, weight_OI: torch.Tensor, out_TO: torch.Tensor
    ) -> torch.Tensor:
        return invariant_linear(x_TI, weight_OI, out_MN=out_TO)
