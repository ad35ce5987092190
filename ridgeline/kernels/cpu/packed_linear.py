"""How does a linear layer call the native kernels? Packing a matrix, multiplying, reading it back.

Letters: M rows, K inputs, N rows of W, O outputs: N, or N / 2 if gated, P panels of 16 rows of W,
G groups of a row.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from ridgeline.errors import InternalError, check
from ridgeline.kernels.cpu import native
from ridgeline.kernels.cpu.native import numbers, pointers, small_numbers
from ridgeline.kernels.cpu.recorder import launch
from ridgeline.kernels.quantized_matrix import QuantizedMatrix

PANEL = 16
LINE = 64


class Codes(IntEnum):
    """What a packed matrix holds."""

    BF16 = 0
    INT8 = 1  # one scale for a row
    INT4 = 2  # groups with a bfloat16 scale each
    GROUPS4 = 3  # groups of 4 bits with scales of any dtype, and zero points if there are some
    GROUPS8 = 4  # groups of 8 bits with scales of any dtype


GROUPED = (Codes.INT4, Codes.GROUPS4, Codes.GROUPS8)
INPUTS_A_LINE = {
    Codes.BF16: 2,
    Codes.INT8: 4,
    Codes.INT4: 8,
    Codes.GROUPS4: 8,
    Codes.GROUPS8: 4,
}
MAX_GROUP = 512
SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as linear.h numbers them


class MatrixArguments(ctypes.Structure):
    _fields_ = (
        *pointers("codes", "scales", "zeros"),
        *numbers("outputs", "inputs"),
        *small_numbers("format", "group", "scale_dtype", "has_lowest"),
    )


class _Linear(ctypes.Structure):
    _fields_ = (
        ("matrix", MatrixArguments),
        *pointers("x", "y", "bias", "residual"),
        *numbers("rows", "x_stride", "y_stride", "residual_stride"),
        *small_numbers("x_dtype", "y_dtype", "bias_dtype", "residual_dtype", "gated", "unused"),
        *pointers("x_rows", "y_rows", "row_weights"),
    )


class _Pack(ctypes.Structure):
    _fields_ = (
        *pointers("weight", "codes", "scales", "zeros"),
        *numbers("outputs", "inputs", "stride"),
        *small_numbers("weight_dtype", "format", "group", "unused"),
    )


class _PackCodes(ctypes.Structure):
    _fields_ = (
        *pointers("given", "codes"),
        *numbers("outputs", "inputs", "stride"),
        *small_numbers("format", "unused"),
    )


class _Gather(ctypes.Structure):
    _fields_ = (
        ("matrix", MatrixArguments),
        *pointers("rows", "out"),
        *numbers("count", "out_stride"),
        *small_numbers("out_dtype", "unused"),
    )


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """W [N, K] in panels (see linear.h): `codes` uint8 [P, lines, 64]; `scales` [N] (INT8) or
    [P, G, 16] (GROUPED; bfloat16 of INT4, else of 16 or 32 bits) or None; `zeros` uint8
    [P, G, 16] or None. `has_lowest`: codes of INT8 may be 0, that is -128."""

    codes: torch.Tensor
    scales: torch.Tensor | None
    outputs: int
    inputs: int
    kind: Codes
    group: int = 0
    zeros: torch.Tensor | None = None
    has_lowest: bool = False

    def __post_init__(self) -> None:
        _check_packed(self)


def takes_rows(x_MK: torch.Tensor) -> bool:
    """Rows that the kernels read: on the CPU, of a dtype they know, each without gaps."""
    return (
        x_MK.device.type == "cpu"
        and x_MK.dtype in native.DTYPES
        and x_MK.dim() == 2
        and x_MK.stride(1) == 1
    )


def pack(
    weight_NK: torch.Tensor, kind: Codes, *, group: int = 0, has_zero: bool = False
) -> PackedMatrix:
    """float32 or bfloat16, rounded as `kind` says: INT8 to the largest of a row, INT4 to that of a
    group, GROUPS4 to the span of a group, with a zero point. ValueError if a weight is not finite
    (not BF16). In bfloat16 to BF16 the memory of `weight_NK` is used again where the shape
    allows."""
    check(kind != Codes.GROUPS8, "nothing is rounded to groups of 8 bits")
    check(has_zero == (kind == Codes.GROUPS4), "a zero point is of GROUPS4", kind=kind)
    check(takes_rows(weight_NK), "a matrix to pack", dtype=weight_NK.dtype)
    outputs, inputs = weight_NK.shape
    panels, step = -(-outputs // PANEL), INPUTS_A_LINE[kind]
    shape = (panels, -(-inputs // step), LINE)
    scales = zeros = None
    if kind == Codes.BF16 and _in_place(weight_NK):
        codes = weight_NK.view(torch.uint8).view(shape)
    else:
        codes = native.advise_huge(torch.empty(shape, dtype=torch.uint8))
    if kind == Codes.INT8:
        scales = torch.empty(outputs, dtype=torch.float32)
    if kind in GROUPED:
        beside = (panels, -(-inputs // group), PANEL)
        scales = torch.empty(beside, dtype=torch.bfloat16)
        zeros = torch.empty(beside, dtype=torch.uint8) if has_zero else None
    packed = PackedMatrix(codes, scales, outputs, inputs, kind, group, zeros)
    call = _Pack(
        weight_NK.data_ptr(), codes.data_ptr(), _address(scales), _address(zeros), outputs, inputs,
        weight_NK.stride(0), native.DTYPES[weight_NK.dtype], kind, group, 0,
    )  # fmt: skip
    result = _library().rl_pack(ctypes.byref(call))
    if result == 1:
        raise ValueError("a weight is infinite or NaN")
    check(result == 0, "packing a matrix", result=result)
    return packed


def pack_codes(matrix: QuantizedMatrix, kind: Codes) -> PackedMatrix:
    """Codes, scales and zero points as they are, in the order of the panels; `kind` must be one
    that has them."""
    codes = matrix.codes.contiguous()
    panels, step = -(-matrix.outputs // PANEL), INPUTS_A_LINE[kind]
    shape = (panels, -(-matrix.inputs // step), LINE)
    ordered = native.advise_huge(torch.empty(shape, dtype=torch.uint8))
    if kind == Codes.INT8:
        scales, zeros = matrix.scale[:, 0].contiguous(), None
    else:
        scales = _in_panels(matrix.scale)
        zeros = None if matrix.zero is None else _in_panels(matrix.zero)
    packed = PackedMatrix(
        ordered, scales, matrix.outputs, matrix.inputs, kind, matrix.group, zeros,
        kind == Codes.INT8 and codes.numel() > 0 and int(codes.min()) == 0,
    )  # fmt: skip
    call = _PackCodes(
        codes.data_ptr(),
        ordered.data_ptr(),
        matrix.outputs,
        matrix.inputs,
        codes.shape[1],
        kind,
        0,
    )
    result = _library().rl_pack_codes(ctypes.byref(call))
    check(result == 0, "packing codes", result=result)
    return packed


def _in_panels(beside_NG: torch.Tensor) -> torch.Tensor:
    """[N, G] -> [P, G, 16], with zeros where there are no rows."""
    outputs, groups = beside_NG.shape
    panels = -(-outputs // PANEL)
    ordered = beside_NG.new_zeros(panels * PANEL, groups)
    ordered[:outputs] = beside_NG
    return ordered.view(panels, PANEL, groups).transpose(1, 2).contiguous()


def linear(
    x_MK: torch.Tensor,
    matrix: PackedMatrix,
    *,
    bias_N: torch.Tensor | None = None,
    gated: bool = False,
    residual_MO: torch.Tensor | None = None,
    out_MO: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x @ W.T + bias; if gated silu(y's first half) * its second; + residual. Added in float32,
    rounded once, to the dtype of `out_MO` (which may be `residual_MO`) or of x."""
    if out_MO is None:
        outputs = matrix.outputs // 2 if gated else matrix.outputs
        out_MO = torch.empty(x_MK.shape[0], outputs, dtype=x_MK.dtype)
    if x_MK.shape[0]:
        record = _arguments(x_MK, matrix, out_MO, bias_N, residual_MO, gated)
        launch(_library().rl_linear, record, x_MK, matrix, out_MO, bias_N, residual_MO)
    return out_MO


