"""Steps in which guesses are checked."""

from __future__ import annotations

from ridgeline.step import ScheduledRequest, StepPlan


def checks(contexts: list[int], num_guesses: int) -> StepPlan:
    rows = [
        ScheduledRequest(str(row), start, num_guesses + 1, (), samples=True, num_draft=num_guesses)
        for row, start in enumerate(contexts)
    ]
    return StepPlan(1, tuple(rows))
