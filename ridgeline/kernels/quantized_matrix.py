"""What is a matrix of 4 or 8 bit integers, in the one form that all others are made from, and what
must a layout of it for kernels be able to do?

Letters: O outputs, I inputs, B bytes of a row, G groups of a row, R some rows, T tokens, C some
columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch

from ridgeline.errors import InternalError, check
from ridgeline.kernels.small_linear import Fusion

SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Parameters = dict[str, torch.Tensor]  # what a layer keeps of its matrix
SIZES = "shape"  # of the parameter that carries the sizes and no numbers


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """A weight is (code - zero) * scale, in float32.

    `codes` uint8 [O, ceil(I * bits / 8)]; of 4 bits the even column is in the low half of a byte.
    `scale` [O, G] in bfloat16, float16 or float32. `zero` uint8 [O, G], None: 8 of 4 bits, 128 of
    8. `group` neighbours of a row share a scale, the last ones of a row may be fewer; 0: all of a
    row do, and G is 1."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    inputs: int
    bits: int
    group: int

    def __post_init__(self) -> None:
        check(self.bits in (4, 8), "codes of 4 or 8 bits", bits=self.bits)
        check(self.group >= 0, "a group is no negative number of weights", group=self.group)
        shape = (self.codes.shape[0], -(-self.inputs * self.bits // 8))
        is_right = self.codes.dtype == torch.uint8 and self.codes.shape == shape
        check(is_right, "codes are bytes of this shape", wanted=shape, got=self.codes.shape)
        beside = (self.outputs, self.groups)
        is_right = self.scale.dtype in SCALE_DTYPES and self.scale.shape == beside
        check(is_right, "scales of groups", wanted=beside, got=self.scale.shape)
        if self.zero is not None:
            is_right = self.zero.dtype == torch.uint8 and self.zero.shape == beside
            check(is_right, "zero points are bytes", wanted=beside, got=self.zero.shape)

    @property
    def outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def groups(self) -> int:
        return num_groups(self.inputs, self.group)

    def behind(self, column: int) -> QuantizedMatrix:
        """Its columns from this one on, the first of a byte; if it cuts a group, all groups become
        so much smaller that it does not."""
        if not column:
            return self
        size = gcd(self.group, column) if self.group else 0

        def kept(beside_OG: torch.Tensor) -> torch.Tensor:
            if not size:
                return beside_OG
            smaller_OG = beside_OG.repeat_interleave(self.group // size, 1)[:, column // size :]
            return smaller_OG[:, : num_groups(self.inputs - column, size)].contiguous()

        return QuantizedMatrix(
            self.codes[:, column * self.bits // 8 :].contiguous(),
            kept(self.scale),
            None if self.zero is None else kept(self.zero),
            self.inputs - column,
            self.bits,
            size,
        )

    @property
    def middle(self) -> int:
        """The code of 0 where `zero` is None."""
        return 1 << (self.bits - 1)

    @property
    def nbytes(self) -> int:
        zeros = 0 if self.zero is None else self.zero.nbytes
        return self.codes.nbytes + self.scale.nbytes + zeros

    def dequantize(self) -> torch.Tensor:
        """[O, I] float32; exact where a scale has 16 bits."""
        codes_OI = split_bytes(self.codes, self.bits, self.inputs).float()
        codes_OI -= self.middle if self.zero is None else self._wide(self.zero.float())
        return codes_OI.mul_(self._wide(self.scale.float()))

    def rows(self, rows_R: torch.Tensor) -> QuantizedMatrix:
        """Those of these numbers, each as often as it is named."""
        zero = None if self.zero is None else self.zero.index_select(0, rows_R)
        codes, scale = self.codes.index_select(0, rows_R), self.scale.index_select(0, rows_R)
        return replace(self, codes=codes, scale=scale, zero=zero)

    def part(self, begin: int, end: int) -> QuantizedMatrix:
        """Its rows from `begin` to before `end`, in the same memory."""
        zero = None if self.zero is None else self.zero[begin:end]
        return replace(self, codes=self.codes[begin:end], scale=self.scale[begin:end], zero=zero)

    def _wide(self, of_groups_OG: torch.Tensor) -> torch.Tensor:
        if self.groups == 1:
            return of_groups_OG
        return of_groups_OG.repeat_interleave(self.group, 1)[:, : self.inputs]


def num_groups(inputs: int, group: int) -> int:
    """Of a row of `inputs` weights."""
    return -(-inputs // group) if group else 1


def outline(
    outputs: int,
    inputs: int,
    *,
    bits: int,
    group: int,
    scale_dtype: torch.dtype,
    has_zero: bool,
    device: torch.device,
) -> QuantizedMatrix:
    """One that takes no memory, to be asked about: all of its numbers are one number."""

    def same(width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros((), dtype=dtype, device=device).expand(outputs, width)

    groups = num_groups(inputs, group)
    codes, scale = same(-(-inputs * bits // 8), torch.uint8), same(groups, scale_dtype)
    zero = same(groups, torch.uint8) if has_zero else None
    return QuantizedMatrix(codes, scale, zero, inputs, bits, group)


def joined(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """One below the other; all alike but for the number of outputs."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    zeros = [one.zero for one in matrices if one.zero is not None]
    return replace(
        first,
        codes=torch.cat([one.codes for one in matrices]),
        scale=torch.cat([one.scale for one in matrices]),
        zero=torch.cat(zeros) if zeros else None,
    )


def split_bytes(codes: torch.Tensor, bits: int, inputs: int) -> torch.Tensor:
    """[O, B] -> one code in each byte, [O, I]."""
    if bits == 8:
        return codes
    return torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, :inputs]


def join_bytes(codes_OI: torch.Tensor, bits: int) -> torch.Tensor:
    """The opposite; of an odd number of 4 bit codes the last half byte is 0."""
    if bits == 8:
        return codes_OI
    if codes_OI.shape[1] % 2:
        codes_OI = torch.nn.functional.pad(codes_OI, (0, 1))
    return codes_OI[:, 0::2] | codes_OI[:, 1::2] << 4


def sizes_of(matrix: QuantizedMatrix) -> torch.Tensor:
    """A tensor without numbers whose shape is outputs, inputs, bits, group: what a layer keeps
    beside its tensors, under the name SIZES, so that a later start knows them."""
    sizes = (matrix.outputs, matrix.inputs, matrix.bits, matrix.group)
    return torch.empty(*sizes, 0, device=matrix.codes.device)


def read_sizes(parameters: Mapping[str, torch.Tensor]) -> tuple[int, int, int, int]:
    """Outputs, inputs, bits and group of what was kept."""
    outputs, inputs, bits, group, _ = parameters[SIZES].shape
    return outputs, inputs, bits, group


class WeightLayout(ABC):
    """How the numbers of a matrix lie for some kernels, exactly, and how these multiply by them.
    The table of layouts is in `quantization.weight_layouts`."""

    looks_up = False  # for vocabularies too: `rows` and `linear_into` read no more than they need
    reads_columns = False  # x is rounded, and `columns` tells those of W that x should not be for

    @abstractmethod
    def takes(self, like: QuantizedMatrix, dtype: torch.dtype) -> bool:
        """A matrix of this device, shape, bits, group, scales and zero points, multiplied by rows
        of `dtype`. The numbers are not looked at: it may be an `outline`."""

    @abstractmethod
    def keep(self, matrix: QuantizedMatrix) -> Parameters:
        """Laid out for the kernels: the same codes, scales and zero points, in as many bytes."""

    @abstractmethod
    def matrix(self, parameters: Parameters) -> QuantizedMatrix:
        """What was kept, back again, to the last bit."""

    @abstractmethod
    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        """x @ W.T + bias, [T, O] in the dtype of x."""

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        """As that of a WeightFormat; None where the caller is to do one after the other."""
        return None

    def rounded(self, weight_OI: torch.Tensor, like: QuantizedMatrix) -> Parameters | None:
        """As `keep` of the rounded matrix, to the last bit, where a kernel rounds a matrix and lays
        it out in one go. ValueError if a weight is infinite or NaN."""
        return None

    def rows(
        self, parameters: Parameters, rows_T: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """These rows of W, [T, I]."""
        return self.matrix(parameters).rows(rows_T).dequantize().to(dtype)

    def linear_into(
        self, x_TI: torch.Tensor, parameters: Parameters, out_TO: torch.Tensor
    ) -> torch.Tensor:
        """`linear` of as many of the first rows of W as `out_TO` has columns."""
        return out_TO.copy_(self.linear(x_TI, parameters, None)[:, : out_TO.shape[1]])

    def columns(self, parameters: Parameters, columns_C: torch.Tensor) -> torch.Tensor:
        """These columns of W, [O, C] float32; only where it `reads_columns`."""
        raise InternalError("reads_columns has not been asked")
