"""Graded steps, against figures that were printed or worked out elsewhere."""

from __future__ import annotations

from math import exp

import pytest

from ridgeline.errors import RequestFault
from ridgeline.lab.page import Answer, read_inputs
from ridgeline.lab.pages.derivations import CHALLENGES, PAGE, Drawing, Inputs, Step, answer, grade


def ask(**values: object) -> Answer[Drawing]:
    inputs = read_inputs(PAGE, values)
    assert isinstance(inputs, Inputs)
    return answer(inputs)


def verdicts(challenge: str, *answers: object, **values: object) -> list[str]:
    text = f"{challenge}:" + ",".join(str(one) for one in answers)
    found = ask(challenge=challenge, answers=text, **values).drawing
    return [str(one.verdict) for one in found.steps][: len(answers)]


def test_the_cache_of_llama_3_70b() -> None:
    """320 KiB a token, 2.5 GiB at 8192, 141 GB of weights; nothing is left of 80 GB."""
    right = (2048, 320 * 1024, 2.684, 141.1, 0)
    assert verdicts("KV per token", *right, model="llama-3-70b") == ["right"] * 5
    # 64 heads instead of 8, and GiB: what texts print.
    known = verdicts("KV per token", 16384, 2621440, 21.47, model="llama-3-70b")
    assert known == ["well known"] * 3
    assert verdicts("KV per token", "", "", 2.5, model="llama-3-70b")[2] == "well known"


def test_a_latent_cache_is_counted_as_it_is() -> None:
    """DeepSeek-V3: (512 + 64) x 61 x 2 B = 70,272 B."""
    assert verdicts("KV per token", 576, 70272, model="deepseek-v3") == ["right"] * 2


def test_the_critical_batch_of_an_h100_and_an_a100() -> None:
    assert verdicts("critical batch", 2, 32, 295, 295, 10.8) == ["right"] * 5
    assert verdicts("critical batch", "", "", 591, 591)[2:] == ["well known"] * 2  # sparse
    assert verdicts("critical batch", "", "", 153, device="a100-80-sxm")[2] == "right"


def test_eight_drafts_are_best_and_the_curve_is_flat() -> None:
    right = (2.689, 3.689, 2.951, 8, 3.092)
    assert verdicts("draft length", *right) == ["right"] * 5
    assert verdicts("draft length", "", "", "", 6, 3.04)[3:] == ["wrong", "wrong"]


def test_a_text_s_speedup_of_3_3_is_known_and_2_18_is_right() -> None:
    other = {"acceptance": 0.7, "draft_cost": 0.07}
    assert verdicts("draft length", 1.941, 2.941, 2.18, 5, 2.179, **other) == ["right"] * 5
    assert verdicts("draft length", 3.5, 4.5, 3.33, **other) == ["well known"] * 3


def test_online_softmax_comes_to_the_softmax_of_the_whole_row() -> None:
    scores = (1.0, 3.0, 2.0, 5.0)
    weight = exp(5.0) / sum(exp(one) for one in scores)
    first, factor = exp(-2.0) + 1, exp(-2.0)
    right = (first, factor, first * factor + exp(-3.0) + 1, weight)
    assert verdicts("online softmax", *right) == ["right"] * 4
    assert verdicts("online softmax", exp(1) + exp(3), 1, "", 1) == [
        "well known", "well known", "open", "well known",
    ]  # fmt: skip


def test_tensor_parallel_pays_for_latency() -> None:
    """A100: 141.1 GB at 2.039 TB/s are 69.2 ms, an eighth 8.65; 161 sums; 60.5 ms are saved, 376 us
    a sum."""
    right = (69.2, 8.65, 161)
    a100 = {"device": "a100-80-sxm", "model": "llama-3-70b"}
    assert verdicts("tensor parallel", *right, **a100) == ["right"] * 3
    assert verdicts("tensor parallel", "", "", 80, **a100)[2] == "well known"
    assert verdicts("tensor parallel", "", "", "", "", 8, 376, **a100)[4:] == [
        "well known",
        "right",
    ]


def test_hints_come_one_by_one_and_then_the_solution() -> None:
    step = Step("?", "B", 4.0, ("first", "second"), "2 x 2", "ridgeline.x")
    shown = [grade(step, None, num) for num in range(4)]
    assert [len(one.hints) for one in shown] == [0, 1, 2, 2]
    assert [one.hints_left for one in shown] == [3, 2, 1, 0]
    assert [one.solution for one in shown] == ["", "", "", "2 x 2 = 4 B"]
    assert grade(step, 4.05, 0).verdict == "right"
    assert grade(step, 4.2, 0).says == "too large"


def test_nothing_is_told_before_it_is_earned() -> None:
    for challenge in CHALLENGES:
        found = ask(challenge=challenge)
        assert found.figures == []
        assert all(not one.solution for one in found.drawing.steps)


def test_answers_of_another_challenge_do_not_count_and_words_are_refused() -> None:
    kept = ask(challenge="critical batch", answers="draft length:1,2,3").drawing
    assert all(one.given is None for one in kept.steps)
    with pytest.raises(RequestFault, match="is no number"):
        ask(answers="KV per token:many")
