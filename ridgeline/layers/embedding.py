"""Token ids in, hidden states out; hidden states in, logits out. The vocabulary may be split.

Letters: T tokens, R rows that need logits, E hidden, V vocabulary, P rows of this rank.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ridgeline.distributed.placement import Placement
from ridgeline.kernels.small_linear import Fusion, fits_small, small_linear
from ridgeline.layers.hidden import Hidden
from ridgeline.layers.norm import RMSNorm
from ridgeline.layers.piece import Piece


class VocabularyMatrix:
    """This rank's rows of a [V, E] matrix, zeros behind the end, so that all ranks hold alike."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        placement: Placement,
    ) -> None:
        self.name = name
        self.placement = placement
        self.vocab_size = vocab_size
        self.rows = placement.shard_rows(vocab_size)
        padded = -(-vocab_size // placement.size)
        self.weight_PE = torch.empty(padded, hidden_size, dtype=dtype, device=device)
        self.weight_PE[self.rows.length :].zero_()

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight_PE]

    def pieces(self) -> list[Piece]:
        if not self.rows.length:
            return []
        target = self.weight_PE[: self.rows.length]
        return [Piece(self.name, target, 0, self.rows.start)]

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, E]"""
        if self.placement.size == 1:
            return functional.embedding(token_ids_T, self.weight_PE)
        local = token_ids_T - self.rows.start
        elsewhere = (local < 0) | (local >= self.rows.length)
        found = functional.embedding(local.masked_fill(elsewhere, 0), self.weight_PE)
        return self.placement.all_reduce(found.masked_fill_(elsewhere[:, None], 0))

    def logits_into(self, hidden: Hidden, norm: RMSNorm, out_TV: torch.Tensor) -> torch.Tensor:
        """Of the normed states, [T, V] into `out_TV`. One rank alone."""
        x_TE = hidden.normed(norm)
        if fits_small(x_TE, self.weight_PE, Fusion()):
            return small_linear(x_TE, self.weight_PE, out_MO=out_TV)
        return torch.mm(x_TE, self.weight_PE.T, out=out_TV)

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """[R, E] -> [R, V], on every rank."""
        mine = functional.linear(hidden_RE, self.weight_PE)
        if self.placement.size == 1:
            return mine
        return torch.cat(self.placement.all_gather(mine), dim=-1)[:, : self.vocab_size]
