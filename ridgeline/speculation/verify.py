"""Which token comes out at each position of a checked run, whatever the sampling parameters?

A run is the newest token of a request and the drafts behind it; each of its positions is a row of
logits, sampled as if all drafts before it were tokens of the answer. Drafts that were drawn from
known odds are kept or replaced by the rule of `kernels.verified_rows`, in rows that are random and
without a seed. All other rows get the very token that they would get without drafts: greedy and
seeded ones, so that their answer does not depend on drafts at all; the last of a run; and rows
whose drafts were chosen, not drawn. A chosen draft g has q(g) = 1, so the rule would keep it with
probability p(g) and else draw from the other tokens: the draw from p does just that.
Letters: R rows of logits, B requests, G those with drafts, k drafts of each, O rows that are
checked by odds, C penalised rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from ridgeline.errors import check
from ridgeline.kernels.verified_rows import odds_draw, scores_at
from ridgeline.sampling.batch import SamplingBatch, build_batch, parts
from ridgeline.sampling.penalties import PenaltyCounts, Upload
from ridgeline.sampling.row import Needs, SamplingRow
from ridgeline.sampling.sampler import Sampled, adjust, likely_scores, pick


@dataclass(frozen=True, slots=True)
class OddsRows:
    """Rows whose drafts are checked by odds if they were drawn: the row (of R), the request's
    place among those with drafts, and which of its drafts follows the row; all int64."""

    rows_O: torch.Tensor
    requests_O: torch.Tensor
    drafts_O: torch.Tensor


@dataclass(frozen=True, slots=True)
class RunRows:
    """What stays the same while the same requests check so many drafts each. `batch` has a row
    for each position, `firsts` are the requests' first rows and, last, how many rows there are."""

    batch: SamplingBatch
    firsts: tuple[int, ...]
    odds: OddsRows | None


@dataclass(frozen=True, slots=True)
class VerifiedRun:
    """One step's runs. `positions_R` (int64): where the new tokens will stand. `drafts_R` (int64):
    the draft that follows each row, -1 where there is none; behind a run's last row it may be
    anything. `draft_logits_GkV`: what the drafts were drawn from, at their rows' temperatures and
    nothing else; None if they were chosen. `allowed_RV` (bool): see `sampler.sample`."""

    rows: RunRows
    positions_R: torch.Tensor
    drafts_R: torch.Tensor
    draft_logits_GkV: torch.Tensor | None = None
    allowed_RV: torch.Tensor | None = None


def is_verified_by_odds(row: SamplingRow) -> bool:
    """Drawn drafts of this request are kept by their odds; else it gets the token that its own
    noise draws, drafted or not."""
    return bool(row.needs & Needs.RANDOM) and row.params.seed is None


def build_run(
    rows: Sequence[SamplingRow], num_draft_tokens: Sequence[int], vocab_size: int, upload: Upload
) -> RunRows:
    """For these requests, in this order, with so many drafts each (0 or more). Never waits for
    the device."""
    check(len(rows) == len(num_draft_tokens), "drafts of each request", has=len(num_draft_tokens))
    firsts = (0, *accumulate(num + 1 for num in num_draft_tokens))
    each = [row for row, num in zip(rows, num_draft_tokens, strict=True) for _ in range(num + 1)]
    batch = build_batch(each, vocab_size, upload)
    if batch.penalties is not None and any(num_draft_tokens):
        before = _drafts_before(rows, num_draft_tokens, firsts)
        batch = replace(batch, penalties=replace(batch.penalties, before_CK=upload(before)))
    odds = np.array(list(_odds_rows(rows, num_draft_tokens, firsts)), np.int64)
    return RunRows(batch, firsts, OddsRows(*upload(odds.T.copy())) if len(odds) else None)


def _odds_rows(
    rows: Sequence[SamplingRow], num_draft_tokens: Sequence[int], firsts: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    place = 0
    for row, num, first in zip(rows, num_draft_tokens, firsts, strict=False):
        if is_verified_by_odds(row):
            yield from ((first + j, place, j) for j in range(num))
        place += num > 0


def _drafts_before(
    rows: Sequence[SamplingRow], num_draft_tokens: Sequence[int], firsts: Sequence[int]
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """[C, k]: rows whose drafts stand before each penalised row's position, -1 for none."""
    most = max(num_draft_tokens)
    return np.array(
        [
            [first + i if i < j else -1 for i in range(most)]
            for row, num, first in zip(rows, num_draft_tokens, firsts, strict=False)
            if row.needs & Needs.PENALTIES
            for j in range(num + 1)
        ],
        np.int64,
    )


def verify_run(
    logits_RV: torch.Tensor, run: VerifiedRun, counts: PenaltyCounts | None = None
) -> Sampled:
    """The token of each row of `logits_RV` (float32) that comes out if its position is reached:
    if each draft before it is the token that came out there.

    `counts` is needed when a row has penalties; it is not changed. Never waits for a GPU.
    """
    batch = run.rows.batch
    adjusted_RV = adjust(
        logits_RV,
        batch,
        run.positions_R,
        None,
        counts,
        drafts_R=run.drafts_R,
        allowed_RV=run.allowed_RV,
    )
    sampled = pick(adjusted_RV, batch, run.positions_R)
    odds = run.rows.odds
    if odds is not None and run.draft_logits_GkV is not None:
        for part in parts(len(odds.rows_O), logits_RV):
            _check_by_odds(adjusted_RV, run, run.draft_logits_GkV, odds, part, sampled)
    return sampled


def _check_by_odds(
    adjusted_RV: torch.Tensor,
    run: VerifiedRun,
    draft_logits_GkV: torch.Tensor,
    odds: OddsRows,
    part: slice,
    sampled: Sampled,
) -> None:
    """The same for some of the rows that are checked by odds, in place of their own draws."""
    rows_O, filters = odds.rows_O[part], run.rows.batch.filters
    if filters is None:
        return
    some, logits_OV = filters.part(rows_O), adjusted_RV[rows_O]
    draft_logits_OV = draft_logits_GkV[odds.requests_O[part], odds.drafts_O[part]]
    ids_O, is_decided_O = odds_draw(
        likely_scores(logits_OV, logits_OV.amax(-1), some),
        scores_at(draft_logits_OV, some.temperature_R1),
        run.drafts_R[rows_O],
        some.keys_R,
        run.positions_R[rows_O],
    )
    ids_R = sampled.token_ids_R
    ids_R.index_copy_(0, rows_O, ids_O.where(is_decided_O, ids_R[rows_O]))
