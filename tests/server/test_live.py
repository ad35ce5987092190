"""Does the live page tell what /metrics and the event log tell, to whom it may, and to many?"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from ridgeline.lab.what_if import Unwanted, what_if
from ridgeline.observe.engine_header import EngineHeader, setup_record
from ridgeline.observe.event_log import Added, Collected, read_event_log
from ridgeline.observe.evidence import Evidence
from ridgeline.observe.latency import Histogram
from ridgeline.observe.requests import Parts, TimeBreakdown
from ridgeline.observe.run import Totals
from ridgeline.server import live
from ridgeline.server.auth import ADMIN, Tenant
from ridgeline.server.errors import ApiError
from ridgeline.server.json_body import ClientGone
from ridgeline.server.live import Live
from ridgeline.speculation.report import DraftTotals
from tests.observe.priced import CONFIG, small_pricer, small_setup
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
    """A page that is open. `last` is the newest record. It comes again while there are too many: a
    server hears that one has gone when it writes to it."""

    def __init__(self, server: Running, key: str | None = None) -> None:
        self.last: dict[str, Any] = {}
        self.num = 0
        headers = bearer(key) if key else {}
        self._http = httpx.Client(base_url=server.url, headers=headers, timeout=30, verify=False)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        status = 429
        with suppress(httpx.HTTPError, RuntimeError):
            while status == 429:
                with self._http.stream("GET", "/lab/live/steps") as reply:
                    status = reply.status_code
                    if status == 200:
                        self._read_lines(reply)

    def _read_lines(self, reply: httpx.Response) -> None:
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
        live, had_a_turn = Live(service, what_if), asyncio.Event()
        first: Any = live._stream(True, None)
        await anext(first)
        await first.aclose()
        await asyncio.sleep(0.001)  # its task ends
        asyncio.get_running_loop().call_soon(had_a_turn.set)
        await anext(live._stream(True, None))
        assert had_a_turn.is_set()

    asyncio.run(two_pages())


def test_what_if_replays_the_last_requests(shared: Running) -> None:
    """Twelve at once, of which each step takes 20 ms and ten make an answer."""
    with shared.http as http, ThreadPoolExecutor(12) as threads:
        num_before = shared.metric("ridgeline_requests_total")
        asked = [threads.submit(ask, http, f"!slow {i}", 10) for i in range(12)]
        assert {each.result() for each in asked} == {200}
        shared.wait_until_idle()

        def asking(**setting: object) -> dict[str, Any]:
            return dict(http.post("/lab/live/what-if", json=setting).json())

        same = asking()
        assert same["num_requests"] == num_before + 12
        assert same["other"] == same["setting"]
        assert same["asked"] == same["today"]
        assert same["setting"]["max_num_seqs"] == 64
        assert same["today"]["tokens_per_s"] == pytest.approx(same["measured"]["tokens_per_s"], 0.5)
        one = asking(max_num_seqs=1)
        assert one["today"] == same["today"]
        assert one["other"]["max_num_seqs"] == 1
        # The last of them begins when eleven answers of ten steps have ended.
        assert one["asked"]["first_token_p99_s"] > 3 * same["today"]["first_token_p99_s"]
        assert one["sentence"].startswith("With max_num_seqs 1 instead of 64: 99 % of first tokens")
        two = asking(max_num_seqs=1, num_replicas=2)
        assert two["asked"]["first_token_p99_s"] < one["asked"]["first_token_p99_s"]
        cached = [same["measured"]["num_cached_tokens"], same["today"]["num_cached_tokens"]]
        for _ in range(2):
            assert ask(http, "a prompt of several blocks, and asked again " * 4, 2) == 200
        shared.wait_until_idle()
        again = asking()
        num_found = again["measured"]["num_cached_tokens"] - cached[0]
        assert num_found == again["today"]["num_cached_tokens"] - cached[1] > 0
        for setting, words in (
            ({"max_num_seqs": 0}, "max_num_seqs must be between 1 and 16384"),
            ({"kv": "bf7"}, "kv is 'bf7'; choose one of auto, fp8"),
            ({"policy": "slo"}, "policy slo needs a promise"),
            ({"speed": 1}, "unknown field 'speed'"),
        ):
            reply = http.post("/lab/live/what-if", json=setting)
            assert reply.status_code == 400
            assert words in reply.json()["error"]["message"]
    for key, status in (({}, 401), (bearer(OTHER), 403)):
        reply = httpx.post(f"{shared.url}/lab/live/what-if", json={}, headers=key)
        assert reply.status_code == status


def test_one_replay_at_a_time_for_as_long_as_somebody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs beside the event loop, ends when its reader leaves or its time is over, and the next
    one begins when it has rested."""
    begun, ended = threading.Event(), threading.Event()

    def replay(evidence: bytes, values: object, is_unwanted: Callable[[], bool]) -> bytes:
        begun.set()
        until(is_unwanted, "that nobody waits for it")
        ended.set()
        return b"{}"

    async def read(*_: object) -> tuple[dict[str, object], int]:
        return {}, 2

    async def evidence() -> bytes:
        return b"evidence"

    async def asking() -> None:
        is_gone = asyncio.Event()

        async def receive() -> dict[str, str]:
            await is_gone.wait()
            return {"type": "http.disconnect"}

        scope = {"type": "http", "state": {"tenant": Tenant(rights=frozenset({ADMIN}))}}
        request: Any = SimpleNamespace(scope=scope, receive=receive)
        service: Any = SimpleNamespace(
            config=SimpleNamespace(admin_port=None),
            aside=SimpleNamespace(open=lambda tenant: nullcontext()),
            read=read,
            engine=SimpleNamespace(evidence=evidence),
        )
        page = Live(service, replay)
        monkeypatch.setattr(live, "REST", 1e9)
        first = asyncio.create_task(page.what_if(request))
        await asyncio.to_thread(begun.wait, 30)
        with pytest.raises(ApiError, match="another replay runs"):
            await page.what_if(request)
        is_gone.set()
        with pytest.raises(ClientGone):
            await first
        assert await asyncio.to_thread(ended.wait, 30)
        is_gone.clear()
        ended.clear()
        begun.clear()
        second = asyncio.create_task(page.what_if(request))
        await asyncio.sleep(0.01)
        is_gone.set()
        with pytest.raises(ClientGone):
            await second
        assert not begun.is_set()
        is_gone.clear()
        page._next_replay_at = 0.0
        monkeypatch.setattr(live, "REPLAY_S", 0.01)
        with pytest.raises(ApiError, match=r"more than 0.01 s; ask for larger steps"):
            await page.what_if(request)
        assert await asyncio.to_thread(ended.wait, 30)

    asyncio.run(asking())


