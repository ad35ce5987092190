"""What happened to a request, as OpenTelemetry spans? One trace each, made when it has ended and
under its caller's where there is one: its queue, prefill with the chunks, and decode.

The library is loaded only where `otlp_endpoint` asks for it. Spans say sizes and times, never text.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from starlette.types import Scope

import ridgeline
from ridgeline.clock import Clock
from ridgeline.errors import ConfigError
from ridgeline.observe.latency import SequenceTimes
from ridgeline.observe.requests import PromptChunk
from ridgeline.server.active_request import ActiveRequest
from ridgeline.server.parsed_request import ParsedRequest

TRACES_PATH = "/v1/traces"  # of OTLP over HTTP
HEADERS = (b"traceparent", b"tracestate")  # W3C Trace Context
MAX_SEQUENCES = 16  # of one request that get spans of their own
LAST_EXPORT_S = 2.0  # at the end, for what was not sent yet
NANO = 1_000_000_000

Attributes = Mapping[str, str | int | float | Sequence[str]]


class Trace:
    """One request's, from its arrival on. `is_wanted`: somebody will keep it."""

    def __init__(self, tracer: Any, span: Any, context: Any, start_ns: int) -> None:
        self.is_wanted: bool = span.is_recording()
        self._tracer, self._span, self._context = tracer, span, context
        self._start_ns = start_ns  # what the clock's zero is in nanoseconds since 1970

    def asked(self, call: ParsedRequest) -> None:
        """What is known once the body is read."""
        chat = call.is_chat
        self._span.set_attribute("gen_ai.operation.name", "chat" if chat else "text_completion")
        self._span.set_attribute("gen_ai.request.model", call.body.model)

    def end(
        self, status: int | None, error: str | None, active: ActiveRequest | None, now: float
    ) -> None:
        """`status` is what the client was sent, if anything; `error` the code of what ended it."""
        span = self._span
        if not self.is_wanted:
            return
        if active is not None:
            self._sequences(active)
            span.set_attributes(_usage(active))
        if status is not None:
            span.set_attribute("http.response.status_code", status)
        if error is not None:
            span.set_attribute("error.type", error)
        if error is not None and (status is None or status < 400 or status >= 500):
            span.set_status(import_module("opentelemetry.trace").StatusCode.ERROR, error)
        span.end(self._ns(now))

    def _sequences(self, active: ActiveRequest) -> None:
        chunks: dict[str, list[PromptChunk]] = {}
        for chunk in active.chunks:
            chunks.setdefault(chunk.request_id, []).append(chunk)
        shown = list(active.times.items())[:MAX_SEQUENCES]
        for number, (request_id, times) in enumerate(shown):
            self._sequence(number, times, chunks.get(request_id, ()))

    def _sequence(self, number: int, times: SequenceTimes, chunks: Iterable[PromptChunk]) -> None:
        """What has not begun has no span; what a request's end cut off ends with it."""
        which = {"ridgeline.sequence": number}
        started, first, last = times.started, times.first_token, times.last_token
        if times.queued is not None and started is not None:
            self._child("queue", times.queued, started, which, self._context)
        if started is not None and first is not None:
            prefill = self._child("prefill", started, first, which, self._context)
            for chunk in chunks:
                self._child("prefill chunk", chunk.began, chunk.ended, _of_chunk(chunk), prefill)
        if first is not None and last is not None:
            counts = which | {"ridgeline.output_tokens": times.num_tokens}
            self._child("decode", first, last, counts, self._context)

    def _child(
        self, name: str, began: float, ended: float, attributes: Attributes, parent: Any
    ) -> Any:
        """The context for what is inside of it."""
        span = self._tracer.start_span(
            name, context=parent, start_time=self._ns(began), attributes=attributes
        )
        span.end(self._ns(max(began, ended)))
        return import_module("opentelemetry.trace").set_span_in_context(span)

    def _ns(self, when: float) -> int:
        return self._start_ns + round(when * NANO)


