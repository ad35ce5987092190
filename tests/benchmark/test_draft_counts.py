"""What the table of drafts says of a gain before it is measured."""

from __future__ import annotations

import pytest

from bench.draft_counts import Counts
from ridgeline.request import FinishReason, RequestOutput
from ridgeline.speculation.price import Drafter, DraftPrices
from ridgeline.step import ScheduledRequest, StepPlan, StepResult
from tests.speculation.test_price import Line

LINE = Line(weights_s=0.75, row_s=0.25, key_s=1e-4)
AT_HAND = DraftPrices(LINE, Drafter())


def collected(
    counts: Counts, k: int, num_new: int, start: int, reason: FinishReason | None = None
) -> None:
    row = ScheduledRequest("a", start, k + 1, (), samples=True, num_draft=k)
    result = StepResult({"a": tuple(range(num_new))}, verified={"a": (k, num_new - 1)})
    output = RequestOutput("a", result.token_ids["a"], reason)
    counts.on_collect(StepPlan(1, (row,)), result, [output], None, 0.0)


def test_steps_that_ran_on_behind_the_end_are_not_of_the_answer() -> None:
    """Two steps are under way at once, so that each answer that ends by itself has one."""
    counts = Counts()
    collected(counts, 4, 5, 100)
    row = ScheduledRequest("a", 105, 5, (), samples=True, num_draft=4)
    late = StepResult({"a": (1,)}, verified={"a": (1, 0)})
    counts.on_collect(StepPlan(2, (row,)), late, [], None, 0.0)
    assert counts.figures()["tokens_per_step"] == 5
    assert counts.figures()["by_position"] == [1.0] * 4


def test_a_gain_is_predicted_of_the_steps_that_ran() -> None:
    counts = Counts()
    assert counts.predicted_gain(AT_HAND, 1) is None
    for _ in range(3):
        collected(counts, 4, 5, 1000)
    collected(counts, 0, 1, 1000)
    plain_s, verify_s = (AT_HAND.seconds(1, 1000, k) for k in (0, 4))
    expected = plain_s * 16 / (3 * verify_s + plain_s)
    assert counts.predicted_gain(AT_HAND, 1) == pytest.approx(expected)
    counts.restart()
    collected(counts, 0, 1, 0)
    assert counts.predicted_gain(AT_HAND, 1) == pytest.approx(1.0)


def test_a_gain_is_that_over_an_engine_whose_host_neither_chooses_nor_gets_several_tokens() -> None:
    counts = Counts()
    for num_new in (3, 5):
        collected(counts, 4, num_new, 0)
    prices = DraftPrices(LINE, Drafter(), choice_s=8.0, token_s=1.0)
    assert counts.predicted_gain(prices, 1) == pytest.approx(
        prices.plain_seconds(1, 0) * 4 / (8 + 3)
    )


def test_what_the_host_does_for_answers_beside_their_steps_is_in_a_gain_of_one_row() -> None:
    counts = Counts()
    for reason in (None, FinishReason.LENGTH, None, FinishReason.STOP):
        collected(counts, 4, 5, 0, reason)
    prices = DraftPrices(LINE, Drafter(), begin_s=30.0)  # the longer part, of each step a share
    assert counts.predicted_gain(prices, 1) == pytest.approx(1.0)
    prices = DraftPrices(LINE, Drafter(), begin_s=12.0)
    plain_s, verify_s = prices.plain_seconds(1, 0), prices.seconds(1, 0, 4)
    assert plain_s * 20 < 2 * 12 < verify_s * 4 * 20
    assert counts.predicted_gain(prices, 1) == pytest.approx(max(plain_s * 20, 24) / 24)
    assert counts.predicted_gain(prices, 2) == pytest.approx(
        20 * prices.plain_seconds(2, 0) / (4 * prices.seconds(2, 0, 4))
    )
    counts.restart()
    collected(counts, 4, 5, 0)
    assert counts.predicted_gain(prices, 1) == pytest.approx(5 * plain_s / verify_s)
