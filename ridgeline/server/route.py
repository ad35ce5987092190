"""How does a request get to one of several servers, and its answer back? The router as a proxy.

A request is read whole, since its model and its prompt decide where it goes; its answer passes
through piece by piece. It is tried elsewhere only while nothing of an answer was passed on, and at
most one server at a time works on it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from random import Random

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

import ridgeline
from ridgeline import registry
from ridgeline.clock import Clock, WallClock
from ridgeline.declared import check_fields
from ridgeline.errors import ConfigError
from ridgeline.log import say
from ridgeline.observe.latency import Traffic
from ridgeline.router import POLICIES
from ridgeline.router.backend import Arrivals, Backend, Load, Placed, RetryBudget
from ridgeline.router.policies import NoReplica, RequestView, RouterPolicy
from ridgeline.router.prefixes import Names, Prefixes, names_of
from ridgeline.server.admission import Admission
from ridgeline.server.auth import KEY_VARIABLE, OPEN, load_keys
from ridgeline.server.config import Listening, RouteConfig
from ridgeline.server.errors import CODES, ApiError, quote
from ridgeline.server.hosts import HostGuard, check_bind
from ridgeline.server.http_protocol import EXTENSION, READY_PATHS
from ridgeline.server.json_body import check_headers, header_values, parse_object, read_body
from ridgeline.server.lifecycle import (
    Doors,
    check_front,
    hardened,
    listen,
    loop_factory,
    url_of,
    uvicorn_config,
    with_open_files,
)
from ridgeline.server.metrics_page import CONTENT_TYPE
from ridgeline.server.middleware import Middleware, with_origins
from ridgeline.server.outlet import never_block
from ridgeline.server.route_metrics import RouteMetrics
from ridgeline.server.service import SMALL_BODY_BYTES, Drained, unless_gone
from ridgeline.server.static_files import StaticPages
from ridgeline.server.upstream import (
    Connections,
    Exchange,
    Headers,
    Lost,
    of_message,
    read_address,
    request_bytes,
)

BACKEND_KEY_VARIABLE = "RIDGELINE_BACKEND_KEY"  # for what the router asks in its own name
POLL_S, FOREIGN_POLL_S, PROBE_S = 0.25, 2.0, 2.0
MODELS_S = 30.0  # between two looks at the models of a backend that is up
MAX_REFUSAL_BYTES = 64 << 10
MAX_OWN_BYTES = 1 << 20  # of an answer to the router itself
TAIL_BYTES = 4 << 10  # of an answer, where its usage stands
MAX_LOST = 2  # servers that may vanish under one request: it may be what ends them
BUSY = frozenset({"overloaded", "queue_timeout", "rate_limit_exceeded"})  # of a healthy server
NOT_NOW = frozenset({"starting", "shutting_down"})  # of one that will say when it is ready
EVENTS = b"text/event-stream"
# Strings in JSON have their quotes escaped, so no answer's text looks like this.
PROMPT_TOKENS = re.compile(rb'"prompt_tokens"\s*:\s*(\d{1,9})')
CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,9})')

logger = logging.getLogger(__name__)


class Asked(msgspec.Struct, frozen=True):
    """What a body says that matters to its way."""

    model: str | None
    streams: bool
    names: Names
    num_characters: int


class Refusal(msgspec.Struct, frozen=True):
    """An answer that says to ask again, elsewhere or later."""

    status: int
    headers: Headers
    body: bytes

    @property
    def code(self) -> str:
        """Of a server of ours; "" else."""
        with suppress(msgspec.MsgspecError, AttributeError, KeyError, TypeError):
            code = msgspec.json.decode(self.body)["error"]["code"]
            return code if code in CODES else ""
        return ""


def read_asked(body: bytes, max_depth: int, owner: bytes) -> Asked:
    """Raises ApiError for what is no JSON object. The prompt is taken as it would be cached: tools,
    then messages, or the text or token ids; and by key, since caches are apart by key."""
    value = parse_object(body, max_depth)
    model, parts = value.get("model"), (value.get("tools"), value.get("messages"))
    prompt = value.get("prompt", parts if parts[1] is not None else "")
    text = prompt if isinstance(prompt, str) else msgspec.json.encode(prompt).decode()
    return Asked(
        model if isinstance(model, str) and model else None,
        value.get("stream") is True,
        names_of(text, owner),
        len(text),
    )


class RouterService(Drained):
    """The backends, and what is open at them."""

    def __init__(self, config: RouteConfig, clock: Clock, own_key: str | None = None) -> None:
        super().__init__(config.limits, clock)
        self.own_key = own_key
        self.traffic = Traffic()
        self.admission = Admission(config.limits)
        self.admission.max_sequences = config.limits.max_connections
        self.policy: RouterPolicy = registry.load(POLICIES, config.policy, "router policy")()
        self.rng = Random()
        self.budget = RetryBudget()
        self.backends: list[Backend] = []
        self.connections: dict[str, Connections] = {}
        self._prefix_bytes = config.prefix_bytes
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._is_watching = False
        self.cards: dict[str, list[dict[str, object]]] = {}  # of /v1/models, by backend
        self.arrivals = Arrivals(config.need_window_s)
        self.metrics = RouteMetrics(self.backends, clock, self.traffic, self.need)
        self._exchanges: set[Exchange] = set()
        for url in config.backends:
            if not self.add(url):
                raise ConfigError(f"backend {url} is given twice; leave one out")

    def add(self, url: str) -> bool:
        """One more backend, unless it is known. Raises ConfigError."""
        address = read_address(url)
        if address.url in self.connections:
            return False
        self.connections[address.url] = Connections(address)
        self.backends.append(Backend(address.url, Prefixes(self._prefix_bytes)))
        if self._is_watching:
            self._watch(self.backends[-1])
        return True

    def remove(self, url: str) -> None:
        """It is gone for good."""
        (backend,) = (one for one in self.backends if one.url == url)
        self.backends.remove(backend)
        self.cards.pop(url, None)
        self._watchers.pop(url).cancel()
        self.connections.pop(url).close()

    def need(self) -> float | None:
        """How many servers what came of late would keep busy."""
        loads = [one.load for one in self.backends if one.is_up and one.load is not None]
        return self.arrivals.need(self.clock.now(), loads)

    def begin(self) -> None:
        """Watch the backends, in the running loop."""
        self._is_watching = True
        for backend in self.backends:
            self._watch(backend)

    def _watch(self, backend: Backend) -> None:
        self._watchers[backend.url] = asyncio.create_task(self.watch(backend))

    async def close(self) -> None:
        for task in self._watchers.values():
            task.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        for connections in self.connections.values():
            connections.close()

    @property
    def num_open(self) -> int:
        return self.admission.num_requests

    def fail_all(self, code: str, message: str) -> None:
        for exchange in list(self._exchanges):
            exchange.abort()

    # ------------------------------------------------------------------ what is known

    async def watch(self, backend: Backend) -> None:
        """Ask how it stands, again and again, until cancelled."""
        models_at = -MODELS_S
        while True:
            was_up, now = backend.is_up, self.clock.now()
            try:
                if not was_up:
                    await self._ask_health(backend)
                if not was_up or now - models_at > MODELS_S:
                    await self._ask_models(backend)
                    models_at = now
                await self._ask_load(backend)
                backend.is_up = True
            except Lost as lost:
                backend.lost(str(lost))
            except ApiError as refused:
                backend.is_up, backend.reason = False, refused.message
            except Exception:
                backend.lost("what it answers cannot be read")
                say(logger, logging.ERROR, "a backend was not understood", trace=True)
            if was_up != backend.is_up:
                why = "ready" if backend.is_up else backend.reason
                say(logger, logging.INFO, "backend", url=backend.url, state=why)
            await asyncio.sleep(
                FOREIGN_POLL_S if backend.is_up and backend.load is None else POLL_S
            )

    async def _ask_health(self, backend: Backend) -> None:
        """Of a server of ours; another may not have the path."""
        status, body = await self._fetch(backend, b"/health/ready")
        if status == 503:
            raise _not_ready(status, body)

    async def _ask_models(self, backend: Backend) -> None:
        status, body = await self._fetch(backend, b"/v1/models")
        if status != 200:
            raise _not_ready(status, body)
        cards = msgspec.json.decode(body)["data"]
        self.cards[backend.url] = [card for card in cards if isinstance(card.get("id"), str)]
        backend.models = tuple(str(card["id"]) for card in self.cards[backend.url])

    async def _ask_load(self, backend: Backend) -> None:
        status, body = await self._fetch(backend, b"/load")
        if status == 200:
            try:
                backend.load = msgspec.json.decode(body, type=Load)
            except msgspec.MsgspecError:
                backend.load = None  # another server's page
        elif status in (401, 403, 503):
            raise _not_ready(status, body)
        else:
            backend.load = None

    async def _fetch(self, backend: Backend, path: bytes) -> tuple[int, bytes]:
        connections = self.connections[backend.url]
        headers = [(b"accept", b"application/json")]
        if self.own_key:
            headers.append((b"authorization", b"Bearer " + self.own_key.encode()))
        try:
            async with asyncio.timeout(PROBE_S):
                exchange = await connections.ask(
                    request_bytes(connections.address, b"GET", path, headers)
                )
                try:
                    return exchange.status, await exchange.rest(MAX_OWN_BYTES)
                finally:
                    connections.give_back(exchange)
        except TimeoutError:
            raise Lost(f"{path.decode()} is not answered within {PROBE_S:g} s") from None

    # ------------------------------------------------------------------ states

    def check_ready(self) -> None:
        """Raises ApiError unless some backend would take a request."""
        self.refuse_if_draining()
        now = self.clock.now()
        if not any(backend.is_ready(now) for backend in self.backends):
            reasons = "; ".join(f"{one.url}: {self._why(one)}" for one in self.backends)
            raise ApiError("engine_unavailable", f"no backend is ready: {reasons or 'none yet'}")

    @staticmethod
    def _why(backend: Backend) -> str:
        return "it failed of late" if backend.is_up else backend.reason

    def pool(self, model: str | None) -> list[Backend]:
        """The backends that serve it. Raises ApiError."""
        known = {name for backend in self.backends for name in backend.models}
        if model is None and len(known) == 1:
            (model,) = known
        if model is None and known:
            raise ApiError(
                "missing_required_parameter", "model is missing, and there are several", "model"
            )
        found = [backend for backend in self.backends if model in backend.models]
        if not found and known and all(backend.models for backend in self.backends):
            raise ApiError("model_not_found", f"no backend serves {quote(model)}", "model")
        return found

    # ------------------------------------------------------------------ one request

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one POST on, from its body to the last byte of its answer."""
        self.refuse_if_draining()
        with self.admission.open(scope["state"]["tenant"]) as ticket:
            check_headers(scope)
            body = await read_body(scope, receive, ticket, self.limits)
            names = (b"authorization", b"x-api-key")
            owner = b"\n".join(key for name in names for key in header_values(scope, name))
            depth = self.limits.max_json_depth
            if len(body) <= SMALL_BODY_BYTES:
                asked = read_asked(body, depth, owner)
            else:
                asked = await asyncio.to_thread(read_asked, body, depth, owner)
            await unless_gone(receive, self._answer(scope, send, body, asked))

    async def _answer(self, scope: Scope, send: Send, body: bytes, asked: Asked) -> None:
        self.budget.request()
        tried: set[Backend] = set()
        num_lost = 0
        refusal: Refusal | None = None
        while True:
            self.refuse_if_draining()
            try:
                backend, placed = self._place(asked, tried)
            except NoReplica:
                if refusal is not None:
                    return await self._send_refusal(refusal, send)
                raise ApiError(
                    "engine_unavailable", "no server of this model can be reached; try again soon"
                ) from None
            if not tried:
                self.arrivals.add(self.clock.now(), placed.num_to_read)
            tried.add(backend)
            attempt = Attempt(self, backend, placed, scope, send, body)
            try:
                refusal = await attempt.run()
            except Lost as lost:
                num_lost += not lost.is_unheard
                say(logger, logging.WARNING, "no answer", backend=backend.url, reason=lost)
                if num_lost >= MAX_LOST:
                    raise ApiError(
                        "engine_unavailable", "two servers ended on this request; try again soon"
                    ) from None
                self.metrics.retries.labels("no answer").inc()
                continue
            if refusal is None:
                return
            num_lost += refusal.code == "engine_unavailable"  # perhaps by this very request
            is_free = refusal.code in NOT_NOW or refusal.code == "engine_unavailable"
            if num_lost >= MAX_LOST or not (is_free or self.budget.take()):
                return await self._send_refusal(refusal, send)
            self.metrics.retries.labels(refusal.code or str(refusal.status)).inc()

    def _place(self, asked: Asked, tried: set[Backend]) -> tuple[Backend, Placed]:
        """Raises NoReplica, or ApiError."""
        now = self.clock.now()
        pool = [backend for backend in self.pool(asked.model) if backend not in tried]
        sizes = [backend.num_tokens(asked.num_characters) for backend in pool]
        views = [
            backend.view(asked.names, size, now) for backend, size in zip(pool, sizes, strict=True)
        ]
        request = RequestView(max(sizes, default=1))
        chosen = self.policy.choose(request, views, self.rng)
        backend, view = pool[chosen], views[chosen]
        placed = backend.place(asked.names, asked.num_characters, view, now, streams=asked.streams)
        return backend, placed

    async def _send_refusal(self, refusal: Refusal, send: Send) -> None:
        headers = [*refusal.headers, (b"content-length", b"%d" % len(refusal.body))]
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": refusal.body, "more_body": False})

    def opened(self, exchange: Exchange) -> None:
        self._exchanges.add(exchange)

    def closed(self, exchange: Exchange) -> None:
        self._exchanges.discard(exchange)


