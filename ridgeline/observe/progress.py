"""Is the engine getting on? A deadline on the step counter, for health and the watchdog."""

from __future__ import annotations


class Progress:
    """Work that is pending must see a step end within `deadline_s`; idle is healthy.

    `now` is any monotonic clock in seconds, the same one in every call.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._pending = 0
        self._since = 0.0  # when pending work last saw progress, or began

    @property
    def num_pending(self) -> int:
        return self._pending

    def work_began(self, now: float, count: int = 1) -> None:
        """`count` more sequences are the engine's business."""
        if self._pending == 0:
            self._since = now
        self._pending += count

    def work_ended(self, count: int = 1) -> None:
        self._pending = max(0, self._pending - count)

    def step_done(self, now: float) -> None:
        self._since = max(self._since, now)

    def reset(self) -> None:
        """The engine is a new one: nothing is pending."""
        self._pending = 0

    def stalled_s(self, now: float) -> float:
        """Seconds that pending work has waited for a step; 0 when nothing is pending."""
        return max(0.0, now - self._since) if self._pending else 0.0

    def is_stuck(self, now: float) -> bool:
        return self.stalled_s(now) > self.deadline_s
