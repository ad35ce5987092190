"""How unlikely may a token be and still be drawn? One threshold per row, not a mask.

Top-k, top-p and min-p each say "keep every token at least this likely", so together they are the
largest of three thresholds, and a sort, where one is needed, never has to be undone. Tokens whose
logit ties with the threshold are kept, whatever order a sort gave them; top-p weighs the k best
alone when top-k is on too. Mass is summed in float64: a nucleus of 0.999 is decided by tokens of
1e-7. Letters: R rows, V vocabulary, K likeliest tokens looked at.
"""

from __future__ import annotations

from functools import reduce

import torch

from ridgeline.sampling.batch import Filters

_HEADS = (1024, 16384)  # tokens of a CPU's first looks for top-p: they nearly always hold the mass


def threshold(scores_RV: torch.Tensor, filters: Filters) -> torch.Tensor | None:
    """[R, 1]: scores below it are out; None when all are in.

    `scores_RV` are divided by temperature, and their largest is 0.
    """
    lows = [] if filters.log_min_p_R1 is None else [filters.log_min_p_R1]
    if filters.top_p_R1 is not None:
        head_RK, total_R1 = _head_with_mass(scores_RV, filters, filters.top_p_R1)
        lows.append(_nucleus(head_RK, total_R1, filters, filters.top_p_R1))
    elif filters.top_k_R1 is not None:
        head_RK = scores_RV.topk(filters.max_top_k, dim=-1).values
    if filters.top_k_R1 is not None:
        lows.append(_kth_best(head_RK, filters.top_k_R1, filters))
    return reduce(torch.maximum, lows) if lows else None


def _head_with_mass(
    scores_RV: torch.Tensor, filters: Filters, top_p_R1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As many of the likeliest scores as top-k and top-p need, largest first, and the mass of the
    whole vocabulary (None when each row with top-p has a top-k, and so a mass of its own)."""
    if filters.all_top_p_have_k:
        return scores_RV.topk(filters.max_top_k, dim=-1).values, None
    total_R1 = scores_RV.exp().sum(-1, keepdim=True, dtype=torch.float64)
    if scores_RV.device.type == "cpu":
        # Only a CPU may look at the numbers: on a GPU this would wait for all work before it.
        for size in _HEADS:
            if (width := max(size, filters.max_top_k)) * 4 < scores_RV.shape[1]:
                head_RK = scores_RV.topk(width, dim=-1).values
                if _holds_the_mass(head_RK, total_R1, top_p_R1, filters.top_k_R1):
                    return head_RK, total_R1
    return scores_RV.sort(dim=-1, descending=True).values, total_R1


def _holds_the_mass(
    head_RK: torch.Tensor,
    total_R1: torch.Tensor,
    top_p_R1: torch.Tensor,
    top_k_R1: torch.Tensor | None,
) -> bool:
    enough_R1 = head_RK.exp().sum(-1, keepdim=True, dtype=torch.float64) > top_p_R1 * total_R1
    enough_R1 |= top_p_R1 >= 1
    if top_k_R1 is not None:
        enough_R1 |= top_k_R1 <= head_RK.shape[1]
    return bool(enough_R1.all())


def _kth_best(head_RK: torch.Tensor, top_k_R1: torch.Tensor, filters: Filters) -> torch.Tensor:
    if filters.all_have_top_k:
        return head_RK.gather(1, top_k_R1 - 1)
    width = head_RK.shape[1]
    kth_R1 = head_RK.gather(1, (top_k_R1 - 1).clamp_(max=width - 1))
    return kth_R1.where(top_k_R1 <= width, -torch.inf)


def _nucleus(
    head_RK: torch.Tensor, total_R1: torch.Tensor | None, filters: Filters, top_p_R1: torch.Tensor
) -> torch.Tensor:
    """The score of the last token that is needed for a mass of p, of the k best where k is on."""
    mass_RK, top_k_R1, width = head_RK.exp(), filters.top_k_R1, head_RK.shape[1]
    if top_k_R1 is not None:
        ranks_K = torch.arange(width, device=head_RK.device)
        mass_RK.masked_fill_(ranks_K >= top_k_R1, 0.0)
    up_to_RK = mass_RK.cumsum(-1, dtype=torch.float64)
    all_R1 = up_to_RK[:, -1:]
    if total_R1 is not None:
        all_R1 = total_R1 if top_k_R1 is None else all_R1.where(top_k_R1 <= width, total_R1)
    is_kept_RK = (up_to_RK - mass_RK < top_p_R1 * all_R1).logical_and_(mass_RK > 0)
    last_R1 = is_kept_RK.sum(-1, keepdim=True).sub_(1).clamp_(min=0)
    return head_RK.gather(1, last_R1).where(top_p_R1 < 1, -torch.inf)
