"""What happens to a request between its last byte in and its last byte out?"""

from __future__ import annotations

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs
from starlette.types import Receive, Scope, Send

from ridgeline import registry
from ridgeline.clock import Clock
from ridgeline.config import DEFAULT_POLICY
from ridgeline.errors import RequestFault
from ridgeline.formats import POLICIES
from ridgeline.log import say
from ridgeline.router.speeds import Correction
from ridgeline.server.active_request import ActiveRequest
from ridgeline.server.admission import Admission, Ticket
from ridgeline.server.config import Limits, ServeConfig
from ridgeline.server.deadlines import PERIOD_S, check_wait, enforce
from ridgeline.server.engine_client import EngineClient
from ridgeline.server.errors import ApiError, from_fault
from ridgeline.server.http_protocol import EXTENSION
from ridgeline.server.ignored_fields import IgnoredFields, Kind
from ridgeline.server.json_body import (
    ClientGone,
    check_headers,
    parse_object,
    parsed_bytes,
    read_body,
    until_gone,
)
from ridgeline.server.model import ServedModel, epoch_s, served_model, text_folder
from ridgeline.server.parsed_request import ParsedRequest
from ridgeline.server.prepare import Prepared, fault_of, prepare, question_of
from ridgeline.server.replies import EventStream, Renderer, State
from ridgeline.server.reports import Pages, Reports
from ridgeline.server.service_manager import ServiceManager
from ridgeline.server.text_client import TextClient, TextFault
from ridgeline.server.text_wire import CheckGrammar
from ridgeline.server.tracing import Trace, Tracing
from ridgeline.server.wire import Ready
from ridgeline.startup import keep_what_is_there, process_age_s

SMALL_BODY_BYTES = 16 << 10  # parsed on the event loop; larger ones in a worker thread
MOST_COMPILED = 64  # constraints that are known to compile
SEQUENCE_BYTES = 512  # a sequence is about as much work as so many bytes
WORKER_THREADS = 2
LARGE = 1 << 30
ASIDE_REQUESTS = 128  # that are not answers, at once
ASIDE_SHARE = 8  # the part of max_held_body_bytes that they may hold beside those of answers

Body = Mapping[str, object]
T = TypeVar("T")

logger = logging.getLogger(__name__)


