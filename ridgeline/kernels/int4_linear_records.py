"""How do weights of 4 bits stand in memory, for the CUDA kernels that read them (`cuda/int4_*`)?

In records of 16 rows and 128 columns: codes in the order in which tensor cores take them, then the
scales, then the zero points, of the same rows and columns. Nothing is added, and nothing is lost.
`cuda/int4_record.cu` says which half byte is which weight.
Letters: O outputs, I inputs, G groups of a row; R sixteens of rows, C 128s of columns, B bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.errors import check
from ridgeline.kernels.quantized_matrix import QuantizedMatrix, join_bytes, split_bytes

ROWS, COLUMNS = 16, 128  # of a record
CODE_BYTES = ROWS * COLUMNS // 2
GROUPS = (32, 64, 128)
LARGEST_ZERO = 127  # a code and a zero point are beside 128 in the last bits of a bfloat16
PIECE_NUMBERS = 1 << 24  # of a matrix that have a byte each at once


@dataclass(frozen=True, slots=True)
class Form:
    """A matrix without its numbers."""

    outputs: int
    inputs: int
    group: int
    scale_dtype: torch.dtype
    has_zero: bool

    @property
    def sixteens(self) -> int:
        """R"""
        return self.outputs // ROWS

    @property
    def along_k(self) -> int:
        """C"""
        return self.inputs // COLUMNS

    @property
    def scale_bytes(self) -> int:
        """Of a record."""
        return COLUMNS // self.group * ROWS * self.scale_dtype.itemsize

    @property
    def record_bytes(self) -> int:
        """B"""
        zeros = COLUMNS // self.group * ROWS * int(self.has_zero)
        return CODE_BYTES + self.scale_bytes + zeros


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """`bytes_RCB` is uint8."""

    bytes_RCB: torch.Tensor
    form: Form


def fits_records(like: QuantizedMatrix) -> bool:
    """Whole records, of whole groups."""
    is_whole = like.outputs % ROWS == 0 and like.inputs % COLUMNS == 0 and like.inputs > 0
    return like.bits == 4 and like.group in GROUPS and is_whole and like.outputs > 0


def form_of(like: QuantizedMatrix) -> Form:
    has_zero = like.zero is not None
    return Form(like.outputs, like.inputs, like.group, like.scale.dtype, has_zero)


def pack_records(matrix: QuantizedMatrix) -> Records:
    """Of a matrix for which `fits_records` holds."""
    check(fits_records(matrix), "a matrix of whole records", codes=matrix.codes.shape)
    if matrix.zero is not None:
        largest = int(matrix.zero.max())
        check(largest <= LARGEST_ZERO, "zero points have 7 bits", largest=largest)
    form = form_of(matrix)
    shape = (form.sixteens, form.along_k, form.record_bytes)
    bytes_RCB = torch.empty(shape, dtype=torch.uint8, device=matrix.codes.device)
    for begin, end in _pieces(form):
        _pack(matrix.part(begin * ROWS, end * ROWS), bytes_RCB[begin:end])
    return Records(bytes_RCB, form)


def unpack_records(records: Records) -> QuantizedMatrix:
    """What was packed."""
    form, device = records.form, records.bytes_RCB.device
    beside = (form.outputs, form.inputs // form.group)
    codes = torch.empty(form.outputs, form.inputs // 2, dtype=torch.uint8, device=device)
    scale = torch.empty(beside, dtype=form.scale_dtype, device=device)
    zero = torch.empty(beside, dtype=torch.uint8, device=device) if form.has_zero else None
    zeros_at = CODE_BYTES + form.scale_bytes
    for begin, end in _pieces(form):
        part_RCB, rows = records.bytes_RCB[begin:end], slice(begin * ROWS, end * ROWS)
        codes[rows] = _codes_of(part_RCB[..., :CODE_BYTES])
        scales = part_RCB[..., CODE_BYTES:zeros_at].clone(memory_format=torch.contiguous_format)
        scale[rows] = _by_rows(scales.view(form.scale_dtype))
        if zero is not None:
            zero[rows] = _by_rows(part_RCB[..., zeros_at:])
    return QuantizedMatrix(codes, scale, zero, form.inputs, 4, form.group)


def _pieces(form: Form) -> list[tuple[int, int]]:
    """From and to which 16 rows."""
    step = max(1, PIECE_NUMBERS // (ROWS * form.inputs))
    return [(begin, min(form.sixteens, begin + step)) for begin in range(0, form.sixteens, step)]


def _pack(matrix: QuantizedMatrix, to_RCB: torch.Tensor) -> None:
    codes_OI = split_bytes(matrix.codes, 4, matrix.inputs)
    # Row 8 h + g of a record; column 32 q + 16 u + 8 p + 2 t + j.
    split = codes_OI.reshape(-1, 2, 8, matrix.inputs // COLUMNS, 4, 2, 2, 4, 2)
    ordered = split.permute(0, 3, 1, 2, 7, 4, 8, 5, 6)  # R C h g t q j u p
    both = ordered[..., 0] | ordered[..., 1] << 4
    to_RCB[..., :CODE_BYTES] = both.flatten(2)
    scales = _by_groups(matrix.scale, matrix).view(torch.uint8)
    zeros_at = CODE_BYTES + scales.shape[2]
    to_RCB[..., CODE_BYTES:zeros_at] = scales
    if matrix.zero is not None:
        to_RCB[..., zeros_at:] = _by_groups(matrix.zero, matrix)


def _codes_of(bytes_RCB: torch.Tensor) -> torch.Tensor:
    """[R, C, 1024] -> [O, I / 2]"""
    split = bytes_RCB.reshape(*bytes_RCB.shape[:2], 2, 8, 4, 4, 2, 2)
    ordered = torch.stack((split & 15, split >> 4), -1)  # R C h g t q j u p
    codes_OI = ordered.permute(0, 2, 3, 1, 5, 7, 8, 4, 6).reshape(split.shape[0] * ROWS, -1)
    return join_bytes(codes_OI, 4)


def _by_groups(of_groups_OG: torch.Tensor, matrix: QuantizedMatrix) -> torch.Tensor:
    """[O, G] -> [R, C, groups of a record * 16]"""
    split = of_groups_OG.reshape(-1, ROWS, matrix.inputs // COLUMNS, COLUMNS // matrix.group)
    return split.permute(0, 2, 3, 1).contiguous().flatten(2)


def _by_rows(of_records_RCn: torch.Tensor) -> torch.Tensor:
    """The opposite."""
    sixteens, columns, _ = of_records_RCn.shape
    split = of_records_RCn.reshape(sixteens, columns, -1, ROWS)
    return split.permute(0, 3, 1, 2).reshape(sixteens * ROWS, -1)
