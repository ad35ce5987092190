from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.request import SamplingParams
from ridgeline.sampling.batch import NUMBERS_AT_ONCE, build_batch
from ridgeline.sampling.logprobs import records, token_logprobs
from ridgeline.sampling.penalties import PenaltyCounts
from ridgeline.sampling.row import Needs, sampling_row, seed_of
from ridgeline.sampling.sampler import sample
from tests.sampling.build import batch_of, open_rows, params, upload

VOCAB = 211


def random_row(rng: random.Random, seed: int) -> SamplingParams:
    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.4 else off

    return params(
        seed=seed,
        temperature=maybe(0.0, rng.choice([0.3, 1.0, 2.0])),
        top_k=maybe(rng.randint(1, 300), 0),
        top_p=maybe(rng.uniform(0.2, 0.99), 1.0),
        min_p=maybe(rng.uniform(0.01, 0.3), 0.0),
        repetition_penalty=maybe(1.4, 1.0),
        presence_penalty=maybe(0.7, 0.0),
        frequency_penalty=maybe(-0.3, 0.0),
        logit_bias=maybe({3: 2.0, 9: -50.0}, ()),
        min_tokens=maybe(9, 0),
        stop_token_ids=[4, 5],
    )


def test_a_row_draws_the_same_in_any_company() -> None:
    rng = random.Random(5)
    generator = torch.Generator().manual_seed(5)
    # Halves of integers make equal logits common, as 16-bit models do.
    logits = (torch.randn(40, VOCAB, generator=generator) * 6).round() / 2
    histories = [
        ([rng.randrange(VOCAB) for _ in range(8)], [rng.randrange(VOCAB) for _ in range(i % 13)])
        for i in range(40)
    ]
    rows = [random_row(rng, seed=i % 5) for i in range(40)]

    def tokens(order: list[int]) -> dict[int, int]:
        counts = PenaltyCounts(VOCAB, upload)
        made = open_rows([(rows[i], *histories[i]) for i in order], counts)
        positions = np.array([8 + i % 13 for i in order])
        batch = build_batch(made, VOCAB, upload)
        got = sample(logits[order], batch, upload(positions), positions, counts)
        return dict(zip(order, got.token_ids_R.tolist(), strict=True))

    alone: dict[int, int] = {}
    for i in range(40):
        alone |= tokens([i])
    for size in (40, 40, 17, 6, 2):
        order = rng.sample(range(40), size)
        assert tokens(order) == {i: alone[i] for i in order}


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, 5.0], [2.0, 2.0, 2.0, 2.0]])
    positions = np.array([3, 3])
    greedy, drawn = params(temperature=0.0), params(temperature=2.0)
    for rows in ([greedy, greedy], [greedy, greedy, drawn]):
        padded = torch.cat([logits, logits[:1]])[: len(rows)]
        at = np.full(len(rows), 3)
        got = sample(padded, batch_of(rows, 4), upload(at), at).token_ids_R
        assert got[:2].tolist() == [1, 0]
    del positions


def test_greedy_is_subject_to_bias_bans_and_penalties() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).expand(4, -1)
    counts = PenaltyCounts(4, upload)
    rows = [
        params(temperature=0.0, logit_bias={3: 5.0}),
        params(temperature=0.0, min_tokens=2, stop_token_ids=[0]),
        params(temperature=0.0, presence_penalty=2.0),
        params(temperature=0.0, top_k=1, top_p=0.1, min_p=1.0),
    ]
    made = open_rows([(row, [1], [0]) for row in rows], counts)
    positions = np.array([2, 2, 2, 2])
    batch = build_batch(made, 4, upload)
    got = sample(logits, batch, upload(positions), positions, counts)
    assert got.token_ids_R.tolist() == [3, 1, 1, 0]


def test_penalties_follow_the_tokens_that_come() -> None:
    counts = PenaltyCounts(3, upload)
    row = params(temperature=0.0, frequency_penalty=1.0)
    made = open_rows([(row, [0, 0], []), (row, [0], [])], counts)
    batch = build_batch(made, 3, upload)
    logits = torch.tensor([[2.5, 1.2, 0.0], [0.0, 0.5, 2.8]])
    out = []
    for step in range(4):
        positions = np.array([2 + step, 1 + step])
        got = sample(logits, batch, upload(positions), positions, counts).token_ids_R
        counts.add(torch.tensor([r.counts_slot for r in made]), got)
        out.append(got.tolist())
    assert out == [[0, 2], [0, 2], [1, 2], [0, 1]]


def test_count_rows_are_clean_when_used_again() -> None:
    counts = PenaltyCounts(5, upload)
    first = counts.open(np.array([1, 2]), np.array([3, 3]))
    assert counts.counts_PV[first].tolist() == [0, 0, 0, 2, 0]
    counts.close(first)
    again = counts.open(np.array([], np.int64), np.array([4]))
    assert again == first
    assert counts.counts_PV[again].tolist() == [0, 0, 0, 0, 1]
    assert not counts.prompt_PV[again].any()
    slots = {counts.open(np.array([0]), np.array([], np.int64)) for _ in range(20)}
    assert len(slots | {again}) == 21
    assert counts.counts_PV[again].tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("others", [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 3}, {}])
