"""Does a checked run give each position the token it should have, whoever is beside it?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.errors import InternalError
from ridgeline.kernels.draw_rows import Draws, draw_rows
from ridgeline.kernels.noise import draft_keys, stream_key, uniforms
from ridgeline.kernels.verified_rows import (
    DraftOdds,
    odds_draw,
    verified_rows,
    verified_rows_reference,
)
from ridgeline.request import SamplingParams
from ridgeline.sampling import batch as pieces
from ridgeline.sampling.batch import build_batch
from ridgeline.sampling.penalties import PenaltyCounts
from ridgeline.sampling.row import SamplingRow
from ridgeline.sampling.sampler import sample
from ridgeline.speculation.verify import (
    VerifiedRun,
    build_run,
    is_verified_by_odds,
    verify_run,
)
from tests.sampling.build import batch_of, open_rows, p_value, params, upload
from tests.speculation.acceptance_law import emitted
from tests.speculation.table_models import (
    DraftRunner,
    Samples,
    captured_step,
    chosen,
    drafted,
    general_step,
    tables,
)

ALIKE: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "seed": None},
    "greedy with penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.7,
        "frequency_penalty": 0.6,
        "seed": None,
    },
    "seeded": {},
    "seeded, filters": {"temperature": 1.4, "top_p": 0.8, "top_k": 5, "min_p": 0.05},
    "seeded, penalties": {"presence_penalty": 1.0, "repetition_penalty": 1.4},
    "seeded, min_tokens": {"min_tokens": 2, "stop_token_ids": [0, 1]},
}


@pytest.mark.parametrize("drafter", [drafted, chosen])
@pytest.mark.parametrize("name", ALIKE)
def test_drafts_never_change_a_greedy_or_seeded_answer(name: str, drafter: DraftRunner) -> None:
    num_right = 0
    for seed in range(11, 17):
        samples, step = Samples(tables(7, seed), params(**ALIKE[name]), 40), general_step(drafter)
        plain = samples.run(step, (0,))
        for ks in ((1,), (2,), (4,), (3, 0, 1)):
            assert torch.equal(samples.run(step, ks), plain), (seed, ks)
            num_right += int((torch.stack(samples.num_emitted) - 1).sum())
    assert drafter is chosen or num_right > 0


@pytest.mark.parametrize("drafter", [drafted, chosen])
@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_the_same_in_captured_steps(name: str, drafter: DraftRunner) -> None:
    samples = Samples(tables(7, 12), params(**ALIKE[name]), 200)
    plain = samples.run(general_step(), (0,))
    for ks in ((0,), (1,), (4,), (3, 0, 1)):
        assert torch.equal(samples.run(captured_step(drafter), ks), plain), ks


def test_a_seeded_draft_agrees_more_often_with_the_requests_own_noise() -> None:
    models = tables(7, 13, likeness=0.8)

    def tokens_a_step(seed: int | None) -> float:
        samples = Samples(models, params(seed=seed), 2_000)
        samples.run(captured_step(), (3,))
        return float(torch.stack(samples.num_emitted).double().mean())

    assert tokens_a_step(None) > tokens_a_step(5) > 1.8  # a coin keeps as many as can be kept


def test_each_step_gives_one_token_more_than_it_accepts() -> None:
    models = tables(6, 14, likeness=1.0)
    samples = Samples(models, params(temperature=0.0), 50)
    samples.run(general_step(), (4,))
    assert samples.num_emitted[0].tolist() == [5] * 50


# ------------------------------------------------------------------------------ rows side by side


def _mixed_rows(counts: PenaltyCounts) -> list[SamplingRow]:
    wanted = [
        SamplingParams(temperature=0.0),
        params(seed=3, top_p=0.9),
        SamplingParams(temperature=0.9),
        params(seed=4, presence_penalty=1.5, repetition_penalty=1.2),
        SamplingParams(frequency_penalty=0.8, top_k=6),
        SamplingParams(
            temperature=0.0, min_tokens=5, stop_token_ids=[1, 2, 3], logit_bias={4: 2.0}
        ),
    ]
    return open_rows([(row, (1, 2, 3), (4, 4)) for row in wanted], counts)


def _alone(
    row: SamplingRow,
    logits_V: torch.Tensor,
    position: int,
    counts: PenaltyCounts,
    before: Sequence[int],
) -> int:
    """The token of plain sampling, with these drafts counted as tokens."""
    copy = PenaltyCounts(counts.vocab_size, upload, 1)
    if row.counts_slot >= 0:
        slot = copy.open(np.zeros(0, np.int64), np.array(before, np.int64))
        copy.counts_PV[slot] += counts.counts_PV[row.counts_slot]
        copy.prompt_PV[slot] = counts.prompt_PV[row.counts_slot]
        row = replace(row, counts_slot=slot)
    batch = build_batch([row], len(logits_V), upload)
    at = np.array([position])
    return int(sample(logits_V[None], batch, upload(at), at, copy).token_ids_R)


def test_rows_with_any_numbers_of_drafts_are_sampled_as_if_alone() -> None:
    size, num_draft_tokens = 12, [2, 0, 3, 3, 1, 4]
    counts = PenaltyCounts(size, upload)
    rows = _mixed_rows(counts)
    run = build_run(rows, num_draft_tokens, size, upload)
    assert run.firsts == (0, 3, 4, 8, 12, 14, 19)
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(19, size, generator=rng) * 2
    draft_tokens = torch.randint(size, (19,), generator=rng)
    positions = torch.tensor([5 + j for num in num_draft_tokens for j in range(num + 1)])
    old_counts, old_logits = counts.counts_PV.clone(), logits.clone()
    ids = verify_run(logits, VerifiedRun(run, positions, draft_tokens), counts).token_ids_R
    for i, row in enumerate(rows):
        first = run.firsts[i]
        for j in range(num_draft_tokens[i] + 1):
            before = draft_tokens[first : first + j].tolist()
            want = _alone(row, logits[first + j], 5 + j, counts, before)
            assert int(ids[first + j]) == want, (i, j)
    assert torch.equal(counts.counts_PV, old_counts), "a draft has left a trace"
    assert torch.equal(logits, old_logits)


def test_only_random_rows_without_a_seed_are_checked_by_odds() -> None:
    size, num_draft_tokens = 12, [2, 0, 3, 3, 1, 4]
    counts = PenaltyCounts(size, upload)
    rows = _mixed_rows(counts)
    assert [is_verified_by_odds(row) for row in rows] == [False, False, True, False, True, False]
    run = build_run(rows, num_draft_tokens, size, upload)
    assert run.odds is not None
    assert run.odds.rows_O.tolist() == [4, 5, 6, 12]
    assert run.odds.requests_O.tolist() == [1, 1, 1, 3]  # the second request has no drafts
    assert run.odds.drafts_O.tolist() == [0, 1, 2, 0]


def test_drawn_drafts_change_checked_rows_alone() -> None:
    size, num_draft_tokens = 12, [2, 0, 3, 3, 1, 4]
    counts = PenaltyCounts(size, upload)
    run = build_run(_mixed_rows(counts), num_draft_tokens, size, upload)
    rng = torch.Generator().manual_seed(2)
    logits = torch.randn(19, size, generator=rng)
    positions = torch.arange(19)
    without = VerifiedRun(run, positions, torch.full((19,), 7))
    plain = verify_run(logits, without, counts).token_ids_R
    surely_7 = torch.full((5, 4, size), -50.0)  # whose odds of 7 are so low that it is kept
    surely_7[..., 0] = 0.0
    with_odds = replace(without, draft_logits_GkV=surely_7)
    ids = verify_run(logits.index_fill(1, torch.tensor(7), 5.0), with_odds, counts).token_ids_R
    again = verify_run(logits.index_fill(1, torch.tensor(7), 5.0), without, counts).token_ids_R
    is_verified = torch.zeros(19, dtype=torch.bool)
    is_verified[[4, 5, 6, 12]] = True
    assert ids[is_verified].tolist() == [7] * 4
    assert torch.equal(ids[~is_verified], again[~is_verified])
    assert plain.shape == (19,)


def test_many_rows_are_checked_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    size, num = 64, 40
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(num * 3, size, generator=rng)
    draft_logits = torch.randn(num, 2, size, generator=rng)
    draft_tokens = torch.randint(size, (num * 3,), generator=rng)
    wanted = [(SamplingParams(presence_penalty=0.5, top_p=0.95), (1, 2), (3,))] * num
    counts = PenaltyCounts(size, upload)
    run = build_run(open_rows(wanted, counts), [2] * num, size, upload)
    step = VerifiedRun(run, torch.arange(num * 3), draft_tokens, draft_logits)
    whole = verify_run(logits, step, counts).token_ids_R
    monkeypatch.setitem(pieces.NUMBERS_AT_ONCE, "cpu", 7 * size)
    assert torch.equal(verify_run(logits, step, counts).token_ids_R, whole)


# ------------------------------------------------------------------------------- numbers gone wrong


def _odds(
    p: Sequence[float], q: Sequence[float], draft_token: int, num: int = 400
) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.tensor([stream_key(seed) for seed in range(num)])
    p_OV, q_OV = (torch.tensor(x).log().expand(num, -1) for x in (p, q))
    return odds_draw(p_OV, q_OV, torch.full((num,), draft_token), keys, torch.full((num,), 9))


def test_nothing_is_decided_without_a_draft_or_with_odds_that_are_not_numbers() -> None:
    nan = float("nan")
    assert not _odds([0.5, 0.5], [0.3, 0.7], -1)[1].any()
    assert not _odds([0.5, 0.5], [nan, 0.7], 1)[1].any()
    assert not _odds([0.5, 0.5], [nan, 0.7], 0)[1].any()
    assert not _odds([nan, 0.5], [0.3, 0.7], 0)[1].any()
    assert not _odds([0.0, 0.0], [0.3, 0.7], 0)[1].any()


def test_a_draft_with_the_targets_own_odds_is_always_kept() -> None:
    ids, is_decided = _odds([0.25, 0.5, 0.25], [0.25, 0.5, 0.25], 2)
    assert bool(is_decided.all())
    assert ids.tolist() == [2] * 400


def test_a_draft_that_cannot_be_drawn_is_never_kept() -> None:
    ids, is_decided = _odds([0.4, 0.6, 0.0], [0.1, 0.3, 0.6], 2)
    assert bool(is_decided.all())
    assert set(ids.tolist()) == {0, 1}


def test_rows_gone_wrong_are_not_sound_and_have_a_valid_token() -> None:
    bad = torch.tensor([[0.0, torch.nan, 1.0], [1.0, 2.0, torch.inf], [-torch.inf] * 3])
    draws = Draws(torch.arange(3), torch.ones(3), torch.ones(3))
    odds = DraftOdds(
        torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, 3), torch.tensor([True])
    )
    for ids, is_sound in (
        verified_rows_reference(bad, torch.arange(3), draws, odds),
        (x[:1] for x in verified_rows(bad, torch.arange(3), draws, odds)),
    ):
        assert not is_sound.any()
        assert not ids.any()
    run = build_run([batch_row() for _ in range(1)], [2], 3, upload)
    sampled = verify_run(
        bad, VerifiedRun(run, torch.arange(3), torch.tensor([1, 1, 0]), torch.zeros(1, 2, 3))
    )
    assert not sampled.is_sound_R.any()
    assert bool((sampled.token_ids_R < 3).all())


def batch_row() -> SamplingRow:
    return open_rows([(SamplingParams(), (), ())], PenaltyCounts(3, upload))[0]


def test_a_draft_whose_numbers_went_wrong_leaves_plain_sampling() -> None:
    rng = torch.Generator().manual_seed(4)
    logits, keys = torch.randn(12, 9, generator=rng), torch.arange(12) * 7919
    draws = Draws(keys, torch.ones(12), torch.ones(12))
    draft_logits = torch.full((4, 2, 9), torch.nan)
    odds = DraftOdds(torch.zeros(4, 2, dtype=torch.int64), draft_logits, torch.ones(4).bool())
    plain, _ = draw_rows(logits, torch.arange(12), draws)
    ids, is_sound = verified_rows_reference(logits, torch.arange(12), draws, odds)
    assert torch.equal(ids, plain)
    assert bool(is_sound.all())
    ids, is_sound = verified_rows(logits, torch.arange(12), draws, odds)
    assert torch.equal(ids[::3], plain[::3])
    assert bool(is_sound.all())


# -------------------------------------------------------------------------------- captured steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_not_checked_are_drawn_as_ever(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(5)
    logits = torch.randn(5 * 4, 300, generator=rng).mul_(3).to(dtype)
    draft_logits = torch.randn(5, 3, 300, generator=rng).mul_(3).to(dtype)
    positions = torch.arange(20)
    noisy = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]).repeat_interleave(4)
    draws = Draws(torch.arange(20) // 4 * 7919, torch.full((20,), 0.7), noisy)
    is_verified = torch.tensor([True, False, False, True, False])
    inputs = torch.randint(300, (5, 4), generator=rng)
    plain, _ = draw_rows(logits, positions, draws)
    inputs[1:3, 1:] = plain.view(5, 4)[1:3, :3]  # drafts that are right
    odds = DraftOdds(inputs[:, 1:], draft_logits, is_verified)
    ids, _ = verified_rows_reference(logits, positions, draws, odds)
    is_plain = ~is_verified.repeat_interleave(4)
    is_plain[3::4] = True  # behind the last draft
    assert torch.equal(ids[is_plain], plain[is_plain])
    assert not torch.equal(ids, plain)
    ids, _ = verified_rows(logits, positions, draws, odds)
    assert torch.equal(ids[4:12], plain[4:12])
    assert ids[16] == plain[16]
    assert torch.equal(verified_rows(logits, positions, draws, None)[0], plain)
    greedy = verified_rows(logits, positions, None, odds)[0]
    assert torch.equal(greedy, logits.float().argmax(-1))


def test_another_vocabulary_is_refused() -> None:
    draws = Draws(torch.zeros(2).long(), torch.ones(2), torch.ones(2))
    odds = DraftOdds(torch.zeros(1, 1).long(), torch.zeros(1, 1, 8), torch.ones(1).bool())
    with pytest.raises(InternalError, match="one vocabulary"):
        verified_rows(torch.zeros(2, 9), torch.zeros(2).long(), draws, odds)
    with pytest.raises(InternalError, match="k \\+ 1 positions"):
        verified_rows(torch.zeros(3, 8), torch.zeros(3).long(), draws, odds)


def test_both_ways_agree_where_temperatures_are_all() -> None:
    models = tables(8, 15)
    for temperature in (1.0, 0.4):
        samples = Samples(models, SamplingParams(temperature=temperature), 500)
        general = samples.run(general_step(), (3,))
        assert float((samples.run(captured_step(), (3,)) == general).float().mean()) > 0.999


# ---------------------------------------------------------------------------- chosen or drawn


def test_for_a_chosen_draft_the_rule_is_the_plain_draw() -> None:
    """q is 1 at the draft: it is kept with probability p, and else p without it is drawn from."""
    p = (0.5, 0.2, 0.05, 0.25)
    one_hot = (0.0, 1.0, 0.0, 0.0)
    assert emitted(p, one_hot) == pytest.approx(p)
    num = 20_000
    by_odds, is_decided = _odds(p, one_hot, 1, num)
    keys = torch.tensor([stream_key(seed) for seed in range(num)])
    plain = draw_rows(
        torch.tensor(p).log().expand(num, -1),
        torch.full((num,), 9),
        Draws(keys, torch.ones(num), torch.ones(num)),
    )[0]
    assert bool(is_decided.all())
    for ids in (by_odds, plain):
        found = p_value(torch.bincount(ids, minlength=4), torch.tensor(p))
        print(f"p={found:.3g}")
        assert found > 1e-4


def test_what_comes_out_has_the_targets_odds() -> None:
    p, q = (0.6, 0.05, 0.3, 0.05), (0.2, 0.5, 0.2, 0.1)
    num = 20_000
    keys = torch.tensor([stream_key(seed) for seed in range(num)])
    is_seeded = torch.zeros(num, dtype=torch.bool)
    one, at = torch.ones(num), torch.full((num,), 3)
    q_OV, p_OV = (torch.tensor(x).log().expand(num, -1) for x in (q, p))
    draft_tokens, _ = draw_rows(q_OV, at, Draws(draft_keys(keys, is_seeded), one, one))
    ids, is_decided = odds_draw(p_OV, q_OV, draft_tokens, keys, at)
    found = p_value(torch.bincount(ids, minlength=4), torch.tensor(p))
    kept = float((ids == draft_tokens).float().mean())
    print(f"p={found:.3g}, kept {kept:.3f}")
    assert bool(is_decided.all())
    assert found > 1e-4
    assert kept == pytest.approx(0.5, abs=0.02)  # the overlap of p and q


# ------------------------------------------------------------------------ noise, counts, masks


def test_seeded_drafts_share_their_requests_noise_and_others_do_not() -> None:
    keys = torch.tensor([5, -6, 7])
    got = draft_keys(keys, torch.tensor([True, False, False]))
    assert got[0] == 5
    assert not torch.equal(got[1:], keys[1:])
    at = torch.zeros(3, dtype=torch.int64)
    assert not torch.equal(uniforms(got, at, 4)[1:], uniforms(keys, at, 4)[1:])


def test_tokens_of_a_run_are_counted_up_to_its_end() -> None:
    counts = PenaltyCounts(5, upload)
    slots = [counts.open(np.array([1]), np.array([2])) for _ in range(3)]
    given = torch.tensor([[3, 3, 4], [2, -1, -1], [-1, -1, -1]])
    counts.add_run(torch.tensor(slots), given)
    rows = [counts.counts_PV[slot].tolist() for slot in slots]
    assert rows == [[0, 0, 1, 2, 1], [0, 0, 2, 0, 0], [0, 0, 1, 0, 0]]


def test_a_mask_takes_tokens_out_before_anything_else() -> None:
    logits = torch.tensor([[5.0, 1.0, 0.0, 4.0], [0.0, 0.0, 9.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    allowed = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
    rows = [
        SamplingParams(temperature=0.0, logit_bias={0: 50.0}),
        SamplingParams(top_k=2),
        SamplingParams(),
    ]
    batch, at = batch_of(rows, 4), np.arange(3)
    got = sample(logits, batch, upload(at), at, allowed_RV=allowed)
    assert int(got.token_ids_R[0]) == 1
    assert int(got.token_ids_R[1]) in (0, 1, 3)
    assert got.is_sound_R.tolist() == [True, True, False]
    assert logits[0, 0] == 5.0


def test_a_mask_holds_in_a_checked_run_too() -> None:
    num, size = 500, 6
    rows = open_rows([(SamplingParams(), (), ())] * 1, PenaltyCounts(size, upload)) * num
    run = build_run(rows, [1] * num, size, upload)
    allowed = torch.zeros(num * 2, size, dtype=torch.bool)
    allowed[:, 2:4] = True
    rng = torch.Generator().manual_seed(6)
    step = VerifiedRun(
        run,
        torch.arange(num * 2),
        torch.randint(size, (num * 2,), generator=rng),
        torch.randn(num, 1, size, generator=rng),
        allowed,
    )
    ids = verify_run(torch.randn(num * 2, size, generator=rng), step).token_ids_R
    assert set(ids.tolist()) == {2, 3}


def test_bans_are_asked_of_the_device_where_the_host_knows_no_position() -> None:
    row = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=[0])
    run = build_run(open_rows([(row, (1, 1), ())], PenaltyCounts(4, upload)), [3], 4, upload)
    logits = torch.tensor([9.0, 1.0, 2.0, 3.0]).expand(4, -1)
    ids = verify_run(logits, VerifiedRun(run, torch.arange(3, 7), torch.full((4,), 3))).token_ids_R
    assert ids.tolist() == [3, 3, 0, 0]


def test_one_number_of_drafts_for_each_request() -> None:
    with pytest.raises(InternalError, match="drafts of each request"):
        build_run([batch_row()], [1, 2], 3, upload)