class Drained(ABC):
    """What takes requests until it is told to end, and then finishes those that it has."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self.limits = limits
        self.clock = clock
        self.draining = False

    @property
    @abstractmethod
    def num_open(self) -> int:
        """Requests that are being read, answered or waiting."""

    def drain(self) -> None:
        """Nothing new is taken from now on."""
        self.draining = True

    @abstractmethod
    def fail_all(self, code: str, message: str) -> None:
        """What is open ends with this error."""

    def refuse_if_draining(self) -> None:
        """Raises ApiError shutting_down."""
        if self.draining:
            raise ApiError("shutting_down", "the server is shutting down; try another", close=True)


class Service(Drained):
    """The model, the engine and everything that is being served."""

    def __init__(self, config: ServeConfig, clock: Clock, tracing: Tracing | None = None) -> None:
        super().__init__(config.limits, clock)
        self.config = config
        self.tracing = tracing
        self.admission = Admission(config.limits)
        self.aside = Admission(_aside(config.limits))  # for what is not an answer
        self.engine = EngineClient(config, clock, self.on_ready)
        self.reports = Reports(self.engine)
        policy = config.engine.policy or DEFAULT_POLICY
        self.ignored_fields = IgnoredFields(
            clock,
            strict=config.strict_fields,
            has_priorities=registry.load(POLICIES, policy, "policy").has_priorities,
        )
        self.pages = Pages()
        self.correction = Correction()
        self.manager = ServiceManager(os.environ)
        self.model: ServedModel | None = None
        self.open: set[ActiveRequest] = set()
        self.connections: Collection[object] = ()  # the HTTP side puts its own here
        self._compiled: OrderedDict[str, None] = OrderedDict()  # constraints that can be served
        self.text = TextClient(
            config.limits.tokenizer_processes, config.chat_template, config.tool_parser
        )
        self.pool = ThreadPoolExecutor(WORKER_THREADS, "worker")
        self.aside_pool = ThreadPoolExecutor(1, "aside")

    async def read_early(self) -> None:
        """Read the tokenizer beside the engine's start, if it is known where it is. Ends only by a
        ConfigError: what is unusable need not wait for the engine."""
        self.text.begin()
        if (folder := text_folder(self.config)) is not None:
            await self.text.load(folder)
        await asyncio.Event().wait()

    # ------------------------------------------------------------------ the engine's side

    async def on_ready(self, ready: Ready) -> None:
        """The engine is up (again): load the text side and set the ceilings."""
        if self.model is None or self.model.ready.model_path != ready.model_path:
            folder = text_folder(self.config, ready) or Path()
            loaded = await self.text.load(folder)
            self.model = await self.run_in_thread(served_model, self.config, ready, loaded, folder)
            keep_what_is_there()  # a thousand connections began collections of 35 ms
        if (table := self.model.table) is not None and not self.model.no_grammars:
            self.engine.teach(table, self.model.ready.end_token_ids)
        self.admission.size(
            max_num_seqs=ready.max_num_seqs, cache_tokens=ready.num_blocks * ready.block_size
        )
        say(
            logger, logging.INFO, "ready to serve", model=self.model.name,
            max_model_len=ready.max_model_len, engine_pid=ready.pid,
            process_age_s=round(process_age_s(), 2),
        )  # fmt: skip
        self.manager.ready()

    async def keep_time(self) -> None:
        """Enforce deadlines until cancelled; kill an engine whose step never ends."""
        while True:
            await asyncio.sleep(PERIOD_S)
            now = self.clock.now()
            self.manager.alive(now)
            enforce(self.open, self.limits, now, self.engine.service_rate)
            stalled = self.engine.progress.stalled_s(now)
            self.engine.overdue(now)
            if self.engine.should_kill(now):
                say(logger, logging.CRITICAL, "the engine is stuck; killing it", stalled_s=stalled)
                self.engine.dump_stacks()
                await asyncio.sleep(PERIOD_S)
                self.engine.kill()

    # ------------------------------------------------------------------ states

    def need_model(self) -> ServedModel:
        """The model, if new work is welcome. Raises ApiError starting, shutting_down or
        engine_unavailable."""
        self.refuse_if_draining()
        self.engine.refuse_if_down()
        if self.model is None:
            raise ApiError("starting", "the model is still being loaded; try again soon")
        return self.model

    def check_ready(self) -> None:
        """Raises ApiError unless a request sent now would be served."""
        self.need_model()
        if self.engine.is_stuck(self.clock.now()):
            raise ApiError("engine_unavailable", "the engine has made no progress for too long")

    def drain(self) -> None:
        super().drain()
        self.manager.stopping()

    @property
    def num_open(self) -> int:
        return self.admission.num_requests + self.aside.num_requests

    def close(self) -> None:
        for pool in (self.pool, self.aside_pool, self.reports.pool, self.pages.pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def fail_all(self, code: str, message: str) -> None:
        for active in list(self.open):
            active.fail(ApiError(code, message))

    # ------------------------------------------------------------------ one request

    async def read(
        self, scope: Scope, receive: Receive, ticket: Ticket, kinds: Sequence[Kind] = ()
    ) -> tuple[Body, int]:
        """What a request says in JSON that one of `kinds` knows, and how many bytes it was. Raises
        ApiError or ClientGone."""
        check_headers(scope)
        body = await read_body(scope, receive, ticket, self.limits)
        ticket.hold_bytes(parsed_bytes(body))
        parsed, scope["state"]["ignored"] = await self.run(len(body), self._known, body, kinds)
        return parsed, len(body)

    def _known(self, body: bytes, kinds: Sequence[Kind]) -> tuple[Body, list[str]]:
        parsed = parse_object(body, self.limits.max_json_depth)
        return self.ignored_fields.known(parsed, kinds) if kinds else (parsed, [])

    async def run(self, size: int, work: Callable[..., T], *values: object) -> T:
        """`work(*values)`: here for a small body of `size` bytes, else in a worker thread."""
        if size <= SMALL_BODY_BYTES:
            return work(*values)
        return await self.run_in_thread(work, *values)

    async def run_in_thread(self, work: Callable[..., T], *values: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.pool, work, *values)

    async def run_aside(self, work: Callable[..., T], *values: object) -> T:
        """In the one thread for what is not an answer."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.aside_pool, work, *values)

    async def answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        read: Callable[[Body, ServedModel], ParsedRequest],
        kind: Kind,
    ) -> None:
        """Serve one completion or chat request, from its body to its last byte. It arrives when
        its body is here: how fast a client sends that is not our doing."""
        if self.tracing is not None:
            scope["state"]["trace"] = self.tracing.begin(scope)
        self.need_model()
        with self.admission.open(scope["state"]["tenant"]) as ticket:
            body, size = await self.read(scope, receive, ticket, (kind,))
            arrival = self.clock.now()
            work = self._answer(scope, send, read, body, size, ticket, arrival)
            await unless_gone(receive, work)

    async def _understand(
        self,
        scope: Scope,
        read: Callable[[Body, ServedModel], ParsedRequest],
        body: Body,
        size: int,
        arrival: float,
    ) -> tuple[ParsedRequest, Prepared]:
        """Validate and tokenize. Raises ApiError."""
        model = self.need_model()
        request_id, tenant = scope["state"]["request_id"], scope["state"]["tenant"]
        call = await self.run(size, read, body, model)
        encoded: tuple[bytes, ...] = ()
        if (question := question_of(call, model)) is not None:
            try:
                encoded = await self.text.ids(question, tenant.name, request_id)
            except TextFault as fault:
                raise fault_of(call, fault) from None
        if call.sampling.structured_outputs:
            await self._check_grammar(call, model, tenant.name, request_id)
        size += sum(map(len, encoded)) + SEQUENCE_BYTES * call.num_sequences
        prepared = await self.run(size, prepare, call, model, encoded, request_id, tenant, arrival)
        return call, prepared

    async def _check_grammar(
        self, call: ParsedRequest, model: ServedModel, tenant: bytes, request_id: str
    ) -> None:
        """Raises ApiError for what cannot be compiled, within limits, by a process of its own."""
        param, constraint = "structured_outputs", call.sampling.constraint
        if constraint in self._compiled:
            return
        try:
            if why := model.no_grammars:
                message = f"{param}: not served here: {why}"
                raise RequestFault(message, param=param, code="unsupported_parameter")
            ends = model.ready.end_token_ids
            question = CheckGrammar(constraint, model.ready.vocab_size, ends)
            await self.text.ids(question, tenant, request_id)
        except RequestFault as fault:
            raise from_fault(fault, call.rename) from None
        self._compiled[constraint] = None
        if len(self._compiled) > MOST_COMPILED:
            self._compiled.popitem(last=False)

    async def _answer(
        self,
        scope: Scope,
        send: Send,
        read: Callable[[Body, ServedModel], ParsedRequest],
        body: Body,
        size: int,
        ticket: Ticket,
        arrival: float,
    ) -> None:
        call, prepared = await self._understand(scope, read, body, size, arrival)
        model, request_id = self.need_model(), scope["state"]["request_id"]
        ticket.reserve(prepared.num_sequences, prepared.num_prompt_tokens)
        trace: Trace | None = scope["state"].get("trace")
        if trace is not None:
            trace.asked(call)
        active = ActiveRequest(
            prepared.answers,
            streams=call.body.stream,
            max_bytes=self.limits.max_stream_bytes,
            arrival=arrival,
            wants_cost=call.body.include_cost,
            wants_chunks=trace is not None and trace.is_wanted,
            request_id=request_id,
        )
        scope["state"]["active"] = active
        active.cut = _abort_of(scope)
        renderer = _renderer(call, prepared, model, request_id, self.config.price_per_hour)
        service_rate, gauges = self.engine.service_rate, self.engine.gauges
        num_before = max(
            gauges.num_waiting, self.engine.progress.num_pending - model.ready.max_num_seqs
        )
        most = max(answer.sampling.max_tokens or 0 for answer in prepared.answers)
        check_wait(active, self.limits, service_rate, num_before, most)
        self.open.add(active)
        try:
            await self._submit(active, call)
            if call.body.stream:
                await self._stream(active, call, renderer, EventStream(send), scope)
            else:
                await self._send_whole(active, call, renderer, send)
        finally:
            self.engine.abandon(active)
            self.open.discard(active)

    async def _submit(self, active: ActiveRequest, call: ParsedRequest) -> None:
        self.need_model()
        try:
            await self.engine.submit(active)
        except RequestFault as fault:
            raise from_fault(fault, call.rename) from None

    async def _send_whole(
        self, active: ActiveRequest, call: ParsedRequest, renderer: Renderer, send: Send
    ) -> None:
        while active.error is None and not active.is_finished:
            await active.changed.wait()
            active.changed.clear()
        if active.error is not None:
            raise active.error
        is_large = call.top_logprobs is not None or call.sampling.prompt_logprobs is not None
        size = LARGE if is_large else 0  # log-probabilities take long to write out
        await send_json(send, await self.run(size, renderer.whole, active))

    async def _stream(
        self,
        active: ActiveRequest,
        call: ParsedRequest,
        renderer: Renderer,
        stream: EventStream,
        scope: Scope,
    ) -> None:
        while active.error is None:
            await active.changed.wait()
            active.changed.clear()
            if active.error is not None:
                break
            await self._send_changes(active, call, renderer, stream)
            if stream.state is State.ENDED:
                return
        error = active.error
        if error is not None:
            self.engine.traffic.refused[error.code] += stream.state is State.OPEN
            if stream.state is State.OPEN and (connection := _connection(scope)) is not None:
                connection.close_after_response()
            await stream.fail(error)

    async def _send_changes(
        self, active: ActiveRequest, call: ParsedRequest, renderer: Renderer, stream: EventStream
    ) -> None:
        pieces = active.take()
        finished = active.is_finished
        data = b"".join(renderer.piece(piece, active) for piece in pieces)
        if active.answered and not renderer.opened:
            data = renderer.opening(len(active.answers) * call.sampling.n) + data
        active.sending_since = self.clock.now()
        if finished:
            wants_usage = call.body.stream and call.stream_options.include_usage
            await stream.finish(data + (renderer.usage(active) if wants_usage else b""))
        elif data:
            await stream.write(data)
        elif active.keepalive_due:
            await stream.keep_alive()
        active.keepalive_due = False
        active.sending_since, active.last_sent = None, self.clock.now()


