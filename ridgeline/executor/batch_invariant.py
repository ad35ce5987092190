"""How is a step built and sampled so that no row depends on the rows beside it?

Every request is a piece of a prompt, be it of one token, so that there is one way through the
kernels. Draws at temperatures are one kernel with programs for each row; filters and
log-probabilities are sorts and sums of torch, which cuts them by the number of rows, so each such
row gets calls of its own. (A filtered row stands in its call twice: the running sum of one row
alone is left to a scan whose rounding depends on timing.)
Letters: R rows that sample, V vocabulary, L rows with log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ridgeline.executor.batch import BatchBuilder, SamplingRows, SamplingStep, StepBatch
from ridgeline.executor.rows import Row
from ridgeline.executor.transfer import Array, Transfer
from ridgeline.sampling.batch import LogprobRows, SamplingBatch, build_batch
from ridgeline.sampling.logprobs import LogprobTensors, joined, token_logprobs
from ridgeline.sampling.penalties import PenaltyCounts
from ridgeline.sampling.row import Needs
from ridgeline.sampling.sampler import Sampled, sample
from ridgeline.step import ScheduledRequest

FILTERS = Needs.TOP_K | Needs.TOP_P | Needs.MIN_P


class PieceBuilder(BatchBuilder):
    """A step of decodes alone is built as any other."""

    def _decode_batch(
        self, scheduled: Sequence[ScheduledRequest], rows: list[Row], starts: list[int]
    ) -> StepBatch:
        return self._mixed_batch(scheduled, rows)


@dataclass(frozen=True, slots=True)
class _Call:
    """`rows` of a step are sampled together; the first `num` answers count."""

    num: int
    rows: Array
    rows_r: torch.Tensor
    batch: SamplingBatch


class InvariantSampler:
    def __init__(self, vocab_size: int, transfer: Transfer) -> None:
        self._vocab_size, self._transfer = vocab_size, transfer
        self._made_for: SamplingRows | None = None
        self._calls: list[_Call] = []

    def sample(self, step: SamplingStep, logits_RV: torch.Tensor, counts: PenaltyCounts) -> Sampled:
        """As `sampling.sampler.sample`."""
        kept, positions_R = step.kept, step.positions_R
        if not kept.batch.needs & FILTERS:
            return sample(logits_RV, kept.batch, positions_R, step.host_positions, counts)
        ids_R = torch.empty_like(positions_R)
        is_sound_R = torch.empty_like(positions_R, dtype=torch.bool)
        for call in self._calls_of(kept):
            at = call.rows_r
            positions, here = positions_R.index_select(0, at), step.host_positions[call.rows]
            logits = logits_RV.index_select(0, at)
            some = sample(logits, call.batch, positions, here, counts)
            ids_R.index_copy_(0, at[: call.num], some.token_ids_R[: call.num])
            is_sound_R.index_copy_(0, at[: call.num], some.is_sound_R[: call.num])
        return Sampled(ids_R, is_sound_R)

    def _calls_of(self, kept: SamplingRows) -> list[_Call]:
        """They stay the same while the same rows sample."""
        if self._made_for is not kept:
            has_filters = [bool(row.sampling.needs & FILTERS) for row in kept.rows]
            plain = [i for i, filters in enumerate(has_filters) if not filters]
            twice = [[i, i] for i, filters in enumerate(has_filters) if filters]
            self._calls = [self._call(kept, plain, len(plain))] if plain else []
            self._calls += [self._call(kept, part, 1) for part in twice]
            self._made_for = kept
        return self._calls

    def _call(self, kept: SamplingRows, part: list[int], num: int) -> _Call:
        send, rows = self._transfer.send, np.array(part, np.int64)
        sampled = [kept.rows[i].sampling for i in part]
        return _Call(num, rows, send(rows), build_batch(sampled, self._vocab_size, send))


def invariant_logprobs(
    logits_RV: torch.Tensor, ids_R: torch.Tensor, wanted: LogprobRows
) -> LogprobTensors:
    """`token_logprobs` of each row by itself, with no more likely tokens than it shows."""
    found = []
    for i, top_k in enumerate(wanted.top_ks):
        row_L = wanted.rows_L[i : i + 1]
        found.append(token_logprobs(logits_RV, ids_R.index_select(0, row_L), top_k, row_L))
    return joined(found)
