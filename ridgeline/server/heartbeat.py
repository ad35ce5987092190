"""Which step is the engine at, as seen from outside its loop? A page of memory that both processes
map: the engine writes to it before and after each step, and it can be read while the engine hangs.

Both sides use the system's monotonic clock, which is one for all processes.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from struct import Struct
from threading import Lock
from time import sleep

from ridgeline.observe.run import Run
from ridgeline.observe.watchdog import StepInFlight
from ridgeline.request import RequestOutput
from ridgeline.step import Listener, StepPlan, StepResult

SIZE = mmap.PAGESIZE
SEQUENCE = Struct("<Q")  # odd while the rest is being written
STEP = Struct("<qdd")  # step id (0: none), began, expected seconds
NEW = SEQUENCE.size + STEP.size  # where a byte says whether something is done for the first time
ATTEMPTS = 8
LONG_S = 0.5  # a step that the host computes for so long is priced while it does

Computing = tuple[StepPlan, float]  # what the host itself is at, and since when


def new_page() -> int:
    """A file descriptor of a page of zeros that has no name."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("ridgeline-heartbeat")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, SIZE)
    return fd


class Heartbeat(Listener):
    """The engine's side: one of its listeners, behind the run that knows the step."""

    def __init__(self, fd: int, run: Run) -> None:
        self._page = mmap.mmap(fd, SIZE)
        self._run = run
        self._sequence = 0
        self._seen: set[tuple[int, ...]] = set()  # kinds of steps that have ended well
        self._new: dict[int, tuple[int, ...]] = {}  # the others in flight, by their step id
        self._computing: Computing | None = None
        self._lock = Lock()

    @contextmanager
    def first_time(self) -> Iterator[None]:
        """What is done in this context, between two steps, may have to compile kernels."""
        self._page[NEW] = 1
        yield
        self._page[NEW] = bool(self._new)

    def on_plan(self, plan: StepPlan, now: float) -> None:
        if plan.scheduled and (kind := self._kind(plan)) not in self._seen:
            self._new[plan.step_id] = kind
            self._page[NEW] = 1
        if self._run.computes_in_submit and plan.scheduled:
            self._computing = plan, now

    def on_submitted(self, plan: StepPlan, now: float) -> None:
        self._computing = None
        self._write_running()

    def show_long_steps(self) -> None:
        """For a thread of its own, where the engine's computes inside `submit`."""
        seen = None
        while True:
            sleep(LONG_S)
            with suppress(Exception):  # what cannot be priced is told when the step is over
                seen = self.show_long_step(seen)

    def show_long_step(self, seen: Computing | None) -> Computing | None:
        """Price the step that the host computes, if it is the one that was `seen` before."""
        if (step := self._computing) is not None and step is seen:
            expected_s = self._run.price_of(step[0])
            with self._lock:
                if self._computing is step:
                    self._write(step[0].step_id, step[1], expected_s)
        return step

    def on_collect(
        self,
        plan: StepPlan,
        result: StepResult | None,
        outputs: Sequence[RequestOutput],
        error: str | None,
        now: float,
    ) -> None:
        kind = self._new.pop(plan.step_id, None)
        if kind is not None and error is None:
            self._seen.add(kind)
        self._page[NEW] = bool(self._new)
        self._write_running()

    def _kind(self, plan: StepPlan) -> tuple[int, ...]:
        """Steps of one kind take the same kernels. On a CPU nothing is compiled, but the first step
        of all may have to read the weights from a disk."""
        if self._run.computes_in_submit:
            return ()
        sizes = [entry.num_tokens for entry in plan.scheduled]
        return sum(sizes).bit_length(), len(sizes).bit_length(), max(sizes).bit_length()

    def _write_running(self) -> None:
        running = self._run.running
        with self._lock:
            if running is None:
                self._write(0, 0.0, 0.0)
            else:
                self._write(running.plan.step_id, running.began, running.price.expected_s)

    def _write(self, step_id: int, began: float, expected_s: float) -> None:
        SEQUENCE.pack_into(self._page, 0, self._sequence + 1)
        STEP.pack_into(self._page, SEQUENCE.size, step_id, began, expected_s)
        self._sequence += 2
        SEQUENCE.pack_into(self._page, 0, self._sequence)


class HeartbeatPage:
    """The other side's view."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, SIZE, access=mmap.ACCESS_READ)

    def read(self) -> StepInFlight | None:
        """The step in flight; None when there is none, it has no price yet, or it cannot be read
        just now."""
        for _ in range(ATTEMPTS):
            before = SEQUENCE.unpack_from(self._page, 0)[0]
            step_id, began, expected_s = STEP.unpack_from(self._page, SEQUENCE.size)
            if before % 2 == 0 and SEQUENCE.unpack_from(self._page, 0)[0] == before:
                return StepInFlight(step_id, began, expected_s) if step_id else None
        return None

    def is_first_time(self) -> bool:
        """The engine is at something that it has not done before, and may have to compile."""
        return bool(self._page[NEW])

    def close(self) -> None:
        self._page.close()


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
