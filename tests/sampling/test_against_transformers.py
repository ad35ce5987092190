"""Are the kept tokens and their probabilities those of Transformers' own processors?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ridgeline.request import SamplingParams
from ridgeline.sampling import sampler
from ridgeline.sampling.batch import build_batch
from ridgeline.sampling.penalties import PenaltyCounts
from ridgeline.sampling.sampler import adjust, probabilities
from tests.sampling.build import batch_of, open_rows, params, upload

CASES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 50},
    {"top_p": 0.05},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.999},
    {"min_p": 0.02},
    {"min_p": 0.5},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"top_k": 40, "top_p": 0.3, "min_p": 0.1, "temperature": 1.7},
    {"top_p": 0.9, "min_p": 0.2},
)


def theirs(logits_RV: torch.Tensor, row: SamplingParams) -> torch.Tensor:
    steps = LogitsProcessorList()
    if row.temperature != 1:
        steps.append(TemperatureLogitsWarper(row.temperature))
    if row.top_k > 0:
        steps.append(TopKLogitsWarper(row.top_k))
    if row.top_p < 1:
        steps.append(TopPLogitsWarper(row.top_p))
    if row.min_p > 0:
        steps.append(MinPLogitsWarper(row.min_p))
    no_ids = torch.zeros((len(logits_RV), 0), dtype=torch.int64)
    scores: torch.Tensor = steps(no_ids, logits_RV.clone())  # type: ignore[arg-type]
    return scores.softmax(-1)


def same(got_RV: torch.Tensor, want_RV: torch.Tensor) -> None:
    assert torch.equal(got_RV > 0, want_RV > 0)
    torch.testing.assert_close(got_RV, want_RV, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("vocab_size", [7, 300, 20_000])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_filters(case: dict[str, Any], vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(4, vocab_size, generator=generator) * torch.tensor([[0.5], [2], [5], [9]])
    row = params(**case)
    same(probabilities(logits, batch_of([row] * 4, vocab_size)), theirs(logits, row))


@pytest.mark.parametrize("vocab_size", [300, 20_000])
def test_filters_of_all_kinds_in_one_batch(vocab_size: int) -> None:
    logits = torch.randn(len(CASES), vocab_size, generator=torch.Generator().manual_seed(3)) * 4
    rows = [params(**case) for case in CASES]
    got = probabilities(logits, batch_of(rows, vocab_size))
    for i, row in enumerate(rows):
        same(got[i : i + 1], theirs(logits[i : i + 1], row))


def test_both_ways_to_look_for_top_p_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1)) * 6
    rows = [params(top_p=0.9), params(top_p=0.99), params(top_k=9), params(top_p=0.5, top_k=700)]
    batch = batch_of([*rows, params(), params(min_p=0.1)], 5000)
    short = probabilities(logits, batch)
    monkeypatch.setattr(sampler, "_HEADS", ())
    assert torch.equal(probabilities(logits, batch), short)


def test_ties_with_the_last_kept_token_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0, 0.0]])
    got = probabilities(logits, batch_of([params(top_k=3)], 6))
    same(got, theirs(logits, params(top_k=3)))
    assert got[0].count_nonzero() == 5


@pytest.mark.parametrize("by", [0.5, 1.0, 1.3, 2.0])
def test_repetition_penalty(by: float) -> None:
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(3, 40, generator=generator) * 3
    ids = torch.randint(0, 40, (3, 12), generator=generator)
    row = params(temperature=0.0, repetition_penalty=by, presence_penalty=1e-30)
    counts = PenaltyCounts(40, upload)
    rows = open_rows([(row, line[:5], line[5:]) for line in ids.tolist()], counts)
    batch = build_batch(rows, 40, upload)
    positions = np.full(3, 12)
    got = adjust(logits, batch, upload(positions), positions, counts)
    want = RepetitionPenaltyLogitsProcessor(by)(ids, logits.clone())
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
