"""Is what comes out of steps with drafts drawn by the law of plain sampling, exactly?

The joint law of three tokens is written down by enumeration, and whole chains of drafts and checks
are held against it: chi-square, names of requests as seeds, p > 1e-4. Mutants of the rule must fail
the very same test.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgeline.kernels import noise
from ridgeline.kernels import verified_rows as rule
from ridgeline.request import SamplingParams
from ridgeline.sampling import sampler
from ridgeline.speculation import verify
from tests.speculation import table_models
from tests.speculation.table_models import (
    DraftRunner,
    Samples,
    Step,
    captured_step,
    chosen,
    drafted,
    exact_law,
    general_step,
    p_value,
    tables,
)
from tests.thinning import slow

NUM_SAMPLES = 6_000
LIMIT = 1e-4

GENERAL: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 1.5": {"temperature": 1.5},
    "top_p 0.7": {"top_p": 0.7},
    "top_k 3": {"top_k": 3},
    "min_p 0.2": {"min_p": 0.2},
    "all filters": {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
    "repetition": {"repetition_penalty": 2.0},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.2},
    "logit bias": {"logit_bias": {0: 1.0, 3: -1.5}},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": [0, 2]},
    "everything": {
        "temperature": 0.8,
        "top_k": 4,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {1: 0.5},
        "min_tokens": 1,
        "stop_token_ids": [2],
    },
}
TEMPERATURES = {name: GENERAL[name] for name in list(GENERAL)[:3]}
QUICK = {"temperature 1.5": (3,), "everything": (2,), "repetition": (4,), "min_tokens": (3,)}


def measured(
    changes: dict[str, Any],
    step: Step,
    ks: tuple[int, ...],
    num: int,
    seed: int = 4,
    likeness: float = 0.5,
) -> float:
    """The p-value of `num` samples; the vocabulary has 5 tokens."""
    models, params = tables(5, seed, likeness=likeness), SamplingParams(**changes)
    samples = Samples(models, params, num)
    p = p_value(samples.histogram(step, ks), exact_law(models, params))
    mean = float(torch.stack(samples.num_emitted).double().mean())
    print(f"{changes} ks={ks} samples={num} tables={seed}: p={p:.3g}, {mean:.2f} tokens a step")
    return p


@pytest.mark.parametrize("name", QUICK)
def test_any_parameters_keep_the_law(name: str) -> None:
    assert measured(GENERAL[name], general_step(), QUICK[name], NUM_SAMPLES) > LIMIT


@pytest.mark.parametrize("k", [2, 4])
def test_temperatures_in_a_captured_step_keep_the_law(k: int) -> None:
    assert measured({"temperature": 0.5 * k}, captured_step(), (k,), 3 * NUM_SAMPLES) > LIMIT


def test_drafts_of_any_number_keep_the_law() -> None:
    assert measured({}, captured_step(), (3, 0, 1, 2), 3 * NUM_SAMPLES) > LIMIT


def test_chosen_drafts_keep_the_law() -> None:
    assert measured({"top_p": 0.9}, general_step(chosen), (3,), NUM_SAMPLES) > LIMIT
    assert measured({}, captured_step(chosen), (3,), NUM_SAMPLES) > LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("drafter", [drafted, chosen])
@pytest.mark.parametrize("name", GENERAL)
def test_each_parameter_keeps_the_law(name: str, drafter: DraftRunner, k: int) -> None:
    p = measured(GENERAL[name], general_step(drafter), (k,), 4 * NUM_SAMPLES, seed=k)
    assert p > LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", TEMPERATURES)
def test_captured_steps_keep_the_law_of_any_tables(name: str, seed: int) -> None:
    ks = ((2,), (3,), (4,), (1, 3), (4, 0, 2), (9,))[seed]
    p = measured(TEMPERATURES[name], captured_step(), ks, 20 * NUM_SAMPLES, seed=seed)
    assert p > LIMIT


@pytest.mark.parametrize("likeness", [0.0, 1.0])
def test_a_draft_that_knows_nothing_and_one_that_knows_all(likeness: float) -> None:
    models, params = tables(8, 3, likeness=likeness, sharpness=3.0), SamplingParams()
    samples = Samples(models, params, 2 * NUM_SAMPLES)
    p = p_value(samples.histogram(captured_step(), (3,)), exact_law(models, params))
    print(f"likeness {likeness}: p={p:.3g}")
    assert p > LIMIT
    if likeness == 1:  # each draft is kept, up to the rounding of p and q
        assert all(int((num_N < 4).sum()) <= 2 for num_N in samples.num_emitted)


# ------------------------------------------------------------------- rules that are not quite right

MUTANTS = (
    "each draft is kept",
    "no draft is kept, and the rest drawn in its place",
    "p over q turned round",
    "what is left after a draft is not taken off",
    "the coin is used again in place of the draft",
    "the draft's noise is used again in place of the draft",
    "the draft knows the coin",
    "the draft knows the request's own noise, and so the coin does",
    "odds of the draft before",
    "odds of the row before",
    "a bonus token from the draft",
    "the draft's odds at another temperature",
    "one noise for all positions of a run",
    "the walk goes a token too far",
)


def break_it(monkeypatch: pytest.MonkeyPatch, mutant: str) -> Step:
    """A step that is wrong in this way."""
    right = rule.odds_draw
    drafter: DraftRunner = drafted

    def patched(function: Any) -> None:
        monkeypatch.setattr(rule, "odds_draw", function)
        monkeypatch.setattr(verify, "odds_draw", function)

    match mutant:
        case "each draft is kept":
            monkeypatch.setattr(rule, "coins", lambda keys, at: torch.zeros(len(keys)))
        case "no draft is kept, and the rest drawn in its place":
            monkeypatch.setattr(rule, "coins", lambda keys, at: torch.full((len(keys),), torch.inf))
        case "p over q turned round":

            def turned(p: Any, q: Any, draft_tokens: Any, keys: Any, at: Any, **more: Any) -> Any:
                kept = noise.coins(keys, at) * p.softmax(-1).gather(1, draft_tokens[:, None])[:, 0]
                is_kept = kept < q.softmax(-1).gather(1, draft_tokens[:, None])[:, 0]
                ids, is_decided = right(p, q, draft_tokens, keys, at, **more)
                return draft_tokens.where(is_kept, ids), is_decided

            patched(turned)
        case "what is left after a draft is not taken off":

            def whole(p: Any, q: Any, draft_tokens: Any, keys: Any, at: Any, **more: Any) -> Any:
                some = p - noise.minus_gumbel(noise.rest_keys(keys), at, p.shape[1])
                p_O, q_O = (x.softmax(-1).gather(1, draft_tokens[:, None])[:, 0] for x in (p, q))
                is_kept = noise.coins(keys, at) * q_O < p_O
                return draft_tokens.where(is_kept, some.argmax(-1)), torch.ones_like(is_kept)

            patched(whole)
        case "the coin is used again in place of the draft":
            monkeypatch.setattr(rule, "rest_keys", lambda keys: keys ^ noise._COINS)
        case "the draft's noise is used again in place of the draft":
            monkeypatch.setattr(rule, "rest_keys", lambda keys: keys ^ noise._DRAFTS)
        case "the draft knows the coin":
            monkeypatch.setattr(
                table_models, "draft_keys", lambda keys, is_seeded: keys ^ noise._COINS
            )
        case "the draft knows the request's own noise, and so the coin does":
            monkeypatch.setattr(table_models, "draft_keys", lambda keys, is_seeded: keys)
            monkeypatch.setattr(
                rule, "coins", lambda keys, at: noise.uniforms(keys, at, 1).squeeze(1)
            )
        case "odds of the draft before":
            drafter = _with_odds(lambda logits: logits.roll(1, 1))
        case "odds of the row before":
            drafter = _with_odds(lambda logits: logits.roll(1, 0))
        case "the draft's odds at another temperature":
            drafter = _with_odds(lambda logits: logits * 1.5)
        case "one noise for all positions of a run":
            monkeypatch.setattr(
                table_models,
                "_positions",
                lambda samples, k: samples.lens_N.repeat_interleave(k + 1),
            )
        case "the walk goes a token too far":
            return _one_too_far
        case "a bonus token from the draft":
            return _bonus_of_the_draft
    return captured_step(drafter, is_reference=True)


def _with_odds(change: Any) -> DraftRunner:
    def drafter(samples: Samples, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        drafts_Nk, logits = drafted(samples, k)
        return drafts_Nk, change(logits)

    return drafter


def _bonus_of_the_draft(samples: Samples, k: int) -> None:
    """One draft more, which nobody checks."""
    more_Nk, _ = drafted(samples, k + 1)
    right = Samples.accept

    class Skewed(Samples):
        def accept(self, ids_Nq: torch.Tensor, drafts_Nk: torch.Tensor) -> None:
            right(self, torch.cat([ids_Nq[:, :-1], more_Nk[:, -1:]], 1), drafts_Nk)

    samples.__class__ = Skewed
    captured_step()(samples, k)
    samples.__class__ = Samples


def _one_too_far(samples: Samples, k: int) -> None:
    right = Samples.accept

    class Eager(Samples):
        def accept(self, ids_Nq: torch.Tensor, drafts_Nk: torch.Tensor) -> None:
            """The first draft counts as right, but its token is the one that came out."""
            believed_Nk = torch.cat([ids_Nq[:, :1], drafts_Nk[:, 1:]], 1)
            right(self, ids_Nq, believed_Nk)

    samples.__class__ = Eager
    captured_step(is_reference=True)(samples, k)
    samples.__class__ = Samples


@pytest.mark.parametrize("mutant", [*MUTANTS[::2], *slow(*MUTANTS[1::2])])
def test_a_rule_that_is_not_quite_right_is_noticed(
    monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    step = break_it(monkeypatch, mutant)
    assert measured({}, step, (2,), 3 * NUM_SAMPLES, likeness=0.2) < LIMIT


def test_the_same_amount_does_not_accuse_the_right_rule() -> None:
    for is_reference in (True, False):
        step = captured_step(is_reference=is_reference)
        assert measured({}, step, (2,), 3 * NUM_SAMPLES, likeness=0.2) > LIMIT
    assert measured({}, general_step(), (2,), NUM_SAMPLES, likeness=0.2) > LIMIT


@pytest.mark.parametrize("name", ["repetition", "presence", *slow("frequency")])
def test_penalties_that_do_not_see_the_drafts_are_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def blind(counts_CV: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return counts_CV

    assert measured(GENERAL[name], general_step(), (3,), NUM_SAMPLES) > LIMIT
    monkeypatch.setattr(sampler, "with_drafts", blind)
    assert measured(GENERAL[name], general_step(), (3,), NUM_SAMPLES) < LIMIT


def test_penalties_that_see_a_draft_too_many_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = verify._drafts_before

    def one_more(rows: Any, num_draft_tokens: Any, firsts: Any) -> Any:
        return _shifted(right(rows, num_draft_tokens, firsts), firsts)

    monkeypatch.setattr(verify, "_drafts_before", one_more)
    assert measured(GENERAL["presence"], general_step(), (3,), NUM_SAMPLES) < LIMIT


def _shifted(before: Any, firsts: Any) -> Any:
    """Each position has the drafts of the one behind it."""
    shifted = before.copy()
    shifted[:-1] = before[1:]
    shifted[[first - 1 for first in firsts[1:]]] = before[[first - 1 for first in firsts[1:]]]
    return shifted
