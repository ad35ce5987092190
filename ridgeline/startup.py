"""Which seconds pass between the start of a process and its first answer? Each has a name."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from ridgeline.clock import Clock, WallClock
from ridgeline.log import say

OTHER = "other"
_STARTTIME = 22 - 3  # fields of /proc/self/stat, from 1; those after the name begin with the third
_IMPORTED = time.monotonic()

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Phase:
    """Something that took a while at start; `detail` says of how much, or from where."""

    name: str
    seconds: float
    detail: str = ""


@dataclass(slots=True)
class OpenPhase:
    """One that has not ended yet, for what is known at its end."""

    begun: float
    detail: str = ""


class StartUp:
    """Phases one after the other since `begun`, a time of `clock` (default: now)."""

    def __init__(self, clock: Clock | None = None, begun: float | None = None) -> None:
        self._clock = clock or WallClock()
        self._begun = self._clock.now() if begun is None else begun
        self._phases: list[Phase] = []

    @classmethod
    def of_process(cls, name: str) -> StartUp:
        """Since the process began; what has passed so far is the phase `name`."""
        clock, age = WallClock(), process_age_s()
        start = cls(clock, clock.now() - age)
        start.add(Phase(name, age))
        return start

    @contextmanager
    def phase(self, name: str) -> Iterator[OpenPhase]:
        """What is done in this context. Phases do not contain each other."""
        opened = OpenPhase(self._clock.now())
        try:
            yield opened
        finally:
            self.add(Phase(name, self._clock.now() - opened.begun, opened.detail))

    def add(self, phase: Phase) -> None:
        self._phases.append(phase)

    def take(self, phases: Iterable[Phase]) -> None:
        """Those that somebody else has measured meanwhile; their remainder is part of ours."""
        for phase in phases:
            if phase.name != OTHER:
                self.add(phase)

    def elapsed_s(self) -> float:
        return self._clock.now() - self._begun

    def report(self) -> tuple[Phase, ...]:
        """All phases so far, and the time without a name, so that the sum is what has passed."""
        rest = self.elapsed_s() - sum(phase.seconds for phase in self._phases)
        return (*self._phases, Phase(OTHER, max(0.0, rest)))


@contextmanager
def without_collections() -> Iterator[None]:
    """For the imports of a fresh process: they make much and drop little. To look for garbage
    among it takes a sixth of their time, and some of every later search, so it never happens:
    all that is there at the end stays."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def keep_what_is_there() -> None:
    """Once all is loaded, in a process of ours: what is there by then is not looked through for
    garbage again, which took a tenth of a second now and then, in the middle of the steps."""
    gc.collect()
    gc.freeze()


def process_age_s() -> float:
    """Seconds since this process began, to a hundredth; where the system does not say, since this
    module was imported."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8")
        ticks = int(stat.rpartition(")")[2].split()[_STARTTIME])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED


class Said(Protocol):
    """Something that can be put into words; none when there is nothing to say."""

    def text(self) -> str: ...


@runtime_checkable
class Started(Protocol):
    """What a builder made, if it says how long that took."""

    @property
    def startup(self) -> tuple[Phase, ...]: ...
    @property
    def kernels(self) -> Said | None: ...


class IdleWork(Protocol):
    """Something that may be done, a little at a time, while nothing runs."""

    def one(self) -> bool:
        """Do a little. False: nothing is left."""
        ...


@runtime_checkable
class WarmsUp(Protocol):
    """What a builder made, if some of its start is left for idle moments."""

    @property
    def warm_up(self) -> IdleWork | None: ...


def total_s(phases: Iterable[Phase]) -> float:
    return sum(phase.seconds for phase in phases)


def say_phases(phases: Iterable[Phase]) -> None:
    """One line at INFO; seconds by name."""
    rows = tuple(phases)
    words = ", ".join(phase_text(phase) for phase in rows)
    say(logger, logging.INFO, "start-up", total_s=round(total_s(rows), 2), phases=words)


def say_first_token(kernels: Said | None) -> None:
    """One line at INFO: how old the process is, and what became of `kernels` until now."""
    known = (kernels and kernels.text()) or "none"
    age = round(process_age_s(), 2)
    say(logger, logging.INFO, "first token", process_age_s=age, kernels=known)


def phase_text(phase: Phase) -> str:
    detail = f" ({phase.detail})" if phase.detail else ""
    return f"{phase.name} {phase.seconds:.2f} s{detail}"
