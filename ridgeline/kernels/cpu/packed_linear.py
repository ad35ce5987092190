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
from ridgeline.kernels.cpu.recorder import launch

PANEL = 16
LINE = 64


class Codes(IntEnum):
    """What a packed matrix holds."""

    BF16 = 0
    INT8 = 1
    INT4 = 2


INPUTS_A_LINE = {Codes.BF16: 2, Codes.INT8: 4, Codes.INT4: 8}


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("group", ctypes.c_int32),
    )


class _Linear(ctypes.Structure):
    _fields_ = (
        ("matrix", _Matrix),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("residual_stride", ctypes.c_int64),
        ("x_dtype", ctypes.c_int32),
        ("y_dtype", ctypes.c_int32),
        ("bias_dtype", ctypes.c_int32),
        ("residual_dtype", ctypes.c_int32),
        ("gated", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class _Pack(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("weight_dtype", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class _Gather(ctypes.Structure):
    _fields_ = (
        ("matrix", _Matrix),
        ("rows", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("out_dtype", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """W [N, K] in panels (see linear.h): `codes` uint8 [P, lines, 64]; `scales` float32 [N] (int8),
    bfloat16 [P, G, 16] (int4) or None."""

    codes: torch.Tensor
    scales: torch.Tensor | None
    outputs: int
    inputs: int
    kind: Codes
    group: int = 0

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


def pack(weight_NK: torch.Tensor, kind: Codes, *, group: int = 0) -> PackedMatrix:
    """float32 or bfloat16, rounded as `kind` says. ValueError if a weight is not finite (int8 and
    int4). In bfloat16 to BF16 the memory of `weight_NK` is used again where the shape allows."""
    check(takes_rows(weight_NK), "a matrix to pack", dtype=weight_NK.dtype)
    outputs, inputs = weight_NK.shape
    panels, step = -(-outputs // PANEL), INPUTS_A_LINE[kind]
    shape = (panels, -(-inputs // step), LINE)
    scales = None
    if kind == Codes.BF16 and _in_place(weight_NK):
        codes = weight_NK.view(torch.uint8).view(shape)
    else:
        codes = native.advise_huge(torch.empty(shape, dtype=torch.uint8))
    if kind == Codes.INT8:
        scales = torch.empty(outputs, dtype=torch.float32)
    if kind == Codes.INT4:
        scales = torch.empty(panels, -(-inputs // group), PANEL, dtype=torch.bfloat16)
    packed = PackedMatrix(codes, scales, outputs, inputs, kind, group)
    call = _Pack(
        weight_NK.data_ptr(),
        codes.data_ptr(),
        _address(scales),
        outputs,
        inputs,
        weight_NK.stride(0),
        native.DTYPES[weight_NK.dtype],
        kind,
        group,
        0,
    )
    result = _library().rl_pack(ctypes.byref(call))
    if result == 1:
        raise ValueError("a weight is infinite or NaN")
    check(result == 0, "packing a matrix", result=result)
    return packed


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
        _matrix(matrix),
        x_MK.data_ptr(),
        out_MO.data_ptr(),
        _address(bias_N),
        _address(residual_MO),
        rows,
        x_MK.stride(0),
        out_MO.stride(0),
        0 if residual_MO is None else residual_MO.stride(0),
        native.DTYPES[x_MK.dtype],
        native.DTYPES[out_MO.dtype],
        0 if bias_N is None else native.DTYPES[bias_N.dtype],
        0 if residual_MO is None else native.DTYPES[residual_MO.dtype],
        int(gated),
        0,
    )


def gather(matrix: PackedMatrix, rows_R: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Rows of the matrix that `linear` multiplies by, [R, K] (None: all). InternalError
    for a row that it has not got."""
    count = matrix.outputs if rows_R is None else rows_R.numel()
    out = torch.empty(count, matrix.inputs, dtype=dtype)
    if rows_R is not None:
        rows_R = rows_R.to(torch.int64).contiguous()
    call = _Gather(
        _matrix(matrix),
        _address(rows_R),
        out.data_ptr(),
        count,
        matrix.inputs,
        native.DTYPES[dtype],
        0,
    )
    launch(_library().rl_gather, call, matrix, rows_R, out)
    return out


def first_rows(matrix: PackedMatrix, outputs: int) -> PackedMatrix:
    """The same without its last rows, of which less than a panel may be left out."""
    if outputs == matrix.outputs:
        return matrix
    scales = matrix.scales
    if matrix.kind == Codes.INT8 and scales is not None:
        scales = scales[:outputs]
    return replace(matrix, outputs=outputs, scales=scales)


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
    if packed.kind == Codes.INT4:
        check(0 < packed.group <= 512 and packed.group % 8 == 0, "a group", group=packed.group)
        groups = -(-packed.inputs // packed.group)
        _check_beside(packed.scales, (panels, groups, PANEL), torch.bfloat16)
    if packed.kind == Codes.INT8:
        _check_beside(packed.scales, (packed.outputs,), torch.float32)


def _check_beside(tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
        raise InternalError(f"a packed matrix needs {dtype} numbers of shape {shape} beside it")
    check(tensor.is_contiguous(), "numbers beside a packed matrix stand without gaps")


def _matrix(packed: PackedMatrix) -> _Matrix:
    return _Matrix(
        packed.codes.data_ptr(),
        _address(packed.scales),
        packed.outputs,
        packed.inputs,
        packed.kind,
        packed.group,
    )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _library() -> ctypes.CDLL:
    found = native.library()
    if found is None:
        raise InternalError("native CPU kernels are not here; ask native.library() first")
    return found
