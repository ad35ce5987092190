"""Steps in which drafts are checked."""

from __future__ import annotations

from ridgeline.step import ScheduledRequest, StepPlan


def checks(contexts: list[int], num_draft_tokens: int) -> StepPlan:
    rows = [
        ScheduledRequest(
            str(row), start, num_draft_tokens + 1, (), samples=True, num_draft=num_draft_tokens
        )
        for row, start in enumerate(contexts)
    ]
    return StepPlan(1, tuple(rows))
