"""What must a weight format be able to do?

A linear layer asks for `parameters`, writes the checkpoint's rows into the one called "weight",
calls `finish` once, and then only `linear`. Letters: T tokens, I inputs, O outputs, G gate and up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ridgeline.architectures.parts import expected_tensors
from ridgeline.architectures.spec import ModelSpec
from ridgeline.kernels.cpu.packed_linear import PackedMatrix
from ridgeline.kernels.grouped_experts import StackedMatrix
from ridgeline.kernels.quantized_matrix import Parameters
from ridgeline.kernels.silu_mul import silu_mul
from ridgeline.kernels.small_linear import Fusion


@dataclass(frozen=True, slots=True)
class MatrixShare:
    """What a rank holds of the checkpoint's matrix `name`: some of its rows, or some of its columns
    (`has_all_columns` false)."""

    name: str
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int
    has_all_columns: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """Entries [start, start + length) of dimension `dim` of checkpoint tensor `name` are copied
    into `target`, a view of a parameter. `dim` None: the whole tensor."""

    name: str
    target: torch.Tensor
    dim: int | None = None
    start: int = 0


class WeightFormat(ABC):
    """A format must say `finish` and `dequantize`; what else it does better than the defaults it
    overrides. `bits` a weight takes, None for those of the serving dtype."""

    name: str
    bits: int | None = None
    serves_vocabulary = False  # `rows` and `linear_into` read no more than they need

    # -------------------------------------------------------------------- loading

    def of_model(self, spec: ModelSpec) -> WeightFormat:
        """The same for this model."""
        return self

    def tensors_read(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the checkpoint's tensors that a model in this format is made of."""
        return expected_tensors(spec)

    def of(self, shares: Sequence[MatrixShare], dtype: torch.dtype) -> WeightFormat:
        """That of the product whose rows are these, one below the other; x is of `dtype`."""
        return self

    def parameters(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> Parameters:
        """Uninitialised tensors to load into; "weight" is [O, I] in the serving dtype."""
        return {"weight": torch.empty(outputs, inputs, dtype=dtype, device=device)}

    def pieces(self, parameters: Parameters, index: int) -> list[Piece] | None:
        """Where the tensors of the product's matrix of this number go; None: the matrix itself is
        a tensor of the checkpoint, and goes into "weight"."""
        return None

    @abstractmethod
    def finish(self, parameters: Parameters) -> Parameters:
        """What is kept after loading: packed, rounded or as it was."""

    # -------------------------------------------------------------------- products

    @abstractmethod
    def dequantize(self, parameters: Parameters) -> torch.Tensor:
        """The weights that `linear` multiplies by, [O, I]."""

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        """x @ W.T + bias, [T, O] in the dtype of x; equals x @ dequantize(parameters).T + bias."""
        return functional.linear(x_TI, self.dequantize(parameters).to(x_TI.dtype), bias_O)

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        """The product and all that stands beside it in one kernel, None where there is none that
        is faster; the caller then does one after the other. The result is the residual, if any."""
        return None

    def gates_input(self, x_TI: torch.Tensor, parameters: Parameters) -> bool:
        """`linear_of_gated` is the faster one for as many rows as x has, of its dtype and on its
        device: the format touches the rows of x anyway, and can gate them (SiLU) as it does."""
        return False

    def linear_of_gated(
        self, x_TG: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        """`linear` of silu(gate) * up, where a row of x is gate and up."""
        return self.linear(silu_mul(x_TG), parameters, bias_O)

    def invariant(self) -> WeightFormat | None:
        """The same parameters and numbers; each row of `linear` has the same bits however many
        rows there are, and `fused` is None. None: there is no such product."""
        return None

    # -------------------------------------------------------------------- experts

    # Some columns of a matrix, kept alone, are the same numbers.
    cuts_columns = False

    def of_experts(self) -> WeightFormat:
        """The same numbers, kept so that `stacked` takes them where it takes any."""
        return self

    def stacked(self, parameters: Parameters, bias_XN: torch.Tensor | None) -> StackedMatrix | None:
        """The same matrix of all experts, of what is kept of each one behind the other, as grouped
        products take it. None: there are no such products, and the host asks which experts have
        tokens."""
        return None

    def packed(self, parameters: Parameters) -> PackedMatrix | None:
        """What `linear` multiplies by on a CPU, where that is a product of the native kernels and
        nothing else."""
        return None

    # -------------------------------------------------------------------- vocabularies

    def of_vocabulary(self) -> WeightFormat:
        """The same numbers, kept so that `rows` reads no more than it returns."""
        return self

    def rows(
        self, parameters: Parameters, rows_T: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """These rows of `dequantize(parameters)`, [T, I]: one copy is both an embedding and the
        output matrix that is tied to it."""
        return self.dequantize(parameters).index_select(0, rows_T).to(dtype)

    def linear_into(
        self, x_TI: torch.Tensor, parameters: Parameters, out_TO: torch.Tensor
    ) -> torch.Tensor:
        """`linear` without a bias, of as many of the first rows of W as `out_TO` has columns; that
        is what it returns, and nothing is waited for. A format that `serves_vocabulary` rounds sums
        once, to the dtype of `out_TO`: float32 ones, of logits, not at all."""
        return out_TO.copy_(self.linear(x_TI, parameters, None)[:, : out_TO.shape[1]])
