"""How does the engine stand now, and for which requests? One record, made once for all who watch.

All of it is known here: the engine sends its totals with each step. A record is made at most 20
times a second, and less often the more pages there are; a page that reads slowly gets the newest.
What tells of everybody is for those who may read /metrics; requests are shown to who asked for
them, and all of them to an administrator.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ridgeline.errors import ConfigError, RequestFault
from ridgeline.observe.latency import Histogram
from ridgeline.server.active_request import ActiveRequest
from ridgeline.server.auth import ADMIN, Tenant
from ridgeline.server.errors import ApiError, from_fault
from ridgeline.server.replies import HEADERS
from ridgeline.server.service import Service, unless_gone
from ridgeline.server.wire import Gauges, StepCosts

PERIOD_S = 0.05
MAX_WRITES_PER_S = 300  # of all pages together
MAX_PAGES = 64
IDLE_S = 1.0  # between two records while nothing happens
WINDOW_S = 5.0  # of which latencies are told
MAX_REQUESTS = 48  # that a record lists
REPLAY_S = 10.0  # at most, of one
NOT_SHOWN = ("costs", "expert_load", "ranks", "rank_load", "num_expert_exchanges")
REST = 4.0  # times what a replay took, until the next one may begin

# The JSON of /lab/live/what-if from evidence and a setting; the last says that nobody waits for it.
Replay = Callable[[bytes, Mapping[str, object], Callable[[], bool]], bytes]


class Times(msgspec.Struct, frozen=True):
    """Seconds: over all since the start the number and the sum; the others of the last seconds,
    None where nothing came."""

    count: int
    sum_s: float
    p50_s: float | None
    p99_s: float | None


class Steps(msgspec.Struct, frozen=True):
    """The steps since the record before: mean seconds, and where they lie under the roof."""

    num_steps: int
    num_rows: float
    measured_s: float
    expected_s: float
    ideal_s: float
    host_s: float
    intensity: float
    flops_per_s: float
    tokens_per_s: float


class ServerNow(msgspec.Struct, frozen=True):
    """Of everybody's requests. Totals have the values of /metrics at that moment."""

    is_up: bool
    gauges: Mapping[str, int | float]
    num_requests: int
    num_output_tokens: int
    finished: Mapping[str, int]
    steps: Steps | None
    queue: Times
    first_token: Times
    between_tokens: Times
    draft_tokens: int
    accepted_tokens: int
    accepted_by_position: Sequence[float]


class RequestNow(msgspec.Struct, frozen=True):
    """One open request. `waited_s`: until its first step, or so far."""

    id: str
    is_running: bool
    age_s: float
    waited_s: float
    num_prompt_tokens: int
    num_tokens: int


class State(msgspec.Struct, frozen=True):
    """What does not change while the engine lives. `memory` is its contract, in bytes."""

    model: str
    device: str
    origin: str
    peak_flops: float
    bandwidth: float
    num_blocks: int
    block_size: int
    max_num_seqs: int
    memory: Sequence[tuple[str, int]]
    device_memory_total: int
    sees_all: bool


