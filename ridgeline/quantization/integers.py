"""How do formats of 8 and 4 bits keep and multiply a matrix? On the CPU in panels of the native
kernels, which round the rows of x to 8 bits too; elsewhere as codes and scales that become numbers
of the dtype of x before each product: smaller, not faster.

Letters: T tokens, I inputs, O outputs, G groups of a row.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from ridgeline.errors import ConfigError
from ridgeline.kernels.cpu import native
from ridgeline.kernels.cpu.packed_linear import (
    INPUTS_A_LINE,
    PANEL,
    Codes,
    PackedMatrix,
    first_rows,
    gather,
    linear,
    pack,
    takes_rows,
)
from ridgeline.kernels.invariant_linear import invariant_linear
from ridgeline.kernels.small_linear import Fusion
from ridgeline.quantization.contract import Parameters

PIECE_NUMBERS = 1 << 22  # of a matrix that are float32 at once while it is rounded
UNPACKED_NUMBERS = 1 << 26  # of a vocabulary that are numbers of the serving dtype at once


class Rounding(Protocol):
    """Codes of whole rows, [O, ...] uint8, and their scales; codes and scales to float32 rows."""

    kind: Codes
    group: int

    def round_rows(self, weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def read_rows(self, codes: torch.Tensor, scales: torch.Tensor, inputs: int) -> torch.Tensor: ...


def fits_panels(weight_OI: torch.Tensor, kind: Codes) -> bool:
    """The native kernels are here, read this dtype, and the panels of these rows are full, so that
    they take the bytes that the memory contract says."""
    return (
        takes_rows(weight_OI)
        and weight_OI.shape[0] % PANEL == 0
        and weight_OI.shape[1] % INPUTS_A_LINE[kind] == 0
        and weight_OI.numel() > 0
        and native.library() is not None
    )


def keep_packed(packed: PackedMatrix) -> Parameters:
    """As parameters of a layer; "shape" is a tensor without numbers that carries the sizes."""
    shape = torch.empty(packed.outputs, packed.inputs, 0)
    kept = {"panels": packed.codes, "shape": shape}
    return kept if packed.scales is None else {**kept, "scale": packed.scales}


def packed_of(parameters: Parameters, kind: Codes, group: int = 0) -> PackedMatrix | None:
    """What `keep_packed` kept; None if the matrix is kept in another way."""
    if "panels" not in parameters:
        return None
    outputs, inputs, _ = parameters["shape"].shape
    scale = parameters.get("scale")
    return PackedMatrix(parameters["panels"], scale, outputs, inputs, kind, group)


def fused_packed(
    x_TI: torch.Tensor, packed: PackedMatrix | None, bias_O: torch.Tensor | None, fusion: Fusion
) -> torch.Tensor | None:
    """The product and what stands behind it; None for what stands before it, and without panels."""
    if packed is None or not takes_rows(x_TI):
        return None
    if fusion.norm is not None or fusion.sum_TI is not None or fusion.of_gated:
        return None
    if fusion.is_gated and packed.outputs % (2 * PANEL):
        return None
    return linear(
        x_TI,
        packed,
        bias_N=bias_O,
        gated=fusion.is_gated,
        residual_MO=fusion.residual_TO,
        out_MO=fusion.residual_TO,
    )


class IntegerWeights:
    """What int8 and int4 have in common; they differ in `rounding`."""

    name: str
    bits: int | None
    rounding: Rounding

    def parameters(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> Parameters:
        return {"weight": torch.empty(outputs, inputs, dtype=dtype, device=device)}

    def finish(self, parameters: Parameters) -> Parameters:
        """ConfigError if a weight is infinite or NaN."""
        weight_OI = parameters["weight"]
        if fits_panels(weight_OI, self.rounding.kind):
            try:
                packed = pack(weight_OI, self.rounding.kind, group=self.rounding.group)
            except ValueError as error:
                raise self._not_finite(weight_OI) from error
            return keep_packed(packed)
        outputs, inputs = weight_OI.shape
        step = max(1, PIECE_NUMBERS // max(1, inputs))
        pieces = [
            self.rounding.round_rows(weight_OI[begin : begin + step].float())
            for begin in range(0, max(1, outputs), step)
        ]
        codes, scale = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        if not bool(torch.isfinite(scale).all()):
            raise self._not_finite(weight_OI)
        shape = torch.empty(outputs, inputs, 0, device=weight_OI.device)
        return {"codes": codes, "scale": scale, "shape": shape}

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        packed = self.packed(parameters)
        if packed is not None:
            return linear(x_TI.contiguous(), packed, bias_N=bias_O)
        return self._product(x_TI, self.dequantize(parameters).to(x_TI.dtype), bias_O)

    def linear_into(
        self, x_TI: torch.Tensor, parameters: Parameters, out_TO: torch.Tensor
    ) -> torch.Tensor:
        """Without panels some rows of the matrix after the other, so that no more than
        UNPACKED_NUMBERS of it are unpacked at once."""
        packed, outputs = self.packed(parameters), out_TO.shape[1]
        if packed is not None:
            return linear(x_TI, first_rows(packed, outputs), out_MO=out_TO)
        inputs = parameters["shape"].shape[1]
        step = max(1, UNPACKED_NUMBERS // max(1, inputs))
        for begin in range(0, outputs, step):
            some = slice(begin, min(outputs, begin + step))
            codes, scale = parameters["codes"][some], parameters["scale"][some]
            weight_OI = self.rounding.read_rows(codes, scale, inputs).to(x_TI.dtype)
            out_TO[:, some] = self._product(x_TI, weight_OI, None)
        return out_TO

    def rows(
        self, parameters: Parameters, rows_T: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        packed = self.packed(parameters)
        if packed is not None:
            return gather(packed, rows_T, dtype)
        codes = parameters["codes"].index_select(0, rows_T)
        scale = parameters["scale"].index_select(0, rows_T)
        inputs = parameters["shape"].shape[1]
        return self.rounding.read_rows(codes, scale, inputs).to(dtype)

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        return fused_packed(x_TI, self.packed(parameters), bias_O, fusion)

    def dequantize(self, parameters: Parameters) -> torch.Tensor:
        """In float32."""
        packed = self.packed(parameters)
        if packed is not None:
            return gather(packed, None, torch.float32)
        inputs = parameters["shape"].shape[1]
        return self.rounding.read_rows(parameters["codes"], parameters["scale"], inputs)

    def packed(self, parameters: Parameters) -> PackedMatrix | None:
        return packed_of(parameters, self.rounding.kind, self.rounding.group)

    def _product(
        self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return functional.linear(x_TI, weight_OI, bias_O)

    def _not_finite(self, weight_OI: torch.Tensor) -> ConfigError:
        outputs, inputs = weight_OI.shape
        return ConfigError(
            f"cannot round a matrix of {outputs} x {inputs} weights to {self.name}: it has infinite"
            " or NaN weights, or such that their scales are; repair the checkpoint, or serve it as"
            " it is with weight_format plain"
        )


class InvariantIntegerWeights(IntegerWeights):
    """Native products of integers are exact and their groups are added in one order, so a row does
    not depend on others; elsewhere one way of multiplying for any number of rows."""

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        return None

    def _product(
        self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return invariant_linear(x_TI, weight_OI, bias_N=bias_O)