def _arguments(
    x_MK: torch.Tensor,
    matrix: PackedMatrix,
    out_MO: torch.Tensor,
    bias_N: torch.Tensor | None,
    residual_MO: torch.Tensor | None,
    gated: bool,
) -> _Linear:
    outputs = matrix.outputs // 2 if gated else matrix.outputs
    rows = x_MK.shape[0]
    check(takes_rows(x_MK) and x_MK.shape[1] == matrix.inputs, "rows of x", shape=x_MK.shape)
    check(takes_rows(out_MO) and out_MO.shape == (rows, outputs), "rows of y", shape=out_MO.shape)
    check(not gated or matrix.outputs % (2 * PANEL) == 0, "gate and up are whole panels")
    if residual_MO is not None:
        check(takes_rows(residual_MO) and residual_MO.shape == out_MO.shape, "a residual")
    if bias_N is not None:
        check(bias_N.is_contiguous() and bias_N.shape == (matrix.outputs,), "a bias")
    return _Linear(
        matrix_arguments(matrix), x_MK.data_ptr(), out_MO.data_ptr(), _address(bias_N),
        _address(residual_MO), rows, x_MK.stride(0), out_MO.stride(0),
        0 if residual_MO is None else residual_MO.stride(0), native.DTYPES[x_MK.dtype],
        native.DTYPES[out_MO.dtype], 0 if bias_N is None else native.DTYPES[bias_N.dtype],
        0 if residual_MO is None else native.DTYPES[residual_MO.dtype], int(gated), 0,
    )  # fmt: skip