PROMPT, ANSWER = 20, 10


def replayed(
    num_drafts: int = 0,
    scale: float = 2.0,
    is_unwanted: Callable[[], bool] = lambda: False,
    beginnings: dict[str, tuple[str, int]] | None = None,
    third: int = 2 * PROMPT,
    **setting: object,
) -> dict[str, Any]:
    """Three requests of PROMPT and ANSWER tokens that came at once, a fourth too long ago. As many
    were in the cache; the third prompt has `third` in all."""
    header = EngineHeader(
        num_blocks=400, block_size=16, windows=(None,), max_num_batched_tokens=64, max_num_seqs=8,
        policy="fcfs", max_in_flight=1, prefix_caching=True, starvation_limit=8, max_preemptions=3,
        computes_in_submit=True, setup=setup_record(small_setup(), CONFIG), num_drafts=num_drafts,
    )  # fmt: skip
    drafts = DraftTotals()
    drafts.num_looked[0] = drafts.num_right[0] = 9
    rows = tuple(
        TimeBreakdown(f"{when}-{i}", when, third if i == 2 else 2 * PROMPT, Parts(), when + 1,
                      num_output_tokens=ANSWER, num_cached_tokens=PROMPT)
        for i, when in enumerate((1000.0, 1000.0, 1000.0, 1.0))
    )  # fmt: skip
    evidence = Evidence(
        header=header, now=1002.0, totals=Totals(9, scale, 1.0, drafts=drafts),
        time_breakdowns=rows, active=(), recent=(), num_finished=4,
        beginnings=beginnings or {},
    )  # fmt: skip
    return dict(json.loads(what_if(msgspec.json.encode(evidence), setting, is_unwanted)))


def test_a_replay_takes_what_its_steps_take() -> None:
    """One after the other: each begins when those before it have read and answered."""
    pricer = small_pricer()
    prompt_s = 2 * pricer.seconds(((PROMPT, 0),))
    decodes_s = 2 * sum(pricer.seconds(((1, PROMPT + i),)) for i in range(ANSWER - 1))
    found = replayed(max_num_seqs=1)
    assert found["num_requests"] == 3
    assert found["measured"]["tokens_per_s"] == 3 * ANSWER / 1.0
    asked = found["asked"]
    assert asked["first_token_p50_s"] == pytest.approx(2 * prompt_s + decodes_s, 1e-9)
    assert asked["tokens_per_s"] == pytest.approx(ANSWER / (prompt_s + decodes_s), 1e-9)
    assert asked["largest_queue"] == 2
    assert found["today"]["largest_queue"] == 0
    assert replayed(num_replicas=3, max_num_seqs=1)["asked"]["largest_queue"] == 0
    # A draft that is always right halves the steps, whose price hardly differs.
    faster = replayed(num_drafts=1)["today"]["tokens_per_s"] / found["today"]["tokens_per_s"]
    assert 1.5 < faster < 2.0


def test_a_replay_finds_prompts_that_began_alike() -> None:
    """Two blocks of the second prompt are the first one's; of the third one three are the second's
    prompt and the beginning of its answer."""
    pricer = small_pricer()
    alike = {"1000.0-1": ("1000.0-0", 32), "1000.0-2": ("1000.0-1", 48)}
    found = replayed(beginnings=alike, third=56, max_num_seqs=1)
    assert found["measured"]["num_cached_tokens"] == 3 * PROMPT
    assert found["asked"]["num_cached_tokens"] == 32 + 48
    prompts_s = [pricer.seconds(((2 * PROMPT, 0),)), pricer.seconds(((8, 32),))]
    decodes_s = sum(pricer.seconds(((1, 2 * PROMPT + i),)) for i in range(ANSWER - 1))
    asked_s = 2 * (sum(prompts_s) + decodes_s)
    assert found["asked"]["first_token_p50_s"] == pytest.approx(asked_s, 1e-9)
    assert replayed()["asked"]["num_cached_tokens"] == 3 * PROMPT  # left out of the prompts


def test_a_replay_that_nobody_waits_for_ends_within_a_step() -> None:
    """Its three requests take 31 steps one after the other."""
    asked = itertools.count()
    with pytest.raises(Unwanted):
        replayed(is_unwanted=lambda: next(asked) == 12, max_num_seqs=1)
    assert next(asked) == 13
