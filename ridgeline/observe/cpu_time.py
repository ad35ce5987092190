"""How much of the processors did the engine's process get while it had requests?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridgeline.errors import RequestFault
from ridgeline.request import Request, RequestOutput
from ridgeline.step import Listener, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class CpuTime:
    """`cpu_s`: what all threads of the process computed in `wall_s`, while requests were there."""

    wall_s: float
    cpu_s: float


class CpuTimes(Listener):
    """Adds up the time with requests; `read` gives the process's CPU seconds so far, or None where
    nobody knows. It is asked when the first request comes and when the last one has gone."""

    def __init__(self, read: Callable[[], float | None]) -> None:
        self._read = read
        self._live: set[str] = set()
        self._since: tuple[float, float] | None = None
        self._sum = CpuTime(0.0, 0.0)

    def on_add(self, request: Request, now: float, fault: RequestFault | None) -> None:
        if fault is not None:
            return
        if not self._live and (cpu_s := self._read()) is not None:
            self._since = now, cpu_s
        self._live.add(request.request_id)

    def on_abort(self, request_id: str, now: float) -> None:
        self._gone(request_id, now)

    def on_collect(
        self,
        plan: StepPlan,
        result: StepResult | None,
        outputs: Sequence[RequestOutput],
        error: str | None,
        now: float,
    ) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._gone(output.request_id, now)

    def _gone(self, request_id: str, now: float) -> None:
        self._live.discard(request_id)
        if not self._live and self._since is not None:
            self._sum, self._since = self._with(now) or self._sum, None

    def _with(self, now: float) -> CpuTime | None:
        """The sum and the time since requests came."""
        if self._since is None or (cpu_s := self._read()) is None:
            return None
        began, began_cpu_s = self._since
        return CpuTime(self._sum.wall_s + now - began, self._sum.cpu_s + cpu_s - began_cpu_s)

    def until(self, now: float) -> CpuTime | None:
        """All of it; None where nothing is known."""
        found = self._with(now) or self._sum
        return found if found.wall_s > 0 else None
