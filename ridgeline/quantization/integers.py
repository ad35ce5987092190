"""How do formats of 8 and 4 bits round a matrix while it is loaded, and who multiplies by it then?
A rounding says which numbers there are; a home (see `homes`) keeps them and multiplies.

Letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Protocol, Self

import torch

from ridgeline.errors import ConfigError
from ridgeline.kernels.quantized_matrix import QuantizedMatrix, joined
from ridgeline.kernels.small_linear import Fusion, Unfused
from ridgeline.quantization.contract import Parameters
from ridgeline.quantization.homes import (
    HOMES,
    INVARIANT_HOMES,
    Home,
    Homes,
    LooksUp,
    RoundsWeights,
    mark,
)

PIECE_NUMBERS = 1 << 22  # of a matrix that are float32 at once while it is rounded


class Rounding(Protocol):
    """Which numbers a matrix may be made of."""

    def outline(self, outputs: int, inputs: int, device: torch.device) -> QuantizedMatrix:
        """What `round_rows` of such a matrix would return, but for the numbers."""
        ...

    def round_rows(self, weight_OI: torch.Tensor) -> QuantizedMatrix:
        """Of some whole rows in float32. A scale is infinite or NaN where a weight is."""
        ...


class IntegerWeights:
    """What all formats of integers have in common; they differ in `rounding`."""

    name: str
    bits: int | None
    rounding: Rounding
    homes = Homes(HOMES)

    def parameters(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> Parameters:
        return {"weight": torch.empty(outputs, inputs, dtype=dtype, device=device)}

    def finish(self, parameters: Parameters) -> Parameters:
        """ConfigError if a weight is infinite or NaN."""
        weight_OI = parameters["weight"]
        outputs, inputs = weight_OI.shape
        like = self.rounding.outline(outputs, inputs, weight_OI.device)
        name = self.homes.choose(like, weight_OI.dtype)
        home = self.homes.named(name)
        if isinstance(home, RoundsWeights):
            try:
                return mark(name, home.rounded(weight_OI, like))
            except ValueError as error:
                raise self._not_finite(weight_OI) from error
        return mark(name, home.keep(self._rounded(weight_OI)))

    def keep(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> Parameters:
        """Of a matrix that is quantized already: the same numbers, nothing is rounded again."""
        return self.homes.keep(matrix, dtype)

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return self.homes.of(parameters).linear(x_TI, parameters, bias_O)

    def linear_into(
        self, x_TI: torch.Tensor, parameters: Parameters, out_TO: torch.Tensor
    ) -> torch.Tensor:
        home = self.homes.of(parameters)
        if isinstance(home, LooksUp):
            return home.linear_into(x_TI, parameters, out_TO)
        return out_TO.copy_(home.linear(x_TI, parameters, None)[:, : out_TO.shape[1]])

    def rows(
        self, parameters: Parameters, rows_T: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        home = self.homes.of(parameters)
        if isinstance(home, LooksUp):
            return home.rows(parameters, rows_T, dtype)
        return home.matrix(parameters).rows(rows_T).dequantize().to(dtype)

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        return self.homes.of(parameters).fused(x_TI, parameters, bias_O, fusion)

    def dequantize(self, parameters: Parameters) -> torch.Tensor:
        """In float32."""
        return self.matrix(parameters).dequantize()

    def matrix(self, parameters: Parameters) -> QuantizedMatrix:
        """The codes, scales and zero points that were kept."""
        return self.home(parameters).matrix(parameters)

    def home(self, parameters: Parameters) -> Home:
        return self.homes.of(parameters)

    def of_vocabulary(self) -> Self:
        """The same for embedding and output matrix: in homes that look up rows."""
        other = type(self)()
        other.homes = self.homes.of_vocabulary()
        return other

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


class InvariantIntegers(Unfused, IntegerWeights):
    """The same numbers, and products whose rows have the same bits in any company. Native products
    of integers are exact and their groups are added in one order, so a row does not depend on
    others; elsewhere one way of multiplying for any number of rows."""

    homes = Homes(INVARIANT_HOMES)