class Live:
    """The pages that watch, and what they are shown."""

    def __init__(self, service: Service, replay: Replay) -> None:
        self._service = service
        self._replay = replay
        self._is_replaying = False
        self._next_replay_at = 0.0
        self._num_pages = 0
        self._task: asyncio.Task[None] | None = None
        self._made = asyncio.Event()
        self._server = b"null"
        self._requests: dict[bytes | None, bytes] = {}
        self._last: tuple[float, Gauges, int] | None = None
        self._windows: deque[tuple[float, tuple[tuple[int, ...], ...]]] = deque()

    # ------------------------------------------------------------------ for pages

    async def state(self, request: Request) -> Response:
        """The engine that /lab/live/steps tells of."""
        service, sees_all = self._service, self._sees_all(request)
        model, ready = service.need_model(), service.need_model().ready
        prices = ready.prices if sees_all else None
        told = State(
            model.name,
            prices.device if prices else "",
            prices.origin if prices else "",
            prices.flops_per_s if prices else 0.0,
            prices.bytes_per_s if prices else 0.0,
            ready.num_blocks,
            ready.block_size,
            ready.max_num_seqs,
            ready.memory if sees_all else (),
            ready.device_memory_total if sees_all else 0,
            sees_all,
        )
        return Response(msgspec.json.encode(told), media_type="application/json")

    async def steps(self, request: Request) -> Response:
        """Server-sent events: the engine and its requests as they are now."""
        if self._num_pages >= MAX_PAGES:
            raise ApiError("rate_limit_exceeded", f"{MAX_PAGES} pages watch already; close one")
        tenant: Tenant = request.scope["state"]["tenant"]
        is_admin = ADMIN in tenant.rights and self._service.config.admin_port is None
        stream = self._stream(self._sees_all(request), None if is_admin else tenant.name)
        headers = {name.decode(): value.decode() for name, value in HEADERS}
        return StreamingResponse(stream, headers=headers)

    async def what_if(self, request: Request) -> Response:
        """The last requests, replayed under another setting: one replay at a time, for as long as
        its reader waits, and a fifth of the time."""
        service = self._service
        if not self._sees_all(request):
            raise ApiError("not_found", "with --admin-port everybody's figures are not shown here")
        with service.aside.open(request.scope["state"]["tenant"]) as ticket:
            values, _ = await service.read(request.scope, request.receive, ticket)
            if self._is_replaying:
                raise ApiError("rate_limit_exceeded", "another replay runs; ask when it has ended")
            self._is_replaying = True
            try:
                found = await unless_gone(request.receive, self._replayed(values))
            finally:
                self._is_replaying = False
        return Response(found, media_type="application/json")

    async def _replayed(self, values: Mapping[str, object]) -> bytes:
        evidence = await self._service.engine.evidence()
        if not evidence:
            raise ApiError("not_found", "this engine does not price its steps")
        loop, is_unwanted = asyncio.get_running_loop(), threading.Event()
        await asyncio.sleep(self._next_replay_at - loop.time())
        began = loop.time()
        try:
            async with asyncio.timeout(REPLAY_S):
                return await asyncio.to_thread(self._replay, evidence, values, is_unwanted.is_set)
        except TimeoutError:
            raise ApiError(
                "limit_exceeded",
                f"the replay took more than {REPLAY_S:g} s; ask for larger steps or batches",
            ) from None
        except RequestFault as fault:
            raise from_fault(fault) from None
        except ConfigError as fault:
            raise ApiError("invalid_value", str(fault)) from None
        finally:
            is_unwanted.set()  # the thread ends at its next step
            self._next_replay_at = loop.time() + REST * (loop.time() - began)

    def _sees_all(self, request: Request) -> bool:
        tenant: Tenant = request.scope["state"]["tenant"]
        return tenant.may("metrics") and self._service.config.admin_port is None

    async def _stream(self, sees_all: bool, who: bytes | None) -> AsyncIterator[bytes]:
        self._num_pages += 1
        try:
            if self._task is None:
                self._task = asyncio.create_task(self._run())
                self._task.add_done_callback(self._failed)
            while not self._service.draining:
                await self._made.wait()
                if self._task is None or self._task.done():
                    raise ApiError("internal_error", "the records of this page ended")
                server = self._server if sees_all else b"null"
                requests = self._requests_of(who)
                yield b'data: {"server":' + server + b',"requests":' + requests + b"}\n\n"
        finally:
            self._num_pages -= 1
            if not self._num_pages and self._task is not None:
                self._task.cancel()
                self._task = None

    def _failed(self, task: asyncio.Task[None]) -> None:
        """Wake the pages. One that was cancelled has none, and those that come next must wait."""
        if not task.cancelled():
            self._made.set()

    # ------------------------------------------------------------------ one record for all

    async def _run(self) -> None:
        told_at = 0.0
        while True:
            now = self._service.clock.now()
            if self._has_news() or now - told_at >= IDLE_S or self._service.draining:
                told_at = now
                self._server = msgspec.json.encode(self._now(now))
                self._requests.clear()
                made, self._made = self._made, asyncio.Event()
                made.set()
            await asyncio.sleep(max(PERIOD_S, self._num_pages / MAX_WRITES_PER_S))

    def _has_news(self) -> bool:
        engine = self._service.engine
        return self._last is None or engine.gauges != self._last[1]

    def _now(self, now: float) -> ServerNow:
        engine = self._service.engine
        gauges, traffic, latency = engine.gauges, engine.traffic, engine.latency
        histograms = (latency.queue, latency.first_token, latency.between_tokens)
        drafts = (gauges.costs or StepCosts()).drafts
        pairs = zip(drafts.num_right, drafts.num_looked, strict=True)
        queue, first_token, between_tokens = self._times(now, histograms)
        steps = self._steps(now, gauges, traffic.num_output_tokens)
        return ServerNow(
            engine.is_up,
            {
                name: getattr(gauges, name)
                for name in gauges.__struct_fields__
                if name not in NOT_SHOWN
            },
            traffic.num_requests,
            traffic.num_output_tokens,
            dict(traffic.finished),
            steps,
            queue,
            first_token,
            between_tokens,
            drafts.num_draft_tokens,
            drafts.num_accepted,
            tuple(right / looked for right, looked in pairs if looked),
        )

    def _steps(self, now: float, gauges: Gauges, num_tokens: int) -> Steps | None:
        """What was done since the record before, which this one then is."""
        last, self._last = self._last, (now, gauges, num_tokens)
        if last is None or gauges.num_steps <= last[1].num_steps:
            return None
        began, before, tokens_before = last
        costs, old = gauges.costs or StepCosts(), before.costs or StepCosts()
        num = gauges.num_steps - before.num_steps
        flops, moved = costs.flops - old.flops, costs.bytes - old.bytes
        measured_s = costs.measured_s - old.measured_s
        return Steps(
            num,
            (costs.num_rows - old.num_rows) / num,
            measured_s / num,
            (costs.expected_s - old.expected_s) / num,
            (costs.ideal_s - old.ideal_s) / num,
            (costs.host_s - old.host_s) / num,
            flops / moved if moved else 0.0,
            flops / measured_s if measured_s else 0.0,
            (num_tokens - tokens_before) / (now - began),
        )

    def _times(self, now: float, histograms: Sequence[Histogram]) -> list[Times]:
        counts = tuple(tuple(histogram.counts) for histogram in histograms)
        self._windows.append((now, counts))
        while now - self._windows[0][0] > WINDOW_S:
            self._windows.popleft()
        first = self._windows[0][1]
        return [
            Times(sum(new), histogram.sum, *histogram.quantiles_since(old, (0.5, 0.99)))
            for histogram, new, old in zip(histograms, counts, first, strict=True)
        ]

    # ------------------------------------------------------------------ requests

    def _requests_of(self, who: bytes | None) -> bytes:
        if who not in self._requests:
            now = self._service.clock.now()
            of_who = (live for live in self._service.open if who in (None, _tenant_of(live)))
            chosen = itertools.islice(sorted(of_who, key=lambda live: live.arrival), MAX_REQUESTS)
            self._requests[who] = msgspec.json.encode([_request(live, now) for live in chosen])
        return self._requests[who]


def _tenant_of(live: ActiveRequest) -> bytes:
    return live.requests[0].tenant


def _request(live: ActiveRequest, now: float) -> RequestNow:
    times = list(live.times.values())
    began = min((t.started for t in times if t.started is not None), default=None)
    return RequestNow(
        live.request_id,
        began is not None,
        now - live.arrival,
        (now if began is None else began) - live.arrival,
        sum(len(answer.prompt_token_ids) for answer in live.answers),
        sum(t.num_tokens for t in times),
    )