def _aside(limits: Limits) -> Limits:
    """Of requests that are not answers: their own, so that they take no answer's place."""
    held = max(limits.max_body_bytes, limits.max_held_body_bytes // ASIDE_SHARE)
    return structs.replace(
        limits, max_queued_sequences=ASIDE_REQUESTS // 2, max_held_body_bytes=held
    )


def _renderer(
    call: ParsedRequest,
    prepared: Prepared,
    model: ServedModel,
    request_id: str,
    price_per_hour: float | None,
) -> Renderer:
    prefix = "chatcmpl-" if call.is_chat else "cmpl-"
    reply_id = prefix + request_id.removeprefix("req-")
    prompt = prepared.answers[0].prompt_token_ids if call.is_chat else ()
    return Renderer(
        call,
        reply_id,
        epoch_s(),
        model.name,
        model.texts,
        prepared.prompt_texts,
        price_per_hour,
        model.message_reader(call, prompt),
    )


def _connection(scope: Scope) -> Any:
    return scope.get("extensions", {}).get(EXTENSION)


def _abort_of(scope: Scope) -> Callable[[], None] | None:
    connection = _connection(scope)
    return None if connection is None else connection.abort


async def send_json(send: Send, body: bytes, status: int = 200) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Cancels it and raises ClientGone as soon as the client hangs up."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
