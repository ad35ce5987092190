"""Matrix products whose rows come from several checkpoint tensors and whose share this rank holds.

Letters: T tokens, I inputs, O outputs of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ridgeline.distributed.placement import Placement, Shard
from ridgeline.layers.piece import Piece
from ridgeline.quantization import WeightFormat


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint matrix, or this rank's rows of it. `bias` names its bias, if it has one."""

    weight: str
    bias: str | None
    rows: Shard


class Linear:
    """x @ W.T + b with the rows of all `parts`, one below the other.

    `columns` is the share of the inputs that this rank holds; then the results of the ranks are
    summed, and the bias is added by rank 0 alone.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        inputs: int,
        *,
        weight_format: WeightFormat,
        dtype: torch.dtype,
        device: torch.device,
        placement: Placement,
        columns: Shard | None = None,
    ) -> None:
        self.format = weight_format
        self.placement = placement
        self.columns = columns
        self.parts = tuple(parts)
        self.outputs = sum(part.rows.length for part in parts)
        self.inputs = inputs if columns is None else columns.length
        self.parameters = weight_format.parameters(self.outputs, self.inputs, dtype, device)
        has_bias = any(part.bias is not None for part in parts)
        self.bias_O = torch.zeros(self.outputs, dtype=dtype, device=device) if has_bias else None
        # The bias of summed results may be counted once only.
        self.added_bias_O = self.bias_O if columns is None or placement.rank == 0 else None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O]"""
        y_TO = self.format.linear(x_TI, self.parameters, self.added_bias_O)
        return y_TO if self.columns is None else self.placement.all_reduce(y_TO)

    def tensors(self) -> list[torch.Tensor]:
        """All that is kept, scales and bias included."""
        bias = [] if self.bias_O is None else [self.bias_O]
        return [*self.parameters.values(), *bias]

    def pieces(self) -> list[Piece]:
        found: list[Piece] = []
        weight = self.parameters["weight"]
        begin = 0
        for part in self.parts:
            rows = slice(begin, begin + part.rows.length)
            begin += part.rows.length
            if self.columns is None:
                found.append(Piece(part.weight, weight[rows], 0, part.rows.start))
            else:
                found.append(Piece(part.weight, weight[rows], 1, self.columns.start))
            if part.bias is not None and self.bias_O is not None:
                found.append(Piece(part.bias, self.bias_O[rows], 0, part.rows.start))
        return found

    def finish(self) -> None:
        """Called once, when all pieces are in place."""
        self.parameters = self.format.finish(self.parameters)