def _usage(active: ActiveRequest) -> Attributes:
    answers = active.answers
    values: dict[str, str | int | float | Sequence[str]] = {
        "ridgeline.request_id": active.request_id,
        "ridgeline.sequences": len(active.times),
        "gen_ai.usage.input_tokens": sum(len(a.prompt_token_ids) for a in answers),
        "gen_ai.usage.output_tokens": sum(a.num_output_tokens for a in answers),
        "ridgeline.cached_tokens": sum(a.num_cached_tokens for a in answers),
        "ridgeline.draft_tokens.accepted": sum(a.num_accepted_tokens for a in answers),
        "ridgeline.draft_tokens.rejected": sum(a.num_rejected_tokens for a in answers),
    }
    if ends := sorted({end for answer in answers for end in answer.finish_reasons}):
        values["gen_ai.response.finish_reasons"] = ends
    if active.costs:
        values["ridgeline.device_seconds"] = sum(c.device_ns for c in active.costs.values()) / NANO
    return values


def _of_chunk(chunk: PromptChunk) -> Attributes:
    return {
        "ridgeline.start": chunk.start,
        "ridgeline.tokens": chunk.num_tokens,
        "ridgeline.step_rows": chunk.num_rows,
        "ridgeline.step_expected_seconds": chunk.expected_s,
    }


class Tracing:
    """Begins traces, and sends what has ended from a thread of its own. `provider` is a
    TracerProvider of OpenTelemetry."""

    def __init__(self, provider: Any, clock: Clock) -> None:
        self._provider = provider
        self._clock = clock
        self._tracer = provider.get_tracer("ridgeline", ridgeline.__version__)
        self._api = import_module("opentelemetry.trace")
        propagation = import_module("opentelemetry.trace.propagation.tracecontext")
        self._propagator = propagation.TraceContextTextMapPropagator()

    def begin(self, scope: Scope) -> Trace:
        now = self._clock.now()
        start_ns = time.time_ns() - round(now * NANO)
        carrier = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in HEADERS
        }
        span = self._tracer.start_span(
            f"{scope['method']} {scope['path']}",
            context=self._propagator.extract(carrier) if carrier else None,
            kind=self._api.SpanKind.SERVER,
            start_time=start_ns + round(now * NANO),
            attributes={"http.request.method": scope["method"], "url.path": scope["path"]},
        )
        return Trace(self._tracer, span, self._api.set_span_in_context(span), start_ns)

    def close(self) -> None:
        """Send what is left, if that is soon done."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(LAST_EXPORT_S)


def open_tracing(endpoint: str, clock: Clock) -> Tracing:
    """Spans go to this collector. ConfigError for what is no URL, and without the library."""
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(
            f"otlp_endpoint {endpoint!r} is no URL of a collector, as http://127.0.0.1:4318 is one"
        )
    try:
        sdk = import_module("opentelemetry.sdk.trace")
        export = import_module("opentelemetry.sdk.trace.export")
        resources = import_module("opentelemetry.sdk.resources")
        otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as problem:
        raise ConfigError(
            f"otlp_endpoint needs OpenTelemetry ({problem}): pip install 'ridgeline[otel]'"
        ) from None
    theirs = logging.getLogger("opentelemetry")  # its complaints are lines of our log
    theirs.handlers, theirs.propagate = logging.getLogger("ridgeline").handlers, False
    name = os.environ.get("OTEL_SERVICE_NAME", "ridgeline")
    resource = {"service.name": name, "service.version": ridgeline.__version__}
    provider = sdk.TracerProvider(
        resource=resources.Resource.create(resource), shutdown_on_exit=False
    )
    target = endpoint.rstrip("/").removesuffix(TRACES_PATH) + TRACES_PATH
    exporter = otlp.OTLPSpanExporter(endpoint=target)
    provider.add_span_processor(export.BatchSpanProcessor(exporter))
    return Tracing(provider, clock)