class Attempt:
    """One request at one backend."""

    def __init__(
        self, service: RouterService, backend: Backend, placed: Placed, scope: Scope, send: Send,
        body: bytes,
    ) -> None:  # fmt: skip
        self._service = service
        self._backend = backend
        self._placed = placed
        self._scope = scope
        self._send = send
        self._body = body
        self._has_passed = False  # something of an answer to the client

    async def run(self) -> Refusal | None:
        """The refusal, if that is what came and nothing of it was passed on. Raises Lost before a
        byte was passed on; ApiError."""
        service, backend, placed = self._service, self._backend, self._placed
        loop, limits = asyncio.get_running_loop(), service.limits
        overdue = None
        if placed.streams:
            overdue = loop.call_later(placed.late_at_s, self._is_late)
        try:
            async with asyncio.timeout(limits.queue_timeout_s + limits.run_timeout_s):
                return await self._run()
        except Lost:
            backend.failed(placed, service.clock.now())
            raise
        except TimeoutError:
            raise ApiError("deadline_exceeded", "the server did not finish in time") from None
        finally:
            if overdue is not None:
                overdue.cancel()
            backend.ended(placed)

    async def _run(self) -> Refusal | None:
        service, scope = self._service, self._scope
        connections = service.connections[self._backend.url]
        path = scope.get("raw_path") or scope["path"].encode()
        if scope["query_string"]:
            path = path.partition(b"?")[0] + b"?" + scope["query_string"]
        headers = of_message(scope["headers"], {b"host", b"content-length", b"expect"})
        exchange = await connections.ask(
            request_bytes(connections.address, b"POST", path, headers, self._body)
        )
        service.opened(exchange)
        try:
            kept = of_message(exchange.headers, {b"date", b"server"})
            names = {name for name, _ in kept}
            if exchange.status == 503 or (exchange.status == 429 and b"retry-after" in names):
                body = await exchange.rest(MAX_REFUSAL_BYTES)
                kept = [(name, value) for name, value in kept if name != b"content-length"]
                return self._refused(Refusal(exchange.status, kept, body))
            await self._pass_on(exchange, kept)
            return None
        finally:
            service.closed(exchange)
            connections.give_back(exchange)

    def _refused(self, refusal: Refusal) -> Refusal:
        backend, now = self._backend, self._service.clock.now()
        self._service.metrics.answered(backend, refusal.status)
        if refusal.status == 429 or refusal.code in BUSY:
            backend.breaker.succeeded()
        elif refusal.code in NOT_NOW:
            backend.is_up, backend.reason = False, refusal.code
        else:
            backend.failed(self._placed, now)
        return refusal

    async def _pass_on(self, exchange: Exchange, headers: Headers) -> None:
        backend, placed, service = self._backend, self._placed, self._service
        is_events = dict(headers).get(b"content-type", b"").startswith(EVENTS)
        data = await exchange.read()  # an answer without a byte may still be tried elsewhere
        await self._write(
            {"type": "http.response.start", "status": exchange.status, "headers": headers}
        )
        self._has_passed = True
        service.metrics.answered(backend, exchange.status)
        tail = b""
        try:
            while data:
                if not placed.has_begun and not (is_events and data.startswith(b":")):
                    self._begun(is_fine=exchange.status < 400)
                await self._write({"type": "http.response.body", "body": data, "more_body": True})
                tail = (tail + data)[-TAIL_BYTES:]
                data = await exchange.read()
        except Lost as lost:
            backend.failed(placed, service.clock.now())
            say(logger, logging.WARNING, "an answer broke off", backend=backend.url, reason=lost)
            if not is_events:
                self._hang_up()
                return
            code = "shutting_down" if service.draining else "engine_unavailable"
            error = ApiError(code, "the server of this answer is gone; ask again")
            await self._write({"type": "http.response.body", "body": b"\n\n" + error.event()})
            return
        await self._write({"type": "http.response.body", "body": b"", "more_body": False})
        if not placed.has_begun:
            self._begun(is_fine=exchange.status < 400)
        self._learn(tail)

    def _begun(self, *, is_fine: bool) -> None:
        """A refusal of the request says that the backend is well, not how fast it is."""
        backend, placed, now = self._backend, self._placed, self._service.clock.now()
        if not is_fine:
            placed.has_begun = True
            backend.breaker.succeeded()
            return
        backend.begun(placed, now)
        if placed.streams:
            self._service.metrics.first_token(placed, now)

    def _learn(self, tail: bytes) -> None:
        prompt, cached = PROMPT_TOKENS.findall(tail), CACHED_TOKENS.findall(tail)
        if prompt:
            num_cached = int(cached[-1]) if cached else None
            self._backend.used(self._placed, int(prompt[-1]), num_cached)
            self._service.metrics.prompt(self._backend, int(prompt[-1]), num_cached or 0)

    def _is_late(self) -> None:
        if not self._placed.has_begun:
            self._backend.breaker.late(self._service.clock.now())
            say(
                logger, logging.WARNING, "a first token is late", backend=self._backend.url,
                predicted_s=round(self._placed.predicted_s, 3),
            )  # fmt: skip

    async def _write(self, message: dict[str, object]) -> None:
        """A client that leaves its answer unread is cut off."""
        try:
            async with asyncio.timeout(self._service.limits.write_timeout_s):
                await self._send(message)
        except TimeoutError:
            self._hang_up()
            raise ApiError("slow_client", "the answer was left unread") from None

    def _hang_up(self) -> None:
        self._scope["extensions"][EXTENSION].abort()


