"""How do tests make a batch of sampling rows and draw from it many times?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ridgeline.request import SamplingParams
from ridgeline.sampling.batch import SamplingBatch, build_batch
from ridgeline.sampling.penalties import Array, PenaltyCounts
from ridgeline.sampling.row import Needs, SamplingRow, sampling_row
from ridgeline.sampling.sampler import sample


def upload(array: Array) -> torch.Tensor:
    return torch.from_numpy(array)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 1} | changes))


def batch_of(rows: Sequence[SamplingParams], vocab_size: int, prompt: int = 0) -> SamplingBatch:
    made = [sampling_row(f"r{i}", row, prompt) for i, row in enumerate(rows)]
    return build_batch(made, vocab_size, upload)


def open_rows(
    wanted: Sequence[tuple[SamplingParams, Sequence[int], Sequence[int]]], counts: PenaltyCounts
) -> list[SamplingRow]:
    """Rows for (params, prompt, output), with their penalty counts opened."""
    rows = []
    for i, (row_params, prompt, output) in enumerate(wanted):
        row = sampling_row(f"r{i}", row_params, len(prompt))
        if row.needs & Needs.PENALTIES:
            row.counts_slot = counts.open(np.array(prompt, np.int64), np.array(output, np.int64))
        rows.append(row)
    return rows


def draws(logits_V: torch.Tensor, row: SamplingParams, num: int) -> torch.Tensor:
    """`num` tokens for one request, one at each position: the histogram of them, [V]."""
    vocab_size = len(logits_V)
    batch = batch_of([row] * num, vocab_size)
    positions = np.arange(num)
    tokens = sample(logits_V.expand(num, -1), batch, upload(positions), positions).token_ids_R
    return torch.bincount(tokens, minlength=vocab_size)


def p_value(observed_V: torch.Tensor, expected_V: torch.Tensor) -> float:
    """Of Pearson's chi-square test; what cannot happen (probability 0) must not have."""
    possible_V = expected_V > 0
    assert int(observed_V[~possible_V].sum()) == 0, "a token that was filtered out was drawn"
    want_V = expected_V[possible_V].double() * int(observed_V.sum())
    assert float(want_V.min()) >= 5, "too few draws for the test to mean anything"
    statistic = ((observed_V[possible_V] - want_V) ** 2 / want_V).sum()
    freedom = torch.tensor((len(want_V) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2)) if len(want_V) > 1 else 1.0
