"""Which tokens has a request used, and what does that cost them?

Counts live on the device, one row of the vocabulary per request that has a penalty, and each step
adds one token to them: nothing here grows with the context. Letters: P rows of counts, R rows that
sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]
Upload = Callable[[Array], torch.Tensor]

FIRST_COUNTS = 4


class PenaltyCounts:
    """`counts_PV` counts output tokens (int32), `prompt_PV` marks those of the prompt (bool).

    Takes 5 bytes per vocabulary entry and penalised request. Room for `first_rows` requests is
    taken when there is one, and then grows by doubling.
    """

    def __init__(self, vocab_size: int, upload: Upload, first_rows: int = FIRST_COUNTS) -> None:
        self.vocab_size = vocab_size
        self._first_rows = first_rows
        self._upload = upload
        empty = upload(np.empty((0,), np.int32))
        self.counts_PV = torch.zeros((0, vocab_size), dtype=torch.int32, device=empty.device)
        self.prompt_PV = torch.zeros((0, vocab_size), dtype=torch.bool, device=empty.device)
        self._free: list[int] = []

    def open(self, prompt_ids: Array, output_ids: Array) -> int:
        """A row for a request that has these tokens already; gives its index."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.prompt_PV[slot] = False
        self.counts_PV[slot] = 0
        if len(prompt_ids):
            self.prompt_PV[slot].index_fill_(0, self._upload(prompt_ids), True)
        if len(output_ids):
            ids = self._upload(output_ids)
            self.counts_PV[slot].scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        return slot

    def close(self, slot: int) -> None:
        self._free.append(slot)

    def add(self, slots_R: torch.Tensor, token_ids_R: torch.Tensor) -> None:
        """Count one new token for each of these rows."""
        flat = self.counts_PV.view(-1)
        at = slots_R * self.vocab_size + token_ids_R
        flat.scatter_add_(0, at, torch.ones_like(at, dtype=torch.int32))

    def add_run(self, slots_C: torch.Tensor, token_ids_CQ: torch.Tensor) -> None:
        """Count what a checked run has given each of these rows; -1 behind its last token."""
        at_CQ = slots_C.unsqueeze(1) * self.vocab_size + token_ids_CQ.clamp(min=0)
        self.counts_PV.view(-1).scatter_add_(0, at_CQ.view(-1), (token_ids_CQ >= 0).view(-1).int())

    def _grow(self) -> None:
        old = len(self.counts_PV)
        more = max(self._first_rows, old)
        self.counts_PV = _with_room(self.counts_PV, more)
        self.prompt_PV = _with_room(self.prompt_PV, more)
        self._free.extend(range(old + more - 1, old - 1, -1))


def _with_room(rows_PV: torch.Tensor, more: int) -> torch.Tensor:
    """The same rows and `more` of zeros."""
    num_rows, vocab_size = rows_PV.shape
    larger_PV = rows_PV.new_zeros(num_rows + more, vocab_size)
    larger_PV[:num_rows] = rows_PV
    return larger_PV


def with_drafts(
    counts_CV: torch.Tensor, drafts_R: torch.Tensor, before_CK: torch.Tensor
) -> torch.Tensor:
    """These counts, written to, and each row's drafts before it (see `batch.Penalties`); a draft
    below 0 is none."""
    tokens_CK = drafts_R[before_CK.clamp(min=0)]
    is_there_CK = (before_CK >= 0) & (tokens_CK >= 0)
    return counts_CV.scatter_add_(1, tokens_CK.clamp(min=0), is_there_CK.int())


def repetition(logits_RV: torch.Tensor, seen_RV: torch.Tensor, by_R1: torch.Tensor) -> torch.Tensor:
    """Divide positive and multiply negative logits of seen tokens (CTRL, Keskar et al., 2019;
    as Transformers' RepetitionPenaltyLogitsProcessor does)."""
    pushed = torch.where(logits_RV < 0, logits_RV * by_R1, logits_RV / by_R1)
    return torch.where(seen_RV, pushed, logits_RV)


def frequency_and_presence(
    logits_RV: torch.Tensor,
    counts_RV: torch.Tensor,
    frequency_R1: torch.Tensor,
    presence_R1: torch.Tensor,
) -> torch.Tensor:
    """Take `frequency` off for each time a token was produced and `presence` once (OpenAI API)."""
    return logits_RV - frequency_R1 * counts_RV - presence_R1 * (counts_RV > 0)
