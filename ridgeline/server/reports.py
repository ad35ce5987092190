"""What does one who asks where the time went get to read, and how often is that worked out?

Pricing takes long, so there is one report in the making at a time, in a thread of its own; each
reader waits for one at most, and reads it again while it is fresh.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ridgeline.observe.evidence import Evidence
from ridgeline.observe.explain import explain, explain_own
from ridgeline.server.engine_client import EngineClient
from ridgeline.server.errors import ApiError

FRESH_S = 1.0
MAX_WAITING = 8  # tenants


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


def _look(task: asyncio.Task[bytes]) -> None:
    """At what it raised, since its readers may all have left."""
    if not task.cancelled():
        task.exception()


def _report(evidence: bytes, of_all: bool) -> bytes:
    found = Evidence.from_json(msgspec.json.decode(evidence))
    if of_all:
        return msgspec.json.encode(explain(found).to_json())
    return msgspec.json.encode(explain_own(found))
