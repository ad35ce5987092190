"""A device that does what it is told on a clock of its own, beside a host that takes its time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Timeline:
    """`now` is the host's time, `busy_until` when the device has done all that it was sent. What
    it does to reach a mark takes `mark_s`."""

    mark_s: float = 0.0
    now: float = 0.0
    busy_until: float = 0.0
    pauses: list[float] = field(default_factory=list)

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._queue(seconds)

    def mark(self) -> Reached:
        self._queue(self.mark_s)
        return Reached(self, max(self.now, self.busy_until))

    def send(self, num_kernels: int, host_s: float, device_s: float) -> None:
        """The host takes `host_s` for each kernel, the device `device_s`."""
        for _ in range(num_kernels):
            self.now += host_s
            self._queue(device_s)

    def _queue(self, seconds: float) -> None:
        self.busy_until = max(self.now, self.busy_until) + seconds


@dataclass(frozen=True, slots=True)
class Reached:
    timeline: Timeline
    at: float

    def query(self) -> bool:
        return self.timeline.now >= self.at

    def synchronize(self) -> None:
        self.timeline.now = max(self.timeline.now, self.at)

    def elapsed_time(self, end: Any) -> float:
        return float(end.at - self.at) * 1e3