class _GatherShare(ctypes.Structure):
    _fields_ = (("all", _Gather), *numbers("first"))


def gather(
    matrix: PackedMatrix,
    rows_R: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    first: int | None = None,
) -> torch.Tensor:
    """Rows of the matrix that `linear` multiplies by, [R, K] (None: all). InternalError
    for a row that it has not got. `first`: it is a share, which begins with that row of the whole;
    rows that others have are zeros."""
    count = matrix.outputs if rows_R is None else rows_R.numel()
    out = torch.empty(count, matrix.inputs, dtype=dtype)
    if rows_R is not None:
        rows_R = rows_R.to(torch.int64).contiguous()
    call = _Gather(
        matrix_arguments(matrix),
        _address(rows_R),
        out.data_ptr(),
        count,
        matrix.inputs,
        native.DTYPES[dtype],
        0,
    )
    if first is None:
        launch(_library().rl_gather, call, matrix, rows_R, out)
    else:
        launch(_library().rl_gather_share, _GatherShare(call, first), matrix, rows_R, out)
    return out


def first_rows(matrix: PackedMatrix, outputs: int) -> PackedMatrix:
    """The same without its last rows."""
    if outputs == matrix.outputs:
        return matrix
    panels = -(-outputs // PANEL)
    scales, zeros = matrix.scales, matrix.zeros
    if scales is not None:
        scales = scales[: outputs if matrix.kind == Codes.INT8 else panels]
    return replace(
        matrix,
        codes=matrix.codes[:panels],
        outputs=outputs,
        scales=scales,
        zeros=None if zeros is None else zeros[:panels],
    )


def _in_place(weight_NK: torch.Tensor) -> bool:
    outputs, inputs = weight_NK.shape
    return (
        weight_NK.dtype == torch.bfloat16
        and weight_NK.is_contiguous()
        and weight_NK.data_ptr() % LINE == 0
        and outputs % PANEL == 0
        and inputs % INPUTS_A_LINE[Codes.BF16] == 0
    )


def _check_packed(packed: PackedMatrix) -> None:
    panels, step = -(-packed.outputs // PANEL), INPUTS_A_LINE[packed.kind]
    shape = (panels, -(-packed.inputs // step), LINE)
    codes = packed.codes
    check(codes.shape == shape and codes.dtype == torch.uint8, "packed codes", shape=codes.shape)
    check(codes.is_contiguous() and codes.data_ptr() % LINE == 0, "codes begin at a line")
    dtypes = (torch.bfloat16,) if packed.kind == Codes.INT4 else tuple(SCALES)
    if packed.kind in GROUPED:
        is_right = 0 < packed.group <= MAX_GROUP and packed.group % 8 == 0
        check(is_right, "a group", group=packed.group)
        beside = (panels, -(-packed.inputs // packed.group), PANEL)
        _check_beside(packed.scales, beside, dtypes)
        if packed.zeros is not None:
            check(packed.kind == Codes.GROUPS4, "zero points are of 4 bits", kind=packed.kind)
            _check_beside(packed.zeros, beside, (torch.uint8,))
    if packed.kind == Codes.INT8:
        _check_beside(packed.scales, (packed.outputs,), dtypes)


def _check_beside(
    tensor: torch.Tensor | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    if tensor is None or tensor.shape != shape or tensor.dtype not in dtypes:
        raise InternalError(f"a packed matrix needs {dtypes} numbers of shape {shape} beside it")
    check(tensor.is_contiguous(), "numbers beside a packed matrix stand without gaps")


def matrix_arguments(packed: PackedMatrix) -> MatrixArguments:
    return MatrixArguments(
        packed.codes.data_ptr(), _address(packed.scales), _address(packed.zeros), packed.outputs,
        packed.inputs, packed.kind, packed.group,
        0 if packed.scales is None else SCALES[packed.scales.dtype], int(packed.has_lowest),
    )  # fmt: skip


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _library() -> ctypes.CDLL:
    found = native.library()
    if found is None:
        raise InternalError("native CPU kernels are not here; ask native.library() first")
    return found