def _not_ready(status: int, body: bytes) -> ApiError:
    if status in (401, 403):
        return ApiError(
            "engine_unavailable", f"it asks for a key: set {BACKEND_KEY_VARIABLE} to one of its own"
        )
    code = Refusal(status, [], body).code
    return ApiError("engine_unavailable", f"it answers {status} {code}".rstrip())


# ---------------------------------------------------------------------- the application


def make_route_app(
    service: RouterService, config: RouteConfig, pages: StaticPages | None = None
) -> ASGIApp:
    keys = load_keys(config.api_key_file, os.environ.get(KEY_VARIABLE))
    check_bind(
        config.host,
        has_keys=bool(keys),
        allow_anyone=config.allow_anyone_on_the_network_without_a_key,
    )
    service.admission.num_keys = len(keys)

    def get(path: str, right: str, answer: Callable[[Request], Response]) -> Route:
        async def endpoint(request: Request) -> Response:
            if right != OPEN:
                request.scope["state"]["tenant"].need(right)
            return answer(request)

        return Route(path, endpoint, methods=["GET"])

    def models(request: Request) -> Response:
        return _json({"object": "list", "data": list(_merged(service).values())})

    def model(request: Request) -> Response:
        card = _merged(service).get(name := request.path_params["name"])
        if card is None:
            raise ApiError("model_not_found", f"no backend serves {quote(name)}", "model")
        return _json(card)

    def ready(request: Request) -> Response:
        service.check_ready()
        return _json({"status": "ready"})

    def metrics(request: Request) -> Response:
        return Response(service.metrics.page(), headers={"content-type": CONTENT_TYPE})

    gets = Router(
        [
            get("/v1/models", "any", models),
            get("/v1/models/{name:path}", "any", model),
            get("/health/live", OPEN, lambda request: _json({"status": "live"})),
            *(get(path, OPEN, ready) for path in READY_PATHS),
            get("/metrics", "metrics", metrics),
            get("/version", "any", lambda request: _json({"version": ridgeline.__version__})),
        ],
        redirect_slashes=False,
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        is_passed_on = scope["path"].startswith("/v1/") or scope["path"] in TOKENIZING
        if scope["method"] == "POST" and is_passed_on:
            scope["state"]["tenant"].need(TOKENIZING.get(scope["path"], "answer"))
            await service.forward(scope, receive, send)
        else:
            await gets(scope, receive, send)

    hosts = HostGuard(config.host, config.allowed_hosts)
    paths = [("GET", route.path) for route in gets.routes if isinstance(route, Route)]
    paths += [("POST", path) for path in (*ANSWERING, *TOKENIZING)]
    made = Middleware(
        app, keys, hosts, service.traffic, service.clock, pages, paths, config.root_path
    )
    return with_origins(made, config.allowed_origins)


ANSWERING = ("/v1/completions", "/v1/chat/completions")
TOKENIZING: Mapping[str, str] = {"/tokenize": "tokenize", "/detokenize": "tokenize"}


def _merged(service: RouterService) -> dict[str, dict[str, object]]:
    """The card of each model, by name: that of the first backend which has it."""
    found: dict[str, dict[str, object]] = {}
    for backend in service.backends:
        for card in service.cards.get(backend.url, ()):
            found.setdefault(str(card["id"]), card)
    return found


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


# ---------------------------------------------------------------------- the process


def route(config: RouteConfig, on_listening: Callable[[str], None] | None = None) -> int:
    """Route until told to stop; the exit code. Raises ConfigError."""
    never_block()
    check_fields(config)
    check_fields(config.limits)
    check_front(config)
    config = msgspec.structs.replace(config, limits=with_open_files(config.limits))
    with hardened(), listen(config.host, config.port) as sock:
        service = RouterService(config, WallClock(), os.environ.get(BACKEND_KEY_VARIABLE))
        app = make_route_app(service, config)
        if on_listening is not None:
            on_listening(url_of(sock, config))
        doors = RouterDoors(service)
        doors.open(sock, app, config)
        return doors.run_forever()


class RouterDoors(Doors):
    """The event loop's main task."""

    def __init__(self, service: RouterService) -> None:
        super().__init__(service)
        self._service = service

    def open(self, sock: socket.socket, app: ASGIApp, config: Listening) -> None:
        self.add(sock, uvicorn_config(self._service.limits, app, config))

    def run_forever(self) -> int:
        """Until told to stop; the exit code."""
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(self._run())

    async def _run(self) -> int:
        service, http = self._service, self._begin()
        service.begin()
        work = asyncio.create_task(self.work())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((http, work, stop), return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            for task in (work, stop):
                task.cancel()
            self._close_doors()
            code = await self.end_work()
            await asyncio.gather(http, work, stop, service.close(), return_exceptions=True)
        if work.done() and not work.cancelled():
            work.result()
        return code

    async def work(self) -> None:
        """What goes on beside the answers; they end when it does."""
        await asyncio.Event().wait()

    async def end_work(self) -> int:
        """After the last answer; the exit code."""
        return 0
