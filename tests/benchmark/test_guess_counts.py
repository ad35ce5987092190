"""What the table of guesses says of a gain before it is measured."""

from __future__ import annotations

import pytest

from bench.guess_counts import Counts
from ridgeline.request import RequestOutput
from ridgeline.step import ScheduledRequest, StepPlan, StepResult


class Priced:
    """A guess costs a quarter of a step without any, and each 1,000 tokens of context as much."""

    def seconds(self, batch: int, context: int, num_drafts: int) -> float:
        return 1.0 + num_drafts / 4 + context / 1000


def collected(counts: Counts, k: int, num_new: int, start: int) -> None:
    row = ScheduledRequest("a", start, k + 1, (), samples=True, num_draft=k)
    result = StepResult({"a": tuple(range(num_new))}, checked={"a": (k, num_new - 1)})
    output = RequestOutput("a", result.token_ids["a"])
    counts.on_collect(StepPlan(1, (row,)), result, [output], None, 0.0)


def test_steps_that_ran_on_behind_the_end_are_not_of_the_answer() -> None:
    """Two steps are under way at once, so that each answer that ends by itself has one."""
    counts = Counts()
    collected(counts, 4, 5, 100)
    row = ScheduledRequest("a", 105, 5, (), samples=True, num_draft=4)
    late = StepResult({"a": (1,)}, checked={"a": (1, 0)})
    counts.on_collect(StepPlan(2, (row,)), late, [], None, 0.0)
    assert counts.figures()["tokens_per_step"] == 5
    assert counts.figures()["by_position"] == [1.0] * 4


def test_a_gain_is_predicted_of_the_steps_that_ran() -> None:
    counts = Counts()
    assert counts.predicted_gain(Priced(), 1) is None
    for _ in range(3):
        collected(counts, 4, 5, 1000)
    collected(counts, 0, 1, 1000)
    assert counts.predicted_gain(Priced(), 1) == pytest.approx(2.0 * 16 / (3 * 3.0 + 2.0))
    counts.restart()
    collected(counts, 0, 1, 0)
    assert counts.predicted_gain(Priced(), 1) == pytest.approx(1.0)
