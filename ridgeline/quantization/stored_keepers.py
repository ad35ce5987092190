"""Who keeps the matrices of a checkpoint that are stored alike, and multiplies by them?

Letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

from ridgeline.errors import InternalError
from ridgeline.kernels.quantized_matrix import QuantizedMatrix, joined
from ridgeline.kernels.small_linear import Fusion, Unfused
from ridgeline.quantization.contract import Parameters, WeightFormat
from ridgeline.quantization.fp8 import Fp8Weights
from ridgeline.quantization.fp8_blocks import Fp8BlockWeights
from ridgeline.quantization.homes import Homes
from ridgeline.quantization.plain import PlainWeights
from ridgeline.quantization.readers import Blocks8, Ordered, Read, Rows8

ORDER = "order"  # of the columns of a matrix, beside what its home keeps

Kind = TypeVar("Kind", QuantizedMatrix, Ordered, Rows8, Blocks8, torch.Tensor)


class Keeper(Protocol):
    """As a WeightFormat, for matrices that have been read."""

    def keep(self, matrices: Sequence[Read | torch.Tensor], dtype: torch.dtype) -> Parameters:
        """One below the other, to be multiplied by rows of `dtype`; a Tensor is as it was."""
        ...

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor: ...

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None: ...

    def dequantize(self, parameters: Parameters) -> torch.Tensor: ...


class CodesKeeper:
    """Integers, in the first home that takes them."""

    def __init__(self, homes: Homes) -> None:
        self._homes = homes

    def keep(self, matrices: Sequence[Read | torch.Tensor], dtype: torch.dtype) -> Parameters:
        return self._homes.keep(joined(_all(matrices, QuantizedMatrix)), dtype)

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return self._homes.of(parameters).linear(x_TI, parameters, bias_O)

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        return self._homes.of(parameters).fused(x_TI, parameters, bias_O, fusion)

    def dequantize(self, parameters: Parameters) -> torch.Tensor:
        return self.matrix(parameters).dequantize()

    def matrix(self, parameters: Parameters) -> QuantizedMatrix:
        """What was kept."""
        return self._homes.of(parameters).matrix(parameters)


class OrderedKeeper(Unfused):
    """Integers whose columns stand group by group: those of x are put in that order first."""

    def __init__(self, homes: Homes) -> None:
        self._codes = CodesKeeper(homes)

    def keep(self, matrices: Sequence[Read | torch.Tensor], dtype: torch.dtype) -> Parameters:
        (one,) = _all(matrices, Ordered)
        return {**self._codes.keep([one.matrix], dtype), ORDER: one.order_I}

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        turned_TI = x_TI.index_select(1, parameters[ORDER])
        return self._codes.linear(turned_TI, parameters, bias_O)

    def dequantize(self, parameters: Parameters) -> torch.Tensor:
        return Ordered(self._codes.matrix(parameters), parameters[ORDER]).dequantize()


class _As:
    """As another format keeps what it has rounded itself."""

    format: WeightFormat

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return self.format.linear(x_TI, parameters, bias_O)

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        return self.format.fused(x_TI, parameters, bias_O, fusion)

    def dequantize(self, parameters: Parameters) -> torch.Tensor:
        return self.format.dequantize(parameters)


class RowsKeeper(_As):
    """Rows of e4m3, as format fp8."""

    def __init__(self, fp8: Fp8Weights) -> None:
        self.format = fp8
        self.fp8 = fp8

    def keep(self, matrices: Sequence[Read | torch.Tensor], dtype: torch.dtype) -> Parameters:
        rows = _all(matrices, Rows8)
        codes_OI = _together([one.codes_OI for one in rows])
        return {"codes": codes_OI, "scale": torch.cat([one.scale_O for one in rows])}


class BlocksKeeper(_As):
    """Blocks of e4m3, as format fp8-block."""

    def __init__(self, blocks: Fp8BlockWeights) -> None:
        self.format = blocks
        self._blocks = blocks

    def keep(self, matrices: Sequence[Read | torch.Tensor], dtype: torch.dtype) -> Parameters:
        blocks = _all(matrices, Blocks8)
        codes_OI = _together([one.codes_OI for one in blocks])
        return self._blocks.keep(codes_OI, torch.cat([one.scale_RC.float() for one in blocks]))


class PlainKeeper(_As):
    """Numbers of the serving dtype, as format plain."""

    def __init__(self, plain: PlainWeights) -> None:
        self.format = plain

    def keep(self, matrices: Sequence[Read | torch.Tensor], dtype: torch.dtype) -> Parameters:
        weight_OI = torch.cat(_all(matrices, torch.Tensor))
        return self.format.finish({"weight": weight_OI})


def _all(matrices: Sequence[Read | torch.Tensor], kind: type[Kind]) -> list[Kind]:
    found = [one for one in matrices if isinstance(one, kind)]
    if len(found) != len(matrices):
        raise InternalError(f"a matrix that was read is no {kind.__name__}")
    return found


def _together(codes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Numbers in e4m3, one below the other; as bytes, which every device can join."""
    return torch.cat([one.view(torch.uint8) for one in codes]).view(codes[0].dtype)
