"""How do matrices of 8 bits with one scale a row lie on a GPU? As int8, for the kernels of
`int8_linear`.

Letters: T tokens, I inputs, O outputs, C some columns.
"""

from __future__ import annotations

import torch

from ridgeline.kernels.int8_linear import (
    SIXTEEN_BITS,
    Int8Matrix,
    fits_int8,
    has_int8,
    int8_linear,
    invariant_int8_linear,
    widened_linear,
)
from ridgeline.kernels.quantized_matrix import Parameters, QuantizedMatrix, WeightLayout
from ridgeline.kernels.small_linear import Fusion, Unfused
from ridgeline.kernels.tile_linear import ALIGNMENT, OUTPUTS

MIDDLE = 128  # the code of 0 in the canonical form: one bit turned, and it is int8
MOST_NUMBERS = 1 << 31  # of a matrix that the kernel in Triton finds its way in


class GpuInt8(WeightLayout):
    """Rows of x become int8 at each product: a few rows in pieces of 128, more with one scale."""

    looks_up = True
    reads_columns = True

    def takes(self, like: QuantizedMatrix, dtype: torch.dtype) -> bool:
        is_whole = like.bits == 8 and like.group == 0 and like.zero is None
        return (
            is_whole
            and dtype in SIXTEEN_BITS
            and fits_int8(like.outputs, like.inputs)
            and has_int8(like.codes.device)
        )

    def keep(self, matrix: QuantizedMatrix) -> Parameters:
        codes_OI = matrix.codes.bitwise_xor(MIDDLE).view(torch.int8)
        return {"int8": codes_OI, "scale": matrix.scale.flatten().contiguous()}

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return int8_linear(x_TI, int8_of(parameters), bias_N=bias_O)

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        """All but a gate of x: of a few rows the norm is in the kernel of the product, of more in
        the one that rounds them, as a sum before it is."""
        if fusion.of_gated or x_TI.shape[0] == 0:
            return None
        residual_TO = fusion.residual_TO
        if residual_TO is not None and not _is_aligned(residual_TO):
            return None
        return int8_linear(
            x_TI, int8_of(parameters), norm=fusion.norm, sum_MK=fusion.sum_TI, bias_N=bias_O,
            gated=fusion.is_gated, residual_MO=residual_TO, out_MO=residual_TO,
        )  # fmt: skip

    def linear_into(
        self, x_TI: torch.Tensor, parameters: Parameters, out_TO: torch.Tensor
    ) -> torch.Tensor:
        outputs, matrix = out_TO.shape[1], int8_of(parameters)
        if outputs % OUTPUTS == 0 and _is_aligned(out_TO):
            return self._product(x_TI, matrix.first(outputs), out_TO)
        # To all of the rows that are held, which come out even.
        whole_TO = x_TI.new_empty((len(x_TI), len(matrix.codes_NK)), dtype=out_TO.dtype)
        return out_TO.copy_(self._product(x_TI, matrix, whole_TO)[:, :outputs])

    def rows(
        self, parameters: Parameters, rows_T: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        matrix = int8_of(parameters)
        return int8_rows(matrix.codes_NK, matrix.scale_N, rows_T, dtype)

    def columns(self, parameters: Parameters, columns_C: torch.Tensor) -> torch.Tensor:
        matrix = int8_of(parameters)
        codes_OC = matrix.codes_NK.index_select(1, columns_C).float()
        return codes_OC.mul_(matrix.scale_N.float()[:, None])

    def matrix(self, parameters: Parameters) -> QuantizedMatrix:
        matrix = int8_of(parameters)
        codes = matrix.codes_NK.view(torch.uint8).bitwise_xor(MIDDLE)
        return QuantizedMatrix(codes, matrix.scale_N[:, None], None, codes.shape[1], 8, 0)

    def _product(
        self, x_TI: torch.Tensor, matrix: Int8Matrix, out_TO: torch.Tensor
    ) -> torch.Tensor:
        return int8_linear(x_TI, matrix, out_MO=out_TO)


class WideInt8(Unfused, GpuInt8):
    """On other GPUs of NVIDIA: rows of x stay as they are, and the weights become numbers of their
    dtype, of a few rows in the kernel of the product."""

    def takes(self, like: QuantizedMatrix, dtype: torch.dtype) -> bool:
        is_whole = like.bits == 8 and like.group == 0 and like.zero is None
        device, numbers = like.codes.device, like.outputs * like.inputs
        return (
            is_whole
            and dtype in SIXTEEN_BITS
            and 0 < numbers < MOST_NUMBERS
            and device.type == "cuda"
            and torch.version.cuda is not None
        )

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return widened_linear(x_TI, int8_of(parameters), bias_N=bias_O)

    def _product(
        self, x_TI: torch.Tensor, matrix: Int8Matrix, out_TO: torch.Tensor
    ) -> torch.Tensor:
        return widened_linear(x_TI, matrix, out_MO=out_TO)


class InvariantGpuInt8(Unfused, GpuInt8):
    """Each row of x has one scale, be it the only row: its product has the same bits in any
    company."""

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return invariant_int8_linear(x_TI, int8_of(parameters), bias_N=bias_O)

    def _product(
        self, x_TI: torch.Tensor, matrix: Int8Matrix, out_TO: torch.Tensor
    ) -> torch.Tensor:
        return invariant_int8_linear(x_TI, matrix, out_MO=out_TO)


def int8_of(parameters: Parameters) -> Int8Matrix:
    """What the kernels take."""
    return Int8Matrix(parameters["int8"], parameters["scale"])


def _is_aligned(y_TO: torch.Tensor) -> bool:
    """Rows begin where the kernels can store them."""
    row = y_TO.stride(0) * y_TO.element_size()
    return y_TO.stride(1) == 1 and (row | y_TO.data_ptr()) % ALIGNMENT == 0


def int8_rows(
    codes_NK: torch.Tensor, scale_N: torch.Tensor, rows_T: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Rows of a matrix of int8, looked up by number, [T, K]: code * scale in float32, rounded once.
    Numbers of rows are integers below N, the rows of W."""
    if codes_NK.device.type == "cuda":
        from ridgeline.kernels.int8_rows_triton import int8_rows_triton

        return int8_rows_triton(codes_NK, scale_N, rows_T, dtype)
    return int8_rows_reference(codes_NK, scale_N, rows_T, dtype)


def int8_rows_reference(
    codes_NK: torch.Tensor, scale_N: torch.Tensor, rows_T: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    codes_TK = codes_NK.index_select(0, rows_T).float()
    return codes_TK.mul_(scale_N.index_select(0, rows_T).float()[:, None]).to(dtype)
