"""What must a weight format be able to do?

A linear layer asks for `parameters`, writes the checkpoint's rows into the one called "weight",
calls `finish` once, and then only `linear`. Letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ridgeline.architectures.spec import ModelSpec
from ridgeline.kernels.small_linear import Fusion

Parameters = dict[str, torch.Tensor]


class WeightFormat(Protocol):
    """`bits` a weight takes, None for those of the serving dtype."""

    name: str
    bits: int | None

    def parameters(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> Parameters:
        """Uninitialised tensors to load into; "weight" is [O, I] in the serving dtype."""
        ...

    def finish(self, parameters: Parameters) -> Parameters:
        """What is kept after loading: packed, rounded or as it was."""
        ...

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        """x @ W.T + bias, [T, O] in the dtype of x; equals x @ dequantize(parameters).T + bias."""
        ...

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        """The product and all that stands beside it in one kernel, None where there is none that
        is faster; the caller then does one after the other. The result is the residual, if any."""
        ...

    def dequantize(self, parameters: Parameters) -> torch.Tensor:
        """The weights that `linear` multiplies by, [O, I]."""
        ...


@runtime_checkable
class VocabularyFormat(WeightFormat, Protocol):
    """A format whose matrix is looked into row by row too, so that one copy is both an embedding
    and the output matrix that is tied to it."""

    def rows(
        self, parameters: Parameters, rows_T: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """These rows of `dequantize(parameters)`, [T, I]."""
        ...

    def linear_into(
        self, x_TI: torch.Tensor, parameters: Parameters, out_TO: torch.Tensor
    ) -> torch.Tensor:
        """`linear` without a bias, of as many of the first rows of W as `out_TO` has columns; that
        is what it returns, and nothing is waited for. Sums are rounded once, to the dtype of
        `out_TO`: float32 ones, of logits, not at all."""
        ...


@runtime_checkable
class HasInvariant(Protocol):
    """A format that can also multiply so that a row of y depends on no other row."""

    def invariant(self) -> WeightFormat:
        """The same parameters and numbers; each row of `linear` has the same bits however many
        rows there are, and `fused` is None."""
        ...


@runtime_checkable
class HasVocabulary(Protocol):
    """A format that keeps a matrix in another way where rows of it are looked up."""

    def of_vocabulary(self) -> VocabularyFormat:
        """The same numbers, kept so that `rows` reads no more than it returns."""
        ...


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
class TensorPiece:
    """Entries of the checkpoint's tensor `name` from `start` along `dim` on belong into `target`;
    `dim` None: all of them."""

    name: str
    target: torch.Tensor
    dim: int | None
    start: int


@runtime_checkable
class KnowsMatrices(Protocol):
    """A format that keeps each matrix as its checkpoint stores it."""

    def of(self, shares: Sequence[MatrixShare], dtype: torch.dtype) -> WeightFormat:
        """That of the product whose rows are these, one below the other; x is of `dtype`."""
        ...


@runtime_checkable
class LoadsTensors(Protocol):
    """A format whose parameters are other tensors of the checkpoint than its matrices."""

    def pieces(self, parameters: Parameters, index: int) -> list[TensorPiece]:
        """Where those of the product's matrix of this number go."""
        ...


@runtime_checkable
class OfModel(Protocol):
    """A format that must know which model it is for."""

    def of_model(self, spec: ModelSpec) -> WeightFormat:
        """The same for this model."""
        ...
