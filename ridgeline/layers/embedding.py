"""Token ids in, hidden states out; hidden states in, logits out. The vocabulary may be split.

Letters: T tokens, R rows that need logits, E hidden, V vocabulary, P rows of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ridgeline.distributed.placement import Placement
from ridgeline.kernels.cpu.packed_linear import gather
from ridgeline.layers.piece import Piece
from ridgeline.quantization import WeightFormat


class VocabularyMatrix:
    """This rank's rows of a [V, E] matrix, zeros behind the end, so that all ranks hold alike.
    `held_rows`: how many there are with these, `counts.vocabulary_rows`. `scale` multiplies what is
    looked up, and logits stay between -`cap` and `cap`, see ModelSpec."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        placement: Placement,
        *,
        vocabulary_format: WeightFormat,
        held_rows: int,
        scale: float = 1.0,
        cap: float | None = None,
    ) -> None:
        self._scale, self._cap = scale, cap
        self.name = name
        self.format = vocabulary_format
        self.dtype = dtype
        self.placement = placement
        self.vocab_size = vocab_size
        self.rows = placement.shard_rows(vocab_size)
        self.parameters = vocabulary_format.parameters(held_rows, hidden_size, dtype, device)
        self.parameters["weight"][self.rows.length :].zero_()

    def tensors(self) -> list[torch.Tensor]:
        return list(self.parameters.values())

    def finish(self) -> None:
        """Called once, when all pieces are in place."""
        self.parameters = self.format.finish(self.parameters)

    def kept(self) -> dict[str, torch.Tensor]:
        """What a later start can `adopt`, after `finish`."""
        return dict(self.parameters)

    def adopt(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Be as the matrix that kept this, in place of being filled and finished."""
        self.parameters = dict(kept)

    def pieces(self) -> list[Piece]:
        if not self.rows.length:
            return []
        target = self.parameters["weight"][: self.rows.length]
        return [Piece(self.name, target, 0, self.rows.start)]

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, E]"""
        if self.placement.size == 1:
            return self._rows_of(token_ids_T)
        packed = self.format.packed(self.parameters)
        if packed is not None:
            found = gather(packed, token_ids_T, self.dtype, first=self.rows.start)
            if self._scale != 1.0:
                found.mul_(self._scale)
            return self.placement.all_reduce(found)
        local = token_ids_T - self.rows.start
        elsewhere = (local < 0) | (local >= self.rows.length)
        found = self._rows_of(local.masked_fill(elsewhere, 0))
        return self.placement.all_reduce(found.masked_fill_(elsewhere[:, None], 0))

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """[R, E] -> [R, V] float32, on every rank."""
        shape = len(hidden_RE), self.vocab_size
        out_RV = torch.empty(shape, dtype=torch.float32, device=hidden_RE.device)
        return self.logits_into(hidden_RE.contiguous(), out_RV)

    def logits_into(self, hidden_RE: torch.Tensor, out_RV: torch.Tensor) -> torch.Tensor:
        """The same into `out_RV` (float32), which may have fewer columns than V."""
        if self.placement.size == 1:
            return self._capped(self.format.linear_into(hidden_RE, self.parameters, out_RV))
        shape = len(hidden_RE), -(-self.vocab_size // self.placement.size)
        mine_RP = torch.empty(shape, dtype=torch.float32, device=hidden_RE.device)
        self._capped(self.format.linear_into(hidden_RE, self.parameters, mine_RP))
        self.placement.gather_columns(mine_RP, out_RV)
        return out_RV

    def _rows_of(self, local_T: torch.Tensor) -> torch.Tensor:
        rows_TE = self.format.rows(self.parameters, local_T, self.dtype)
        return rows_TE if self._scale == 1.0 else rows_TE.mul_(self._scale)

    def _capped(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """In place."""
        if self._cap is None:
            return logits_TV
        return logits_TV.div_(self._cap).tanh_().mul_(self._cap)
