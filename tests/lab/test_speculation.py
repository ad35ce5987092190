"""Are gains those of the formula, and is the tape of the bundled pair the engine's answer?"""

from __future__ import annotations

from itertools import product, takewhile
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.errors import RequestFault
from ridgeline.lab.page import Answer, read_inputs
from ridgeline.lab.pages.speculation import PAGE, Drawing
from ridgeline.lab.tape import REAL


def answered(**inputs: Any) -> Answer[Drawing]:
    *progress, last = PAGE.answer(read_inputs(PAGE, inputs))  # type: ignore[misc]
    assert progress == sorted(progress)
    assert isinstance(last, Answer)
    return last


def by_enumeration(acceptance: float, k: int) -> float:
    """Tokens of a step, over all ways in which k coins can fall."""
    mean = 0.0
    for coins in product((True, False), repeat=k):
        chance = 1.0
        for coin in coins:
            chance *= acceptance if coin else 1 - acceptance
        right = coins.index(False) if False in coins else k
        mean += chance * (right + 1)
    return mean


@pytest.mark.parametrize(
    ("acceptance", "cost", "k", "tokens", "speedup"),
    [(0.8, 0.05, 8, 4.329, 3.092), (0.7, 0.07, 5, 2.941, 2.179)],
)
def test_the_best_number_of_drafts_of_the_texts(
    acceptance: float, cost: float, k: int, tokens: float, speedup: float
) -> None:
    """The texts say "5 to 7" and "3.3 times"; the formula says 8 and 3.09, and 5 and 2.18."""
    found = answered(acceptance=acceptance, draft_cost=cost, num_drafts=k)
    best = found.drawing.curve[found.drawing.best_simple]
    assert best.num_drafts == k
    assert (best.tokens, best.simple) == pytest.approx((tokens, speedup), abs=5e-4)
    assert found.guess is not None
    assert found.guess.value == k


def test_the_curve_is_flat_around_its_best() -> None:
    curve = answered().drawing.curve
    rates = [curve[k].simple for k in (5, 6, 7, 8, 9)]
    assert rates == pytest.approx([2.951, 3.040, 3.082, 3.092, 3.078], abs=5e-4)


@pytest.mark.parametrize(("acceptance", "k"), [(0.0, 3), (0.35, 4), (0.8, 6), (1.0, 5)])
def test_tokens_of_a_step(acceptance: float, k: int) -> None:
    found = answered(acceptance=acceptance, num_drafts=k).drawing
    assert found.curve[k].tokens == pytest.approx(by_enumeration(acceptance, k))
    assert found.tape_mean == pytest.approx(by_enumeration(acceptance, k), rel=0.08)
    assert all(0 <= step.num_right <= step.num_drafts == k for step in found.steps)


def test_gains_shrink_as_the_batch_grows() -> None:
    """And for one request the two forms are near each other where the device waits for memory."""
    found = answered(draft_cost=0.04).drawing
    gains = [row[best] for row, best in zip(found.surface, found.best, strict=True)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 2.5
    assert gains[-1] < 0.7 * gains[0]
    assert found.best[0] > found.best[-1]
    assert found.surface[0][4] == pytest.approx(found.curve[4].simple, rel=0.1)
    assert [row[0] for row in found.surface] == pytest.approx([1.0] * len(found.batches))


def test_a_draft_that_is_never_right_does_not_pay() -> None:
    found = answered(acceptance=0.0, batch=8)
    assert set(found.drawing.best) == {0}
    assert found.drawing.best_simple == 0
    assert "no number of drafts pays" in found.sentence


def test_a_rejected_draft_throws_away_all_behind_it() -> None:
    """And nothing else: the other steps have the same coins."""
    before = answered(acceptance=0.9, num_drafts=6).drawing.steps
    step = next(i for i, one in enumerate(before) if one.num_right > 3)
    found = answered(acceptance=0.9, num_drafts=6, rejected=f"{step}:2,{step + 1}:6")
    after = found.drawing.steps
    assert (after[step].num_right, after[step].rejected) == (2, 2)
    assert after[:step] + after[step + 1 :] == before[:step] + before[step + 1 :]
    (lost,) = (one.value for one in found.figures if one.name == "right drafts that you rejected")
    assert lost == before[step].num_right - 2
    for bad in ("2", "a:b", "-1:0"):
        with pytest.raises(RequestFault, match=r"rejected is .* it has places such as 2:1,5:0"):
            answered(rejected=bad)


def test_rejecting_drafts_of_the_bundled_pair_changes_no_text() -> None:
    """Greedy: the model puts the token there that the draft had, and more steps follow. Only where
    two tokens are as good as equal may rounding choose the other one."""
    prompt = "Tell me a story about a cat."
    asked = {"source": REAL, "num_drafts": 3, "prompt": prompt}
    plain = answered(**asked).drawing
    kept = next(i for i, one in enumerate(plain.steps) if one.num_right == 3)
    found = answered(**asked, rejected=f"{kept}:0").drawing
    step = found.steps[kept]
    assert (step.num_right, step.rejected) == (0, 0)
    assert step.tokens == plain.steps[kept].tokens[:1]
    assert found.by_position == plain.by_position
    llm = LLM(speculate="off", max_model_len=512, max_num_seqs=1)
    pairs = zip(f"{found.text} ", f"{plain.text} ", strict=False)
    begin = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    begin = begin.rpartition(" ")[0]
    assert len(begin) > 100
    if found.text != plain.text:
        ids = llm.encode_chat([{"role": "user", "content": prompt}]) + llm.encode(begin)
        best, second = llm.logits(ids)[-1].topk(2).values.tolist()
        assert best - second < 0.05


def test_the_real_tape_is_the_answer_that_comes_without_drafts() -> None:
    """Greedy: the same tokens, in fewer steps."""
    found = answered(source=REAL, num_drafts=3, prompt="Tell me a story about a cat.")
    plain = LLM(speculate="off", max_model_len=512, max_num_seqs=1).chat(
        [{"role": "user", "content": "Tell me a story about a cat."}],
        SamplingParams(max_tokens=96, temperature=0.0),
    )
    drawing = found.drawing
    assert drawing.text == plain.text
    assert "".join(token for step in drawing.steps for token in step.tokens).strip()[:40] in (
        plain.text
    )
    assert 0.3 < drawing.by_position[0] <= 1
    assert 1 < drawing.tape_mean <= 4
    assert all(len(step.tokens) <= step.num_right + 1 for step in drawing.steps)
