"""Does this very step take longer than it should? The deadline follows from its own price.

A step is overdue when it has run for `multiple` times what was expected of it, and for at least
`floor_s` seconds: below that, first uses and other programs on the machine are no reason to worry.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """The step that the device is at. `began` is of the clock that `now` is of, in every call."""

    step_id: int
    began: float
    expected_s: float


@dataclass(frozen=True, slots=True)
class Overdue:
    step_id: int
    elapsed_s: float
    expected_s: float
    deadline_s: float


class Watchdog:
    """Whoever has a timer of its own, outside the engine's loop, shows it the step in flight."""

    def __init__(self, multiple: float, floor_s: float) -> None:
        self.multiple = multiple
        self.floor_s = floor_s
        self.num_overdue = 0  # steps that were seen overdue; only rises
        self._seen: tuple[int, float] | None = None

    def deadline_s(self, step: StepInFlight) -> float:
        """How long the step may take."""
        return max(self.floor_s, self.multiple * step.expected_s)

    def is_within_price(self, step: StepInFlight | None, now: float) -> bool:
        """The step may well be still running: its price allows for it, whatever other deadlines
        say."""
        return step is not None and now - step.began <= self.multiple * step.expected_s

    def look(self, step: StepInFlight | None, now: float) -> Overdue | None:
        """What is wrong with the step, if it is overdue."""
        if step is None:
            return None
        elapsed, deadline = now - step.began, self.deadline_s(step)
        if elapsed <= deadline:
            return None
        return Overdue(step.step_id, elapsed, step.expected_s, deadline)

    def count(self, overdue: Overdue, began: float) -> bool:
        """Count an overdue step; False when it has been counted before."""
        if self._seen == (overdue.step_id, began):
            return False
        self._seen = (overdue.step_id, began)
        self.num_overdue += 1
        return True
