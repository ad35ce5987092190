"""What time is it? Time is an argument: nothing below `engine` asks the system itself."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a clock that never goes back; only differences mean anything."""
        ...


class WallClock:
    def now(self) -> float:
        return time.monotonic()


def process_seconds() -> float:
    """What all threads of this process have computed so far."""
    return time.process_time()


class VirtualClock:
    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance_to(self, when: float) -> None:
        self._now = max(self._now, when)
