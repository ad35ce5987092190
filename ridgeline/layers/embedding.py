"""Token ids in, hidden states out; hidden states in, logits out. The vocabulary may be split.

Letters: T tokens, R rows that need logits, E hidden, V vocabulary, P rows of this rank.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ridgeline.distributed.placement import Placement
from ridgeline.kernels.cpu import native
from ridgeline.kernels.cpu.packed_linear import Codes, PackedMatrix, gather, linear, pack
from ridgeline.kernels.invariant_linear import invariant_linear
from ridgeline.kernels.small_linear import Fusion, fits_small, small_linear
from ridgeline.layers.hidden import Hidden
from ridgeline.layers.norm import RMSNorm
from ridgeline.layers.piece import Piece
from ridgeline.quantization.integers import fits_panels


class VocabularyMatrix:
    """This rank's rows of a [V, E] matrix, zeros behind the end, so that all ranks hold alike.

    `deterministic`: logits of a row do not depend on how many rows there are."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        placement: Placement,
        *,
        deterministic: bool = False,
    ) -> None:
        self.name = name
        self.deterministic = deterministic
        self.placement = placement
        self.vocab_size = vocab_size
        self.rows = placement.shard_rows(vocab_size)
        padded = -(-vocab_size // placement.size)
        weight_PE = torch.empty(padded, hidden_size, dtype=dtype, device=device)
        self.weight_PE = native.advise_huge(weight_PE)
        self.weight_PE[self.rows.length :].zero_()
        self._packed: PackedMatrix | None = None

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight_PE if self._packed is None else self._packed.codes]

    def finish(self) -> None:
        """Called once, when all pieces are in place: packed where native kernels read them, in the
        same memory, so that `weight_PE` is nothing to read any more."""
        weight_PE = self.weight_PE
        if self.deterministic or weight_PE.dtype != torch.bfloat16:
            return
        if self._packed is None and fits_panels(weight_PE, Codes.BF16):
            self._packed = pack(weight_PE, Codes.BF16)
            self.weight_PE = weight_PE.new_empty(0, weight_PE.shape[1])

    def stored_rows(self) -> torch.Tensor:
        """This rank's rows, in the serving dtype (a copy where they are packed)."""
        if self._packed is None:
            return self.weight_PE[: self.rows.length]
        return gather(self._packed, None, torch.bfloat16)[: self.rows.length]

    def pieces(self) -> list[Piece]:
        if not self.rows.length:
            return []
        target = self.weight_PE[: self.rows.length]
        return [Piece(self.name, target, 0, self.rows.start)]

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, E]"""
        if self.placement.size == 1:
            return self._rows_of(token_ids_T)
        local = token_ids_T - self.rows.start
        elsewhere = (local < 0) | (local >= self.rows.length)
        found = self._rows_of(local.masked_fill(elsewhere, 0))
        return self.placement.all_reduce(found.masked_fill_(elsewhere[:, None], 0))

    def logits_into(self, hidden: Hidden, norm: RMSNorm, out_TV: torch.Tensor) -> torch.Tensor:
        """Of the normed states, [T, V] into `out_TV`. One rank alone."""
        x_TE = hidden.normed(norm)
        if self._packed is not None:
            return linear(x_TE, self._packed, out_MO=out_TV)
        if self.deterministic:
            return invariant_linear(x_TE, self.weight_PE, out_MN=out_TV)
        if fits_small(x_TE, self.weight_PE, Fusion()):
            return small_linear(x_TE, self.weight_PE, out_MO=out_TV)
        return torch.mm(x_TE, self.weight_PE.T, out=out_TV)

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """[R, E] -> [R, V], on every rank."""
        mine = self._product(hidden_RE)
        if self.placement.size == 1:
            return mine
        return torch.cat(self.placement.all_gather(mine), dim=-1)[:, : self.vocab_size]

    def _rows_of(self, local_T: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return gather(self._packed, local_T, torch.bfloat16)
        return functional.embedding(local_T, self.weight_PE)

    def _product(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return linear(hidden_RE.contiguous(), self._packed)
        product = invariant_linear if self.deterministic else functional.linear
        return product(hidden_RE, self.weight_PE)
