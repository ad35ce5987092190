"""What time is it, and what does chance decide? Both are arguments: nothing below `engine` asks the
system itself."""

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
        if when > self._now:
            self._now = when


class Rng(Protocol):
    """The part of random.Random that is used: chance comes from outside, as time does."""

    def random(self) -> float: ...

    def randrange(self, stop: int, /) -> int: ...

    def randint(self, a: int, b: int, /) -> int: ...

    def gammavariate(self, alpha: float, beta: float, /) -> float: ...
