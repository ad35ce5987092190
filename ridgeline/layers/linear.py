"""Matrix products whose rows come from several checkpoint tensors and whose share this rank holds.

Letters: T tokens, I inputs, O outputs of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ridgeline.distributed.placement import Placement, Shard
from ridgeline.kernels.silu_mul import gated as gate
from ridgeline.kernels.silu_mul import silu_mul
from ridgeline.layers.hidden import Hidden, RMSNorm
from ridgeline.layers.piece import Piece
from ridgeline.quantization import Fusion, Parameters, WeightFormat
from ridgeline.quantization.contract import MatrixShare


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
        self.placement = placement
        self.columns = columns
        self.parts = tuple(parts)
        self.outputs = sum(part.rows.length for part in parts)
        self.inputs = inputs if columns is None else columns.length
        self.format = weight_format.of([self._share(part) for part in parts], dtype)
        self.parameters = self.format.parameters(self.outputs, self.inputs, dtype, device)
        # Who stacks matrices puts what is to be kept into its own memory.
        self.keep: Callable[[Parameters], Parameters] = _as_they_are
        has_bias = any(part.bias is not None for part in parts)
        self.bias_O = torch.zeros(self.outputs, dtype=dtype, device=device) if has_bias else None
        self.rebias(self.bias_O)

    def rebias(self, bias_O: torch.Tensor | None) -> None:
        """Keep the bias there. That of summed results may be counted once only."""
        self.bias_O = bias_O
        is_counted = self.columns is None or self.placement.rank == 0
        self.added_bias_O = bias_O if is_counted else None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O]"""
        y_TO = self.format.linear(x_TI, self.parameters, self.added_bias_O)
        return y_TO if self.columns is None else self.placement.all_reduce(y_TO)

    def of_normed(
        self, hidden: Hidden, norm: RMSNorm | None, activation: str | None = None
    ) -> torch.Tensor:
        """Of the normed states, or the states themselves; with an activation the first half of the
        rows gates the second, [T, O / 2]. One kernel where the format has one for so few tokens."""
        is_gated = activation == "silu"
        can_fuse = norm is not None and norm.fuses and hidden.ranks is None
        if norm is not None and can_fuse and (is_gated or activation is None):
            y_TO = self._fused(*hidden.unnormed(norm, is_gated=is_gated))
            if y_TO is not None:
                hidden.partial_TE = None
                return y_TO
        if activation is None:
            return self(hidden.normed(norm))
        return self.gated(hidden.normed(norm), activation)

    def gated(self, x_TE: torch.Tensor, activation: str) -> torch.Tensor:
        """The second half of the rows, gated by the activation of the first, [T, O / 2]."""
        if activation != "silu":
            return gate(self(x_TE), activation)
        y_TO = self._fused(x_TE, Fusion(is_gated=True))
        return silu_mul(self(x_TE)) if y_TO is None else y_TO

    def gates_input(self, like_T: torch.Tensor) -> bool:
        """`add_to` is faster of gate and up than of their product, for rows like these."""
        return self.format.gates_input(like_T, self.parameters)

    def add_to(
        self,
        hidden: Hidden,
        x_TI: torch.Tensor,
        *,
        of_gated: bool = False,
        norm: RMSNorm | None = None,
    ) -> None:
        """Of x, added to the hidden states, after its `norm` if there is one; `of_gated`: a row of
        x is gate and up, 2 * I, and silu(gate) * up is meant. Only where `gates_input` says so."""
        is_whole = self.columns is None or self.placement.size == 1
        if is_whole and norm is None and hidden.partial_TE is None:
            fusion = Fusion(residual_TO=hidden.sum_TE, of_gated=of_gated)
            if self._fused(x_TI, fusion) is not None:
                return
        hidden.whole()
        ranks, bias_O = self.placement.collective, self.added_bias_O
        if of_gated:
            y_TO = self.format.linear_of_gated(x_TI, self.parameters, bias_O)
        else:
            y_TO = self.format.linear(x_TI, self.parameters, bias_O)
        if self.columns is None or ranks is None:
            hidden.add(y_TO, norm)
        elif norm is None and ranks.fuses_norms:
            hidden.add_share(y_TO, ranks)
        else:
            hidden.add(ranks.all_reduce(y_TO), norm)

    def _fused(self, x_TI: torch.Tensor, fusion: Fusion) -> torch.Tensor | None:
        return self.format.fused(x_TI, self.parameters, self.added_bias_O, fusion)

    def tensors(self) -> list[torch.Tensor]:
        """All that is kept, scales and bias included."""
        bias = [] if self.bias_O is None else [self.bias_O]
        return [*self.parameters.values(), *bias]

    def _share(self, part: Part) -> MatrixShare:
        """What this rank holds of it, in the words of formats."""
        rows, columns = part.rows, self.columns or Shard(0, self.inputs)
        return MatrixShare(
            part.weight,
            rows.start,
            rows.length,
            columns.start,
            columns.length,
            has_all_columns=self.columns is None or self.placement.size == 1,
        )

    def pieces(self) -> list[Piece]:
        found: list[Piece] = []
        begin = 0
        for index, part in enumerate(self.parts):
            rows = slice(begin, begin + part.rows.length)
            begin += part.rows.length
            found += self._weight_pieces(index, part, rows)
            if part.bias is not None and self.bias_O is not None:
                found.append(Piece(part.bias, self.bias_O[rows], 0, part.rows.start))
        return found

    def _weight_pieces(self, index: int, part: Part, rows: slice) -> list[Piece]:
        own = self.format.pieces(self.parameters, index)
        if own is not None:
            return own
        weight = self.parameters["weight"][rows]
        if self.columns is None:
            return [Piece(part.weight, weight, 0, part.rows.start)]
        return [Piece(part.weight, weight, 1, self.columns.start)]

    def finish(self) -> None:
        """Called once, when all pieces are in place."""
        self.parameters = self.keep(self.format.finish(self.parameters))

    def kept(self) -> dict[str, torch.Tensor]:
        """What a later start can `adopt`, after `finish`."""
        bias = {} if self.bias_O is None else {"bias": self.bias_O}
        return {**self.parameters, **bias}

    def adopt(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Be as the layer that kept this, in place of being filled and finished."""
        parameters = dict(kept)
        if self.bias_O is not None:
            self.bias_O.copy_(parameters.pop("bias"))
        self.parameters = self.keep(parameters)


def _as_they_are(parameters: Parameters) -> Parameters:
    return parameters
