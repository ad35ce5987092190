"""Which token comes next? Logits of a batch in, one token per row out.

The order of work, the same as in Transformers and vLLM where both agree:

0. tokens that a mask does not allow are taken out
1. logit bias is added
2. stop tokens are banned until `min_tokens` are out
3. repetition penalty (prompt and output), then frequency and presence penalties (output)
4. greedy rows take the largest (the lowest id of equals) and are done
5. division by temperature
6. top-k, then top-p of what is left, then min-p (see filters)
7. Gumbel noise of (seed, position, token id) is added and the largest taken, which is a draw from
   the softmax

What no row asks for is not computed. The logits are never written to: log-probabilities are of
the raw ones. Letters: R rows, V vocabulary, C penalised rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch

from ridgeline.kernels.draw_rows import draw_rows, native_serves
from ridgeline.kernels.noise import minus_gumbel
from ridgeline.sampling.batch import Filters, Penalties, SamplingBatch, SparseAdds, parts
from ridgeline.sampling.penalties import (
    Array,
    PenaltyCounts,
    frequency_and_presence,
    repetition,
    with_drafts,
)

_HEADS = (1024, 16384)  # tokens of a CPU's first looks for top-p: they nearly always hold the mass


@dataclass(slots=True)
class Sampled:
    """`token_ids_R` (int64) are always valid ids; `is_sound_R` is false for rows whose largest
    logit is not a finite number, and whose token therefore means nothing."""

    token_ids_R: torch.Tensor
    is_sound_R: torch.Tensor


def sample(
    logits_RV: torch.Tensor,
    batch: SamplingBatch,
    positions_R: torch.Tensor,
    host_positions: Array,
    counts: PenaltyCounts | None = None,
    *,
    allowed_RV: torch.Tensor | None = None,
) -> Sampled:
    """One token per row of `logits_RV` (float32).

    `positions_R` (int64) is where the new tokens will stand in their sequences, `host_positions`
    the same on the host. `counts` is needed when a row has penalties. Tokens outside `allowed_RV`
    (bool) are never taken; a row that allows none is not sound. Never waits for a GPU.
    """
    adjusted_RV = adjust(
        logits_RV, batch, positions_R, host_positions, counts, allowed_RV=allowed_RV
    )
    return pick(adjusted_RV, batch, positions_R)


def pick(adjusted_RV: torch.Tensor, batch: SamplingBatch, positions_R: torch.Tensor) -> Sampled:
    """Steps 4 to 7."""
    is_plain = batch.filters is None or batch.filters.are_temperatures
    if is_plain and (adjusted_RV.is_cuda or native_serves(adjusted_RV)):
        draws = None if batch.filters is None else batch.filters.draws
        return Sampled(*draw_rows(adjusted_RV, positions_R, draws))
    largest_R, token_ids_R = adjusted_RV.max(dim=-1)
    if batch.filters is not None:
        token_ids_R = _draw(adjusted_RV, largest_R, batch.filters, positions_R)
    return Sampled(token_ids_R, largest_R.mul(0.0).eq(0.0))  # NaN for what is not finite


def adjust(
    logits_RV: torch.Tensor,
    batch: SamplingBatch,
    positions_R: torch.Tensor,
    host_positions: Array | None,
    counts: PenaltyCounts | None,
    *,
    drafts_R: torch.Tensor | None = None,
    allowed_RV: torch.Tensor | None = None,
) -> torch.Tensor:
    """Steps 0 to 3: what greedy rows are subject to as well.

    Without `host_positions` the device alone knows which bans are over. `drafts_R` (int64) are
    the tokens drafted to follow each row, -1 for none: rows of a checked run are penalised for
    those before them (`Penalties.before_CK`).
    """
    bans = batch.bans if host_positions is None or batch.bans_at(host_positions) else None
    penalties = None if counts is None else batch.penalties
    if allowed_RV is not None:
        logits_RV = logits_RV.where(allowed_RV, -torch.inf)
    elif batch.bias is not None or bans is not None or penalties is not None:
        logits_RV = logits_RV.clone()
    if batch.bias is not None:
        _add(logits_RV, batch.bias, batch.bias.values_N)
    if bans is not None and bans.until_N is not None:
        is_on_N = positions_R[bans.rows_N] < bans.until_N
        _add(logits_RV, bans, bans.values_N.where(is_on_N, 0.0))
    if penalties is not None and counts is not None:
        for part in parts(len(penalties.rows_C), logits_RV):
            _penalise(logits_RV, penalties.part(part), counts, drafts_R)
    return logits_RV


def probabilities(logits_RV: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """[R, V]: what step 7 draws from, given the logits after step 3."""
    if batch.filters is None:
        return torch.nn.functional.one_hot(logits_RV.argmax(-1), logits_RV.shape[1]).float()
    return likely_scores(logits_RV, logits_RV.amax(-1), batch.filters).softmax(-1)


def _draw(
    logits_RV: torch.Tensor, largest_R: torch.Tensor, filters: Filters, positions_R: torch.Tensor
) -> torch.Tensor:
    """Steps 5 to 7, for as many rows at once as memory is set aside for."""
    pieces = parts(len(logits_RV), logits_RV)
    if len(pieces) == 1:
        return _draw_some(logits_RV, largest_R, filters, positions_R)
    return torch.cat(
        [
            _draw_some(logits_RV[part], largest_R[part], filters.part(part), positions_R[part])
            for part in pieces
        ]
    )


def _draw_some(
    logits_RV: torch.Tensor, largest_R: torch.Tensor, filters: Filters, positions_R: torch.Tensor
) -> torch.Tensor:
    scores_RV = likely_scores(logits_RV, largest_R, filters)
    noise_RV = minus_gumbel(filters.keys_R, positions_R, logits_RV.shape[1])
    if filters.noisy_R1 is not None:
        noise_RV.mul_(filters.noisy_R1)
    return scores_RV.sub_(noise_RV).argmax(-1)


def likely_scores(
    logits_RV: torch.Tensor, largest_R: torch.Tensor, filters: Filters
) -> torch.Tensor:
    """Steps 5 and 6: the largest score is 0, what a filter takes out is minus infinity."""
    scores_RV = (logits_RV - largest_R.unsqueeze(1)).div_(filters.temperature_R1)
    low_R1 = threshold(scores_RV, filters)
    return scores_RV if low_R1 is None else scores_RV.masked_fill_(scores_RV < low_R1, -torch.inf)


def _add(logits_RV: torch.Tensor, adds: SparseAdds, values_N: torch.Tensor) -> None:
    logits_RV.index_put_((adds.rows_N, adds.tokens_N), values_N, accumulate=True)


def _penalise(
    logits_RV: torch.Tensor,
    penalties: Penalties,
    counts: PenaltyCounts,
    drafts_R: torch.Tensor | None,
) -> None:
    some_CV = logits_RV[penalties.rows_C]
    counts_CV = counts.counts_PV[penalties.slots_C]
    if drafts_R is not None and penalties.before_CK is not None:
        counts_CV = with_drafts(counts_CV, drafts_R, penalties.before_CK)
    if penalties.repetition_C1 is not None:
        seen_CV = (counts_CV > 0) | counts.prompt_PV[penalties.slots_C]
        some_CV = repetition(some_CV, seen_CV, penalties.repetition_C1)
    some_CV = frequency_and_presence(
        some_CV, counts_CV, penalties.frequency_C1, penalties.presence_C1
    )
    logits_RV.index_copy_(0, penalties.rows_C, some_CV)


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
