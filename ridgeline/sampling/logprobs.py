"""How likely did the model itself find a token? From the raw logits, before any processor.

Letters: R rows, L those that want log-probabilities, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ridgeline.request import TokenLogprobs
from ridgeline.sampling.batch import parts


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """`ranks_L` count from 1; `top_ids_LK` and `top_LK` are likeliest first."""

    chosen_L: torch.Tensor
    ranks_L: torch.Tensor
    top_LK: torch.Tensor
    top_ids_LK: torch.Tensor


def token_logprobs(
    logits_RV: torch.Tensor, ids_L: torch.Tensor, top_k: int, rows_L: torch.Tensor | None = None
) -> LogprobTensors:
    """Log-probability and rank of the token `ids_L` of each of these rows of float32 logits (None:
    of every row), and its `top_k` likeliest."""
    found = [
        _some(logits_RV[part if rows_L is None else rows_L[part]], ids_L[part], top_k)
        for part in parts(len(ids_L), logits_RV)
    ]
    if len(found) == 1:
        return found[0]
    return LogprobTensors(
        torch.cat([one.chosen_L for one in found]),
        torch.cat([one.ranks_L for one in found]),
        torch.cat([one.top_LK for one in found]),
        torch.cat([one.top_ids_LK for one in found]),
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
