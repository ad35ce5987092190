"""Is what drafting brought counted as it was, and its time shared as it is said to be?"""

from __future__ import annotations

import pytest

from ridgeline.cost.pricer import StepPrice
from ridgeline.observe.run import Run
from ridgeline.observe.run_summary import drafts_between, snapshot
from ridgeline.request import FinishReason, RequestOutput
from ridgeline.speculation.report import ENOUGH_STEPS, DraftTotals, draft_report
from ridgeline.step import ScheduledRequest, StepPlan, StepResult, StepShape

DRAFT_S = 0.25  # for each draft


def price(shape: StepShape, num_logits: int) -> StepPrice:
    """A second for each token, and one for the step."""
    return StepPrice(1.0 + sum(new for new, _ in shape), 1.0, 0.0, 0.0)


def plan(step_id: int, *num_drafts: int) -> StepPlan:
    rows = tuple(
        ScheduledRequest(str(row), 10, k + 1, (), samples=True, num_draft=k)
        for row, k in enumerate(num_drafts)
    )
    return StepPlan(step_id, rows)


def result(*num_tokens: int) -> StepResult:
    return StepResult({str(row): (5,) * num for row, num in enumerate(num_tokens)})


def ran(run: Run, step: StepPlan, got: StepResult | None, seconds: float) -> None:
    begun = run.last_ended
    run.on_plan(step, begun)
    error = None if got is not None else "it failed"
    outputs = [] if got is None else outputs_of(got)
    run.on_collect(step, got, outputs, error, begun + seconds)


def outputs_of(got: StepResult) -> list[RequestOutput]:
    return [RequestOutput(name, ids) for name, ids in got.token_ids.items()]


def test_steps_with_drafts_are_priced_with_their_drafting() -> None:
    run = Run(price, draft_price=lambda rows, context, k: DRAFT_S * k)
    ran(run, plan(1, 3, 3), result(4, 2), seconds=20.0)
    totals = run.totals.drafts
    assert (totals.num_steps, totals.num_rows, totals.num_draft_tokens) == (1, 2, 6)
    assert (totals.num_accepted, totals.num_tokens) == (4, 6)
    assert totals.num_looked[:4] == [2, 2, 1, 0]
    assert totals.num_right[:4] == [2, 1, 1, 0]
    assert totals.expected_s == 1 + 8 + 3 * DRAFT_S
    assert totals.drafting_s == pytest.approx(20 * 3 * DRAFT_S / 9.75)
    assert totals.plain_s == (1 + 2) * 6 / 2  # three steps of two rows
    assert run.totals.regimes["verify"].num_steps == 1
    assert run.totals.regimes["decode"].num_steps == 0


def test_the_gain_is_over_plain_steps_that_have_run_here() -> None:
    run = Run(price, draft_price=lambda rows, context, k: DRAFT_S * k)
    ran(run, plan(1, 3, 3), result(4, 2), seconds=9.75 / 2)
    first = drafts_between(run.totals)
    assert first is not None
    assert not first.is_measured
    assert first.gain == pytest.approx(9 / 9.75)  # the prices are wrong by the same factor
    for step in range(ENOUGH_STEPS):
        ran(run, plan(2 + step, 0, 0), result(1, 1), seconds=3.0)
    report = drafts_between(run.totals)
    assert report is not None
    assert report.is_measured
    assert report.gain == pytest.approx(9 / (9.75 / 2))
    assert report.accepted_length == 3.0
    assert report.acceptance == pytest.approx(4 / 5)
    assert report.by_position == (1.0, 0.5, 1.0)
    assert report.drafting_share == pytest.approx(0.75 / 9.75)
    assert report.drafting_share + report.verifying_share == pytest.approx(1.0)
    drafts, speed = report.lines(is_calibrated=True)
    assert "3.00 tokens a row" in drafts
    assert "by price" in speed
    assert "measured speed" in speed
    assert "by price" not in " ".join(report.lines(is_calibrated=False))
    assert len(first.lines(is_calibrated=False)) == 1  # a gain over assumed prices is none


def test_what_a_look_up_has_not_found_was_not_wrong() -> None:
    """Of three rows with four drafts planned: nothing was there, two that were right, and three of
    which the second was wrong."""
    run = Run(price)
    got = result(1, 3, 2)
    got.verified.update({"0": (0, 0), "1": (2, 2), "2": (2, 1)})
    ran(run, plan(1, 4, 4, 4), got, seconds=1.0)
    totals = run.totals.drafts
    assert totals.num_looked[:4] == [2, 2, 0, 0]
    assert totals.num_right[:4] == [2, 1, 0, 0]
    assert (totals.num_draft_tokens, totals.num_accepted, totals.num_tokens) == (12, 3, 6)


def test_between_two_snapshots() -> None:
    run = Run(price)
    ran(run, plan(1, 2), result(3), seconds=1.0)
    before = snapshot(run.totals)
    assert drafts_between(run.totals, before) is None
    ran(run, plan(2, 2), result(1), seconds=1.0)
    report = drafts_between(run.totals, before)
    assert report is not None
    assert (report.num_steps, report.num_draft_tokens, report.num_accepted) == (1, 2, 0)
    assert report.by_position == (0.0,)


def test_what_failed_or_read_prompts_is_left_out() -> None:
    run = Run(price)
    ran(run, plan(1, 2), None, seconds=1.0)
    prompt = ScheduledRequest("p", 0, 40, (), samples=True)
    mixed = StepPlan(2, (prompt, *plan(2, 2).scheduled))
    ran(run, mixed, result(3), seconds=1.0)
    assert run.totals.drafts == DraftTotals()
    assert run.totals.regimes["mixed"].num_steps == 1


def test_what_came_behind_the_end_of_an_answer_is_no_part_of_it() -> None:
    """Row 0 ends with its second draft, row 1 has ended before; of row 2 the first was wrong."""
    run = Run(price, draft_price=lambda rows, context, k: DRAFT_S * k)
    step, got = plan(1, 3, 3, 3), result(4, 3, 1)
    outputs = [
        RequestOutput("0", (5, 5), FinishReason.STOP, num_accepted=2, num_rejected=1),
        RequestOutput("2", (5,)),
    ]
    run.on_plan(step, 0.0)
    run.on_collect(step, got, outputs, None, 1.0)
    totals = run.totals.drafts
    assert (totals.num_steps, totals.num_rows, totals.num_tokens) == (1, 2, 3)
    assert (totals.num_draft_tokens, totals.num_accepted) == (6, 2)
    assert (totals.num_looked[:4], totals.num_right[:4]) == ([2, 1, 0, 0], [1, 1, 0, 0])


def test_a_step_that_nobody_was_left_for_does_not_count() -> None:
    run = Run(price)
    step = plan(1, 3)
    run.on_plan(step, 0.0)
    run.on_collect(step, result(2), [], None, 1.0)
    assert run.totals.drafts == DraftTotals()
    assert run.totals.regimes["verify"].num_steps == 1


def test_a_row_whose_logits_went_wrong_gives_nothing() -> None:
    totals = DraftTotals()
    totals.count_step(1.0, 1.0, 0.0)
    got = StepResult({"0": (1, 2)})
    assert totals.count_result(plan(1, 2, 2), got, outputs_of(got), plain_s=1.0) == 1
    assert (totals.num_rows, totals.num_tokens, totals.plain_s) == (1, 2, 2.0)
    assert draft_report(DraftTotals(), 0, 0.0, 0.0) is None
