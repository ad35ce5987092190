"""Can asking where the time went, or for tokens, take the place of answers or of others?"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ridgeline.clock import WallClock
from ridgeline.server.app import make_app
from ridgeline.server.auth import Keys, Tenant
from ridgeline.server.errors import ApiError
from ridgeline.server.reports import FRESH_S, MAX_READERS, MAX_WAITING, REST, Pages, Reports
from ridgeline.server.service import ASIDE_REQUESTS, Service
from tests.observe.test_explain import ask, bench
from tests.server.running import PATIENCE_S, fake_config

A, B = b"a" * 32, b"b" * 32


@dataclass
class Told:
    time: float = 0.0

    def now(self) -> float:
        return self.time


@dataclass
class FakeEngine:
    """Answers when it is let."""

    clock: Told = field(default_factory=Told)
    let: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[bytes | None] = field(default_factory=list)
    fault: ApiError | None = None

    async def evidence(self, tenant: bytes | None = None) -> bytes:
        self.asked.append(tenant)
        await self.let.wait()
        if self.fault is not None:
            raise self.fault
        made = bench()
        made.run([ask(1, 5, 2)])
        who = None if tenant is None else tenant.hex()
        return msgspec.json.encode(made.run_record.evidence(1.0, who))


def made() -> tuple[FakeEngine, Reports]:
    engine = FakeEngine()
    return engine, Reports(engine)  # type: ignore[arg-type]


async def settled() -> None:
    """Everything that can happen without the engine has happened."""
    for _ in range(10):
        await asyncio.sleep(0)


def both(reports: Reports, *readers: bytes | None) -> list[asyncio.Task[bytes]]:
    return [asyncio.create_task(reports.read(reader)) for reader in readers]


def test_one_report_at_a_time_and_one_for_all_who_wait() -> None:
    async def story() -> None:
        engine, reports = made()
        tasks = both(reports, A, A, B, A, None)
        await settled()
        assert engine.asked == [A]
        tasks[0].cancel()  # its reader leaves; the others wait for the same
        engine.let.set()
        found = await asyncio.gather(*tasks[1:])
        assert engine.asked == [A, B, None]
        assert found[0] == found[2]
        assert "server" not in json.loads(found[1])
        assert json.loads(found[3])["server"]["num_steps"] == 2

    asyncio.run(story())


def test_a_fresh_report_is_read_again() -> None:
    async def story() -> None:
        engine, reports = made()
        engine.let.set()
        first = await reports.read(A)
        engine.clock.time = FRESH_S / 2
        assert await reports.read(A) is first
        await reports.read(B)
        engine.clock.time = FRESH_S * 1.1
        await reports.read(A)
        assert engine.asked == [A, B, A]

    asyncio.run(story())


def test_too_many_wait_but_an_administrator_never_too_many() -> None:
    async def story() -> None:
        engine, reports = made()
        tasks = both(reports, *(b"%d" % i for i in range(MAX_WAITING)))
        await settled()
        with pytest.raises(ApiError) as caught:
            await reports.read(b"another")
        assert caught.value.code == "overloaded"
        assert (b"retry-after", b"1") in caught.value.headers
        tasks += both(reports, None, b"0")
        engine.let.set()
        await asyncio.gather(*tasks)
        await reports.read(b"another")

    asyncio.run(story())


def test_a_failure_reaches_all_who_wait_and_is_not_kept() -> None:
    async def story() -> None:
        engine, reports = made()
        engine.fault = ApiError("engine_unavailable", "gone")
        engine.let.set()
        for found in await asyncio.gather(*both(reports, A, A), return_exceptions=True):
            assert isinstance(found, ApiError)
        engine.fault = None
        await reports.read(A)
        assert engine.asked == [A, A]

    asyncio.run(story())


# ---------------------------------------------------------------------- beside the answers


@pytest.fixture
def service(fake_model: Path) -> Service:
    return Service(fake_config(fake_model, {"max_held_body_bytes": 80 << 20}), WallClock())


def test_what_is_no_answer_has_places_of_its_own(service: Service) -> None:
    tickets = [service.aside.open(Tenant(b"%d" % i)) for i in range(ASIDE_REQUESTS)]
    with pytest.raises(ApiError) as caught:
        service.aside.open(Tenant(b"x"))
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    tickets[0].hold_bytes(10 << 20)
    with pytest.raises(ApiError):
        tickets[1].hold_bytes(1)
    with service.admission.open(Tenant(b"0")) as ticket:
        ticket.hold_bytes(80 << 20)
        assert service.num_open == ASIDE_REQUESTS + 1
    for ticket in tickets:
        ticket.release()
    assert service.num_open == 0


def test_and_threads_of_its_own(service: Service) -> None:
    """All of these work, and an answer's text is read nevertheless; so is a report made."""

    async def story() -> None:
        go = threading.Event()
        busy: list[Coroutine[Any, Any, object]] = [service.run_aside(go.wait) for _ in range(50)]
        waiting = asyncio.gather(*busy)
        await settled()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PATIENCE_S):
                assert await service.run_in_thread(len, "four") == 4
                assert await loop.run_in_executor(service.reports.pool, len, "four") == 4
            assert not waiting.done()
        finally:
            go.set()
            await waiting

    asyncio.run(story())
    service.close()


# ------------------------------------------------------------------ pages


def get(service: Service, *paths: str) -> list[httpx.Response]:
    """All at once."""

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=make_app(service, Keys()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return list(await asyncio.gather(*map(http.get, paths)))

    return asyncio.run(ask())


def test_pages_are_made_beside_answers(service: Service) -> None:
    """Where no thread for answers is free."""
    for pool in (service.pool, service.aside_pool, service.reports.pool):
        pool.shutdown()
    replies = get(service, "/metrics", "/openapi.json", "/openapi.json", "/metrics")
    assert [reply.status_code for reply in replies] == [200] * 4
    assert "ridgeline_ready" in replies[0].text
    assert service.admission.num_requests == service.aside.num_requests == 0


def test_a_flood_of_scrapes_is_refused(service: Service) -> None:
    replies = get(service, *["/metrics"] * (MAX_READERS + 3), "/version")
    assert sorted(reply.status_code for reply in replies) == [200] * (MAX_READERS + 1) + [429] * 3
    refused = next(reply for reply in replies if reply.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert get(service, "/metrics")[0].status_code == 200
    assert service.pages.num_readers == 0


def test_pages_get_a_fifth_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    async def make() -> tuple[float, float]:
        loop, pages = asyncio.get_running_loop(), Pages()
        times = iter((0.0, 0.02, 5.0, 5.01))
        monkeypatch.setattr(time, "thread_time", times.__next__)
        async with pages.turn():
            assert await pages.run(sum, (1, 2)) == 3
            assert pages.run_here(max, 1, 2) == 2
        made = loop.time()
        async with pages.turn():
            return made, loop.time()

    made, again = asyncio.run(make())
    assert again - made > REST * 0.03 - 0.01
