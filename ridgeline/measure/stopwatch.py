"""How long does a call take on the device, with caches as cold as in a real step?

Calls get a number and use it to pick among several copies of their inputs, so that nobody finds
the last call's data in a cache. On a CPU each call is timed by itself, after other data have pushed
it (its code too) out of the core's own caches, as weights do in a real step. On a GPU many calls
stand between two events, behind a pause long enough for the host to have queued them all: the time
is then the device's own, without gaps in which it waits for the host. `DeviceTimer` does the same
with what a call sends off once, such as a whole step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from ridgeline.clock import Clock, WallClock

Call = Callable[[int], object]
T = TypeVar("T")

LOW_SHARE = 0.25  # of repeats: others' work makes some slower, nothing makes one faster
CORE_CACHE_BYTES = 4 << 20  # more than any core has for itself
CYCLES_PER_S = 2.0e9  # of a GPU's clock, an upper estimate for the length of a pause
FIRST_PAUSE_S = 2e-3  # in which a host is expected to send a whole step
LONGEST_PAUSE_S = 32e-3


def typical(seconds: Sequence[float]) -> float:
    """What is seen when nobody disturbs: the lower quartile of the repeats."""
    ordered = sorted(seconds)
    return ordered[int((len(ordered) - 1) * LOW_SHARE)]


class Stopwatch(Protocol):
    def times(self, call: Call, budget_s: float) -> list[float]:
        """Seconds of single calls, as many as fit in about `budget_s` (at least three)."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessorClock:
    """Seconds that this thread has computed: what other programs take in between is left out.
    Right where one thread does all the work."""

    def now(self) -> float:
        return time.thread_time()


def host_clock(device: torch.device, threads: int) -> Clock:
    """The clock to time a host's work with: the wall's, or for a single thread its own."""
    return ProcessorClock() if device.type == "cpu" and threads == 1 else WallClock()


class CpuStopwatch:
    def __init__(self, threads: int) -> None:
        self._clock = time.thread_time if threads == 1 else time.perf_counter
        self._others = torch.zeros(CORE_CACHE_BYTES // 4)

    def times(self, call: Call, budget_s: float) -> list[float]:
        call(0)
        found: list[float] = []
        clock = self._clock
        until = time.perf_counter() + budget_s
        number = 1
        while len(found) < 3 or (time.perf_counter() < until and len(found) < 200):
            self._others.add_(1.0)
            started = clock()
            call(number)
            found.append(clock() - started)
            number += 1
        return found

    def synchronize(self) -> None:
        """Every call has returned with its result."""


class CudaStopwatch:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def times(self, call: Call, budget_s: float) -> list[float]:
        for number in range(3):
            call(number)
        self.synchronize()
        started = time.perf_counter()
        for number in range(3):
            call(number)
        queued_s = (time.perf_counter() - started) / 3
        self.synchronize()
        each_s = max((time.perf_counter() - started) / 3, 1e-6)
        group = max(1, min(32, int(budget_s / 5 / each_s)))
        return [self._group(call, group, queued_s * group * 2 + 2e-4) for _ in range(5)]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def _group(self, call: Call, size: int, pause_s: float) -> float:
        """Seconds of one of `size` calls that run back to back."""
        stream = CudaStream()
        stream.pause(pause_s)
        begin = stream.mark()
        for number in range(size):
            call(number)
        end = stream.mark()
        self.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / size


def open_stopwatch(device: torch.device, threads: int) -> Stopwatch:
    return CudaStopwatch(device) if device.type == "cuda" else CpuStopwatch(threads)


# ---------------------------------------------------------------------- what a step does there


class Mark(Protocol):
    """A place in what a device has to do, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """The device has come there."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from here to `end`, once the device has been at both."""
        ...


class Stream(Protocol):
    """What a device does one after the other."""

    def pause(self, seconds: float) -> None:
        """Keep it busy for about so long, and its caches as they are."""
        ...

    def mark(self) -> Mark: ...


class CudaStream:
    """The current stream of the current GPU."""

    def pause(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * CYCLES_PER_S))  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        mark: Mark = event
        return mark


class DeviceTimer:
    """Times what a call sends to a stream, on the device alone: it begins when all has been sent.
    If the host took longer than the pause there is no time, and the next pause is longer."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._pause_s = FIRST_PAUSE_S
        self._sent: tuple[Mark, Mark] | None = None

    def send(self, call: Callable[[], T]) -> T:
        """What `call` returns, which must not wait for the device."""
        self._stream.pause(self._pause_s)
        begin = self._stream.mark()
        answer = call()
        end = self._stream.mark()
        self._sent = begin, end
        if begin.query():
            self._sent = None
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return answer

    def take(self) -> float | None:
        """Seconds of what was sent last, waiting for it; None where the device was too early."""
        sent, self._sent = self._sent, None
        if sent is None:
            return None
        begin, end = sent
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def open_device_timer(device: torch.device) -> DeviceTimer | None:
    """None for a CPU: it does what it is told before the call returns."""
    return DeviceTimer(CudaStream()) if device.type == "cuda" else None
