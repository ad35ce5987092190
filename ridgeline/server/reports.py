"""What does one who asks where the time went get to read, and how often is that worked out?

Pricing takes long, so there is one report in the making at a time, in a thread of its own; each
reader waits for one at most, and reads it again while it is fresh. Other pages that are no answers
(metrics, the API's document) have a thread and a limit too: whoever asks for them without end gets
a fifth of a processor and is refused beyond.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

from ridgeline.observe.evidence import Evidence
from ridgeline.observe.explain import explain, explain_own
from ridgeline.server.engine_client import EngineClient
from ridgeline.server.errors import ApiError

FRESH_S = 1.0
MAX_WAITING = 8  # tenants
MAX_READERS = 8  # of pages that must be made
REST = 4.0  # times what a page took of a processor, until the next one is made

T = TypeVar("T")


class Reports:
    """By reader: a tenant's name, or None for who may see everything."""

    def __init__(self, engine: EngineClient) -> None:
        self.pool = ThreadPoolExecutor(1, "explain")
        self._engine = engine
        self._turn = asyncio.Lock()
        self._making: dict[bytes | None, asyncio.Task[bytes]] = {}
        self._made: dict[bytes | None, tuple[float, bytes]] = {}

    async def read(self, tenant: bytes | None) -> bytes:
        """JSON of ridgeline.observe.explain.OwnReport, or Report for None; up to a second old.

        Raises ApiError overloaded where too many others wait, and when the engine is gone.
        """
        now = self._engine.clock.now()
        self._made = {who: it for who, it in self._made.items() if now - it[0] < FRESH_S}
        if tenant in self._made:
            return self._made[tenant][1]
        if tenant not in self._making:
            if tenant is not None and len(self._making) >= MAX_WAITING:
                raise ApiError("overloaded", "too many explanations are asked for; try again later")
            self._making[tenant] = asyncio.create_task(self._make(tenant))
            self._making[tenant].add_done_callback(_look)
        task = self._making[tenant]
        await asyncio.wait((task,))  # a reader who leaves does not end it for the others
        return task.result()

    async def _make(self, tenant: bytes | None) -> bytes:
        try:
            async with self._turn:
                evidence = await self._engine.evidence(tenant)
                if not evidence:
                    raise ApiError("not_found", "this engine does not price its steps")
                loop = asyncio.get_running_loop()
                report = await loop.run_in_executor(self.pool, _report, evidence, tenant is None)
                self._made[tenant] = self._engine.clock.now(), report
                return report
        finally:
            del self._making[tenant]


class Pages:
    """Pages that are made when they are asked for, one after the other."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, "pages")
        self.num_readers = 0
        self._lock = asyncio.Lock()
        self._spent_s = 0.0  # of processor time, for the page in the making
        self._next_at = 0.0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Within it, `run` and `run_here` make a page. Raises ApiError rate_limit_exceeded."""
        if self.num_readers >= MAX_READERS:
            raise ApiError(
                "rate_limit_exceeded",
                f"{MAX_READERS} others wait for metrics or the API's document; ask less often",
            )
        self.num_readers += 1
        try:
            async with self._lock:
                loop = asyncio.get_running_loop()
                await asyncio.sleep(self._next_at - loop.time())
                self._spent_s = 0.0
                try:
                    yield
                finally:
                    self._next_at = loop.time() + REST * self._spent_s
        finally:
            self.num_readers -= 1

    async def run(self, work: Callable[..., T], *values: object) -> T:
        """In the pages' thread."""

        def timed() -> tuple[T, float]:
            began = time.thread_time()
            return work(*values), time.thread_time() - began

        found, spent_s = await asyncio.get_running_loop().run_in_executor(self.pool, timed)
        self._spent_s += spent_s
        return found

    def run_here(self, work: Callable[..., T], *values: object) -> T:
        """On the event loop: what reads the server's state."""
        began = time.thread_time()
        found = work(*values)
        self._spent_s += time.thread_time() - began
        return found


def _look(task: asyncio.Task[bytes]) -> None:
    """At what it raised, since its readers may all have left."""
    if not task.cancelled():
        task.exception()


def _report(evidence: bytes, of_all: bool) -> bytes:
    found = msgspec.json.decode(evidence, type=Evidence)
    if of_all:
        return msgspec.json.encode(explain(found).to_json())
    return msgspec.json.encode(explain_own(found))
