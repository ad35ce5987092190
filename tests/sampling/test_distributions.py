"""Does each sampler draw from the distribution it should? Fixed seeds, chi-square, p > 1e-4.

The expected distribution is computed here, token by token, in float64 Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.request import SamplingParams
from ridgeline.sampling.batch import build_batch
from ridgeline.sampling.penalties import PenaltyCounts
from ridgeline.sampling.sampler import sample
from tests.sampling.build import draws, open_rows, p_value, params, upload
from tests.thinning import slow

NUM_DRAWS = 20_000
LOGITS = [2.0, 1.5, 1.4, 1.0, 0.3, 0.0, -0.2, -0.5, -1.0, -1.1, -1.6, 0.9]


def expected(
    logits: Sequence[float], row: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """The same rules as the sampler's, written down the slow way."""
    x = dict(enumerate(logits))
    for token, value in dict(row.logit_bias).items():
        x[token] += value
    if len(output) < row.min_tokens:
        for token in row.stop_token_ids:
            x[token] = -math.inf
    for token in set(prompt) | set(output):
        by = row.repetition_penalty
        x[token] = x[token] * by if x[token] < 0 else x[token] / by
    for token in set(output):
        x[token] -= row.presence_penalty + row.frequency_penalty * list(output).count(token)
    x = {token: value / row.temperature for token, value in x.items()}
    best = sorted((t for t in x if x[t] > -math.inf), key=lambda t: -x[t])
    if row.top_k > 0:
        best = best[: row.top_k]
    weight = {t: math.exp(x[t]) for t in best}
    total, before, nucleus = sum(weight.values()), 0.0, []
    for token in best:
        if before < row.top_p * total:
            nucleus.append(token)
        before += weight[token]
    kept = [t for t in nucleus if weight[t] >= row.min_p * weight[best[0]]]
    mass = sum(weight[t] for t in kept)
    return torch.tensor([weight[t] / mass if t in kept else 0.0 for t in range(len(logits))])


SAMPLERS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 3": {"temperature": 3.0},
    "top_k 1": {"top_k": 1},
    "top_k 5": {"top_k": 5},
    "top_k beyond the vocabulary": {"top_k": 500},
    "top_p 0.1": {"top_p": 0.1},
    "top_p 0.7": {"top_p": 0.7},
    "top_p 0.97": {"top_p": 0.97},
    "min_p 0.15": {"min_p": 0.15},
    "min_p 1": {"min_p": 1.0},
    "top_k and top_p": {"top_k": 6, "top_p": 0.8},
    "top_p and min_p": {"top_p": 0.9, "min_p": 0.3, "temperature": 1.5},
    "all three": {"top_k": 8, "top_p": 0.95, "min_p": 0.12, "temperature": 0.8},
    "logit bias": {"logit_bias": {9: 2.5, 0: -1.0}},
    "a bias that forbids and one that forces": {"logit_bias": {0: -100.0, 1: -100.0, 7: 2.0}},
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler_without_history(name: str) -> None:
    row = params(**SAMPLERS[name])
    got = draws(torch.tensor(LOGITS), row, NUM_DRAWS)
    want = expected(LOGITS, row, (), ())
    if name.startswith("a bias that forbids"):  # e**-100 is possible, in principle
        want = want.where(want > 1e-20, 0.0)
    assert p_value(got, want) > 1e-4


PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.8},
    "repetition below 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": 0.4},
    "frequency below 0": {"frequency_penalty": -0.4},
    "all penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    },
    "min_tokens": {"min_tokens": 5, "stop_token_ids": [0, 2]},
    "min_tokens reached": {"min_tokens": 4, "stop_token_ids": [0, 2]},
    "everything": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "temperature": 0.9,
        "top_k": 9,
        "top_p": 0.96,
        "min_p": 0.05,
        "logit_bias": {10: 1.5},
        "min_tokens": 9,
        "stop_token_ids": [3],
    },
}


@pytest.mark.parametrize("num", [8_000, *slow(NUM_DRAWS)])
@pytest.mark.parametrize("name", PENALTIES)
def test_sampler_with_history(name: str, num: int) -> None:
    """Each draw is another seed at the position after prompt and output."""
    prompt, output = [4, 5, 11, 5], [0, 1, 0, 8]
    rows = [params(**PENALTIES[name] | {"seed": seed}) for seed in range(num)]
    counts = PenaltyCounts(len(LOGITS), upload)
    made = open_rows([(row, prompt, output) for row in rows], counts)
    positions = np.full(num, len(prompt) + len(output))
    logits = torch.tensor(LOGITS).expand(num, -1)
    batch = build_batch(made, len(LOGITS), upload)
    tokens = sample(logits, batch, upload(positions), positions, counts).token_ids_R
    got = torch.bincount(tokens, minlength=len(LOGITS))
    assert p_value(got, expected(LOGITS, rows[0], prompt, output)) > 1e-4


def test_a_wrong_distribution_would_be_noticed() -> None:
    got = draws(torch.tensor(LOGITS), params(temperature=1.0), NUM_DRAWS)
    assert p_value(got, expected(LOGITS, params(temperature=1.1), (), ())) < 1e-4
    assert p_value(got, expected(LOGITS, params(logit_bias={0: 0.15}), (), ())) < 1e-4
