"""Which matrices do the native CPU kernels read, and how are they kept? In panels of 16 rows. The
rows of x are rounded to 8 bits at each product with integers.

Letters: T tokens, I inputs, O outputs, P panels, L lines of a panel, G groups of a row, C some
columns.
"""

from __future__ import annotations

import torch

from ridgeline.errors import InternalError, check
from ridgeline.kernels.cpu import native
from ridgeline.kernels.cpu.packed_linear import (
    GROUPED,
    INPUTS_A_LINE,
    MAX_GROUP,
    PANEL,
    Codes,
    PackedMatrix,
    first_rows,
    gather,
    linear,
    pack,
    pack_codes,
    takes_rows,
)
from ridgeline.kernels.quantized_matrix import (
    SIZES,
    Parameters,
    QuantizedMatrix,
    WeightLayout,
    join_bytes,
    read_sizes,
)
from ridgeline.kernels.small_linear import Fusion

LOWEST = "lowest"  # a parameter without numbers: codes of int8 may be -128


def fits_panels(weight_OI: torch.Tensor, kind: Codes) -> bool:
    """The native kernels are here, read this dtype, and the panels of these rows are full, so that
    they take the bytes that the memory contract says."""
    if not takes_rows(weight_OI):
        return False
    outputs, inputs = weight_OI.shape
    return fills_panels(outputs, inputs, kind)


def fills_panels(outputs: int, inputs: int, kind: Codes) -> bool:
    return (
        outputs % PANEL == 0
        and inputs % INPUTS_A_LINE[kind] == 0
        and outputs * inputs > 0
        and native.library() is not None
    )


def keep_packed(packed: PackedMatrix) -> Parameters:
    """As parameters of a layer; SIZES is a tensor without numbers that carries the sizes."""
    bits = {Codes.INT8: 8, Codes.GROUPS8: 8, Codes.BF16: 16}.get(packed.kind, 4)
    kept = {
        "panels": packed.codes,
        SIZES: torch.empty(packed.outputs, packed.inputs, bits, packed.group, 0),
    }
    beside = {"scale": packed.scales, "zero": packed.zeros}
    if packed.has_lowest:
        kept[LOWEST] = torch.empty(0)
    return kept | {name: tensor for name, tensor in beside.items() if tensor is not None}


def packed_of(parameters: Parameters) -> PackedMatrix | None:
    """What `keep_packed` kept; None if the matrix is kept in another way."""
    if "panels" not in parameters:
        return None
    outputs, inputs, bits, group = read_sizes(parameters)
    scale, zero = parameters.get("scale"), parameters.get("zero")
    kind: Codes | None = Codes.BF16
    if scale is not None:
        kind = kind_of(bits, group, scale.dtype, has_zero=zero is not None)
    if kind is None:
        raise InternalError(f"there are no panels of {bits} bits in groups of {group}")
    has_lowest = LOWEST in parameters
    codes = parameters["panels"]
    return PackedMatrix(codes, scale, outputs, inputs, kind, group, zero, has_lowest)


def kind_of(bits: int, group: int, scale_dtype: torch.dtype, *, has_zero: bool) -> Codes | None:
    """Of which kind the panels of such a matrix are; None: the kernels have none."""
    if bits == 8 and group == 0:
        return None if has_zero else Codes.INT8
    if not 0 < group <= MAX_GROUP or group % 8 or (bits == 8 and has_zero):
        return None
    if bits == 8:
        return Codes.GROUPS8
    is_usual = scale_dtype == torch.bfloat16 and not has_zero
    return Codes.INT4 if is_usual else Codes.GROUPS4


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


class NativePanels(WeightLayout):
    """4 bits in groups of a multiple of 8 up to 512, with zero points or without; 8 bits in such
    groups or whole rows, without. Scales of 16 or 32 bits."""

    looks_up = True
    reads_columns = True

    def takes(self, like: QuantizedMatrix, dtype: torch.dtype) -> bool:
        kind = _kind(like)
        return (
            kind is not None
            and like.codes.device.type == "cpu"
            and dtype in native.DTYPES
            and fills_panels(like.outputs, like.inputs, kind)
        )

    def keep(self, matrix: QuantizedMatrix) -> Parameters:
        return keep_packed(pack_codes(matrix, _taken(matrix)))

    def rounded(self, weight_OI: torch.Tensor, like: QuantizedMatrix) -> Parameters:
        kind, has_zero = _taken(like), like.zero is not None
        packed = pack(weight_OI.contiguous(), kind, group=like.group, has_zero=has_zero)
        return keep_packed(packed)

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return linear(x_TI.contiguous(), _packed(parameters), bias_N=bias_O)

    def linear_into(
        self, x_TI: torch.Tensor, parameters: Parameters, out_TO: torch.Tensor
    ) -> torch.Tensor:
        packed = first_rows(_packed(parameters), out_TO.shape[1])
        return linear(x_TI, packed, out_MO=out_TO)

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        return fused_packed(x_TI, _packed(parameters), bias_O, fusion)

    def rows(
        self, parameters: Parameters, rows_T: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        return gather(_packed(parameters), rows_T, dtype)

    def columns(self, parameters: Parameters, columns_C: torch.Tensor) -> torch.Tensor:
        """Of whole rows of 8 bits."""
        packed = _packed(parameters)
        check(packed.kind == Codes.INT8 and packed.scales is not None, "columns of 8 bits")
        lines_PL16 = packed.codes.view(-1, packed.codes.shape[1], PANEL, 4)
        codes_CP = lines_PL16[:, columns_C // 4, :, columns_C % 4]
        codes_OC = codes_CP.reshape(len(columns_C), packed.outputs).T.float() - 128
        return codes_OC * parameters["scale"].float()[:, None]

    def matrix(self, parameters: Parameters) -> QuantizedMatrix:
        packed = _packed(parameters)
        _, inputs, bits, group = read_sizes(parameters)
        panels, lines, _ = packed.codes.shape
        words = packed.codes.view(panels, lines, PANEL, 4).transpose(1, 2)
        if bits == 8:
            codes = words.reshape(packed.outputs, -1)
        else:
            both = torch.cat((words & 15, words >> 4), -1)
            codes = join_bytes(both.reshape(packed.outputs, -1), 4)
        scale, zero = parameters["scale"], parameters.get("zero")
        scale = _of_groups(scale) if packed.kind in GROUPED else scale[:, None]
        zero = None if zero is None else _of_groups(zero)
        return QuantizedMatrix(codes, scale, zero, inputs, bits, group)


def _of_groups(beside_PG16: torch.Tensor) -> torch.Tensor:
    """[P, G, 16] -> [O, G]"""
    return beside_PG16.transpose(1, 2).flatten(0, 1)


def _kind(like: QuantizedMatrix) -> Codes | None:
    return kind_of(like.bits, like.group, like.scale.dtype, has_zero=like.zero is not None)


def _taken(like: QuantizedMatrix) -> Codes:
    kind = _kind(like)
    if kind is None:
        raise InternalError(f"there are no panels of {like.bits} bits in groups of {like.group}")
    return kind


def _packed(parameters: Parameters) -> PackedMatrix:
    packed = packed_of(parameters)
    if packed is None:
        raise InternalError("these parameters are not in panels")
    return packed
