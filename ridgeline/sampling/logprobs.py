"""How likely did the model itself find a token? From the raw logits, before any processor.

Letters: R rows, L those that want log-probabilities, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ridgeline.request import TokenLogprobs
from ridgeline.sampling.batch import parts


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """`ranks_L` count from 1; `top_ids_LK` and `top_LK` are likeliest first."""

    chosen_L: torch.Tensor
    ranks_L: torch.Tensor
    top_LK: torch.Tensor
    top_ids_LK: torch.Tensor

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LogprobTensors:
        """The same with `change` of each tensor."""
        tensors = self.chosen_L, self.ranks_L, self.top_LK, self.top_ids_LK
        return LogprobTensors(*map(change, tensors))


def joined(found: Sequence[LogprobTensors]) -> LogprobTensors:
    """Those of several rows as one, padded to as many likeliest tokens as any of them has."""
    if len(found) == 1:
        return found[0]
    width = max([part.top_LK.shape[1] for part in found])

    def wide(top_LK: torch.Tensor) -> torch.Tensor:
        missing = width - top_LK.shape[1]
        return functional.pad(top_LK, (0, missing)) if missing else top_LK

    return LogprobTensors(
        torch.cat([part.chosen_L for part in found]),
        torch.cat([part.ranks_L for part in found]),
        torch.cat([wide(part.top_LK) for part in found]),
        torch.cat([wide(part.top_ids_LK) for part in found]),
    )


def token_logprobs(
    logits_RV: torch.Tensor, ids_L: torch.Tensor, top_k: int, rows_L: torch.Tensor | None = None
) -> LogprobTensors:
    """Log-probability and rank of the token `ids_L` of each of these rows of float32 logits (None:
    of every row), and its `top_k` likeliest."""
    return joined(
        [
            _some(logits_RV[part if rows_L is None else rows_L[part]], ids_L[part], top_k)
            for part in parts(len(ids_L), logits_RV)
        ]
    )


def _some(logits_LV: torch.Tensor, ids_L: torch.Tensor, top_k: int) -> LogprobTensors:
    logprobs_LV = logits_LV.log_softmax(-1)
    chosen_L1 = logprobs_LV.gather(1, ids_L.unsqueeze(1))
    ranks_L = (logprobs_LV > chosen_L1).sum(-1) + 1
    top_LK, top_ids_LK = logprobs_LV.topk(min(top_k, logits_LV.shape[1]), dim=-1)
    return LogprobTensors(chosen_L1.squeeze(1), ranks_L, top_LK, top_ids_LK)


def records(
    tensors: LogprobTensors, token_ids: Sequence[int], top_ks: Sequence[int]
) -> list[TokenLogprobs]:
    """Host records of tensors that are on the host; row i shows its first `top_ks[i]`."""
    chosen, ranks = tensors.chosen_L.tolist(), tensors.ranks_L.tolist()
    top, top_ids = tensors.top_LK.tolist(), tensors.top_ids_LK.tolist()
    return [
        TokenLogprobs(
            token_id,
            chosen[i],
            ranks[i],
            tuple(zip(top_ids[i][:top_k], top[i][:top_k], strict=True)),
        )
        for i, (token_id, top_k) in enumerate(zip(token_ids, top_ks, strict=True))
    ]