def test_a_bad_row_is_named_and_harms_no_other(bad: float, others: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, VOCAB, generator=generator)
    rows = [params(seed=i, **others) for i in range(5)]
    positions = np.arange(5)
    clean = sample(logits, batch_of(rows, VOCAB), upload(positions), positions)
    assert bool(clean.is_sound_R.all())
    logits[3, 100] = bad
    got = sample(logits, batch_of(rows, VOCAB), upload(positions), positions)
    assert got.is_sound_R.tolist() == [True, True, True, False, True]
    assert bool(((got.token_ids_R >= 0) & (got.token_ids_R < VOCAB)).all())
    keep = torch.tensor([0, 1, 2, 4])
    assert torch.equal(got.token_ids_R[keep], clean.token_ids_R[keep])


def test_a_row_with_every_token_banned_is_named() -> None:
    positions = np.array([0, 0])
    rows = [params(min_tokens=1, stop_token_ids=range(4)), params()]
    got = sample(torch.zeros(2, 4), batch_of(rows, 4), upload(positions), positions)
    assert got.is_sound_R.tolist() == [False, True]


def test_extreme_parameters_stay_sound() -> None:
    logits = torch.tensor([[3e38, -3e38, 1.0, 2.9e38]])
    positions = np.array([0])
    for case in (
        {"temperature": 1e-300},
        {"temperature": 1e-300, "top_p": 1e-300},
        {"temperature": 100.0, "min_p": 1.0},
        {"repetition_penalty": 1e-6, "temperature": 0.0},
        {"logit_bias": {0: 100.0, 77: 5.0}, "min_tokens": 1, "stop_token_ids": [999]},
    ):
        got = sample(logits, batch_of([params(**case)], 4), upload(positions), positions)
        assert got.token_ids_R.tolist() == [0]
        assert got.is_sound_R.tolist() == [True]


def test_plain_greedy_rows_need_no_tensors() -> None:
    batch = batch_of([params(temperature=0.0, top_k=5, top_p=0.3)] * 3, VOCAB)
    assert not batch.needs
    assert batch.filters is None
    only_temperature = batch_of([params(temperature=0.4)], VOCAB)
    assert only_temperature.needs == Needs.RANDOM


def test_a_request_without_a_seed_is_seeded_by_its_id() -> None:
    nameless = SamplingParams(seed=None)
    assert seed_of("a", nameless) == seed_of("a", nameless) != seed_of("b", nameless)
    assert seed_of("a", params(seed=-5)) == -5
    keys = {sampling_row(f"r{i}", nameless, 0).key for i in range(1000)}
    assert len(keys) == 1000


def test_logprobs_are_of_the_raw_logits() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(3, 20, generator=generator)
    ids = torch.tensor([int(logits[0].argmax()), 7, int(logits[2].argmin())])
    tensors = token_logprobs(logits, ids, 4)
    got = records(tensors, ids.tolist(), [4, 2, 0])
    table = logits.double().log_softmax(-1)
    for i, record in enumerate(got):
        order = table[i].argsort(descending=True).tolist()
        assert record.token_id == int(ids[i])
        assert record.logprob == pytest.approx(table[i, ids[i]].item(), abs=1e-5)
        assert record.rank == order.index(int(ids[i])) + 1
        assert [t for t, _ in record.top] == order[: (4, 2, 0)[i]]
    assert got[0].rank == 1
    assert got[2].rank == 20
    assert got[0].top[0] == (got[0].token_id, got[0].logprob)


def test_rows_handled_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(6)
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(6))
    rows = [random_row(rng, seed=i) for i in range(9)]
    histories = [[rng.randrange(VOCAB) for _ in range(12)] for _ in rows]
    positions, some = np.full(9, 12), torch.tensor([0, 2, 3, 5, 6, 8])

    def tokens() -> list[torch.Tensor]:
        counts = PenaltyCounts(VOCAB, upload)
        made = open_rows(
            [(row, h[:8], h[8:]) for row, h in zip(rows, histories, strict=True)], counts
        )
        batch = build_batch(made, VOCAB, upload)
        assert batch.needs & Needs.PENALTIES
        assert batch.needs & Needs.TOP_P
        ids = sample(logits, batch, upload(positions), positions, counts).token_ids_R
        every, few = token_logprobs(logits, ids, 3), token_logprobs(logits, ids[some], 3, some)
        assert torch.equal(few.ranks_L, every.ranks_L[some])
        return [ids, every.chosen_L, every.ranks_L, every.top_LK, every.top_ids_LK, few.chosen_L]

    raw, whole = logits.clone(), tokens()
    monkeypatch.setitem(NUMBERS_AT_ONCE, "cpu", 4 * VOCAB)
    for one, other in zip(tokens(), whole, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(logits, raw)
