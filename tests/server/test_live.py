"""Does the live page tell what /metrics and the event log tell, to whom it may, and to many?"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from ridgeline.observe.event_log import Added, Collected, read_event_log
from ridgeline.observe.latency import Histogram
from ridgeline.server.live import Live
from tests.server.running import Running, fake_config, running, until

KEY, OTHER = "key-of-the-first", "key-of-the-second"
OF_METRICS = {  # as the live record calls it, and /metrics
    "num_steps": "engine_steps_total",
    "num_preemptions": "preemptions_total",
    "num_used_blocks": "kv_cache_used_blocks",
    "num_running": "sequences_running",
    "num_waiting": "sequences_waiting",
    "num_prefix_hit_tokens": "prefix_cache_hit_tokens_total",
}


LENGTHS = [1 + i % 9 for i in range(200)]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Watcher:
    """A page that is open. `last` is the newest record."""

    def __init__(self, server: Running, key: str | None = None) -> None:
        self.last: dict[str, Any] = {}
        self.num = 0
        headers = bearer(key) if key else {}
        self._http = httpx.Client(base_url=server.url, headers=headers, timeout=30, verify=False)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with (
            suppress(httpx.HTTPError, RuntimeError),
            self._http.stream("GET", "/lab/live/steps") as reply,
        ):
            for line in reply.iter_lines():
                if line:
                    self.last, self.num = json.loads(line.removeprefix("data: ")), self.num + 1

    def close(self) -> None:
        self._http.close()


@contextmanager
def watching(server: Running, key: str | None = None) -> Iterator[Watcher]:
    watcher = Watcher(server, key)
    try:
        until(lambda: bool(watcher.last), "the first record")
        yield watcher
    finally:
        watcher.close()


def ask(http: httpx.Client, prompt: str, num_tokens: int) -> int:
    body = {"model": "fake", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}
    return http.post("/v1/completions", json=body).status_code


def test_its_figures_are_those_of_metrics_and_of_the_event_log(
    fake_model: Path, tmp_path: Path
) -> None:
    """After 200 requests of different lengths, some of which share their beginning."""
    path = tmp_path / "events.jsonl"
    config = fake_config(fake_model, engine={"event_log": str(path)}, lab=True)
    with running(config, tmp_path) as server:
        with watching(server) as page, server.http as http, ThreadPoolExecutor(16) as threads:
            asked = [
                threads.submit(ask, http, f"{'shared ' * 8}{i % 5} and then {i}", num)
                for i, num in enumerate(LENGTHS)
            ]
            assert {each.result() for each in asked} == {200}
            server.wait_until_idle()
            until(lambda: page.last["server"]["gauges"]["num_running"] == 0, "the last record")
            until(lambda: page.last["server"]["num_output_tokens"] == sum(LENGTHS), "all tokens")
            told = page.last["server"]
            names = [*OF_METRICS.values(), "requests_total", "generation_tokens_total"]
            names += ["time_to_first_token_seconds_count", "time_to_first_token_seconds_sum"]
            names += ["inter_token_latency_seconds_count", "sequences_finished_total"]
            figures = dict(
                zip(names, server.metrics(*(f"ridgeline_{n}" for n in names)), strict=True)
            )
        assert told["gauges"]["num_steps"] > 0
        for name, metric in OF_METRICS.items():
            assert told["gauges"][name] == figures[metric], name
        assert told["num_requests"] == figures["requests_total"] == 200
        assert told["num_output_tokens"] == figures["generation_tokens_total"]
        assert told["first_token"]["count"] == figures["time_to_first_token_seconds_count"] == 200
        assert told["first_token"]["sum_s"] == figures["time_to_first_token_seconds_sum"]
        assert told["between_tokens"]["count"] == figures["inter_token_latency_seconds_count"]
        assert told["finished"] == {"length": figures["sequences_finished_total"]}
        assert server.stop() == 0
    events = read_event_log(path).events
    assert sum(isinstance(event, Added) for event in events) == told["num_requests"]
    collected = [event for event in events if isinstance(event, Collected)]
    assert len(collected) == told["gauges"]["num_steps"]
    num_tokens = sum(count for event in collected for _, count, _ in event.rows)
    assert num_tokens == told["num_output_tokens"] == sum(LENGTHS)


@pytest.fixture(scope="module")
def shared(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("live")
    (folder / "keys").write_text(f"{OTHER} name=other\n")
    config = fake_config(fake_model, api_key_file=str(folder / "keys"), lab=True)
    with running(config, folder, key=KEY) as started:
        yield started


def test_a_key_sees_its_own_requests_alone(shared: Running) -> None:
    clients = [httpx.Client(base_url=shared.url, headers=bearer(key)) for key in (KEY, OTHER)]
    with (
        watching(shared, KEY) as admin,
        watching(shared, OTHER) as other,
        ThreadPoolExecutor(2) as threads,
    ):
        asked = [threads.submit(ask, http, "!slow one", 60) for http in clients]
        until(lambda: len(admin.last["requests"]) == 2, "both requests")
        until(lambda: len(other.last["requests"]) == 1, "its own request")
        until(lambda: other.last["requests"][0]["is_running"], "its start")
        (own,) = other.last["requests"]
        assert own["id"] in {one["id"] for one in admin.last["requests"]}
        assert own["num_prompt_tokens"] == 1 + len("!slow one")  # and what begins a text
        assert other.last["server"] is None
        assert admin.last["server"]["is_up"]
        assert {each.result() for each in asked} == {200}
    for http, sees_all in zip(clients, (True, False), strict=True):
        state = http.get("/lab/live/state").json()
        assert state["sees_all"] is sees_all
        assert bool(state["memory"]) is sees_all
        http.close()
    for path in ("/lab/live/state", "/lab/live/steps"):
        assert httpx.get(shared.url + path).status_code == 401
    assert httpx.get(f"{shared.url}/lab/live").headers["location"] == "/lab/#live"


def test_there_is_one_record_for_all_and_an_end_to_pages(shared: Running) -> None:
    watchers = [Watcher(shared, KEY) for _ in range(64)]
    try:
        until(lambda: all(one.num > 1 for one in watchers), "records on all pages")
        reply = httpx.get(f"{shared.url}/lab/live/steps", headers=bearer(KEY))
        assert reply.status_code == 429
    finally:
        for one in watchers:
            one.close()
    with watching(shared, KEY):  # and when they have gone, others may
        pass


def test_quantiles_of_what_came_since() -> None:
    """Within a bucket of what NumPy says of the values themselves."""
    values = np.random.default_rng(3).exponential(0.3, 4000)
    histogram = Histogram([0.05 * i for i in range(1, 60)])
    for value in values[:1000]:
        histogram.observe(float(value))
    before = list(histogram.counts)
    assert histogram.quantiles_since(before, (0.5,)) == (None,)
    for value in values[1000:]:
        histogram.observe(float(value))
    for share in (0.1, 0.5, 0.99):
        (found,) = histogram.quantiles_since(before, (share,))
        assert found is not None
        assert abs(found - np.quantile(values[1000:], share)) < 0.05


def test_a_page_after_the_last_one_waits_for_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given the old one without end, and the event loop had no turn."""
    monkeypatch.setattr(Live, "_now", lambda self, now: {})
    clock = SimpleNamespace(now=lambda: 0.0)
    engine = SimpleNamespace(gauges=None)
    service: Any = SimpleNamespace(draining=False, clock=clock, engine=engine, open=set())

    async def two_pages() -> None:
        live, had_a_turn = Live(service), asyncio.Event()
        first: Any = live._stream(True, None)
        await anext(first)
        await first.aclose()
        await asyncio.sleep(0.001)  # its task ends
        asyncio.get_running_loop().call_soon(had_a_turn.set)
        await anext(live._stream(True, None))
        assert had_a_turn.is_set()

    asyncio.run(two_pages())
