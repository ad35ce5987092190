"""What can come out of the tensors of a stored matrix? All of it says what its weights are.

Letters: O outputs, I inputs, R and C rows and columns of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.errors import ConfigError
from ridgeline.quantization.matrix import QuantizedMatrix, join_bytes, split_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Ordered:
    """Column i of `matrix` is column `order_I[i]` (int32) of what is meant."""

    matrix: QuantizedMatrix
    order_I: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        found_OI = torch.empty(self.matrix.outputs, self.matrix.inputs, device=self.order_I.device)
        return found_OI.index_copy_(1, self.order_I.long(), self.matrix.dequantize())


@dataclass(frozen=True, slots=True, eq=False)
class Rows8:
    """Numbers in e4m3, `codes_OI`, times a float32 scale for each row."""

    codes_OI: torch.Tensor
    scale_O: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        return self.codes_OI.float().mul_(self.scale_O[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class Blocks8:
    """Numbers in e4m3 times a scale for each block of `rows` x `columns`, the last of which may be
    smaller."""

    codes_OI: torch.Tensor
    scale_RC: torch.Tensor
    rows: int
    columns: int

    def dequantize(self) -> torch.Tensor:
        outputs, inputs = self.codes_OI.shape
        scale_OC = self.scale_RC.float().repeat_interleave(self.rows, 0)[:outputs]
        scale_OI = scale_OC.repeat_interleave(self.columns, 1)[:, :inputs]
        return self.codes_OI.float().mul_(scale_OI)


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """What no format of ours keeps, [O, I] float32."""

    values_OI: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        return self.values_OI


Read = QuantizedMatrix | Ordered | Rows8 | Blocks8 | Numbers


def widened(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned codes (or zeros) of `bits` as those of the same weights with 4 or 8 bits: the middle
    of the range stays its middle."""
    kept = 4 if bits <= 4 else 8
    shift = (1 << (kept - 1)) - (1 << (bits - 1))
    return codes + shift if shift else codes


def ordered(matrix: QuantizedMatrix, groups_I: torch.Tensor) -> Ordered:
    """`matrix` has its codes in the order of the model and scales by number of group, `groups_I`
    says whose each column is. ConfigError if groups are not of the size that they should be."""
    order_I = torch.argsort(groups_I, stable=True)
    wanted_I = torch.arange(matrix.inputs, device=groups_I.device) // matrix.group
    if not torch.equal(groups_I.index_select(0, order_I).long(), wanted_I):
        raise ConfigError(
            f"g_idx does not give {matrix.group} columns to each group of {matrix.inputs} columns;"
            " the file is damaged, or group_size in config.json is another model's"
        )
    codes_OI = split_bytes(matrix.codes, matrix.bits, matrix.inputs).index_select(1, order_I)
    codes = join_bytes(codes_OI, matrix.bits)
    turned = QuantizedMatrix(
        codes, matrix.scale, matrix.zero, matrix.inputs, matrix.bits, matrix.group
    )
    return Ordered(turned, order_I.to(torch.int32))
