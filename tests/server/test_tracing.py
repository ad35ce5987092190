"""Does each request become one trace that says where its time went, for those who ask for it?"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ridgeline.clock import WallClock
from ridgeline.errors import ConfigError
from ridgeline.server.tracing import open_tracing
from tests.server.running import Running, fake_config, running

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = f"00-{TRACE_ID}-b7ad6b7169203331-0"  # and whether it is kept: 1 or 0


@dataclass(frozen=True)
class Span:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began: int
    ended: int
    failed: bool
    values: dict[str, Any]


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP, on the loopback."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> list[Span]:
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        found = []
        for body in self.bodies:
            for resource in service.ExportTraceServiceRequest.FromString(body).resource_spans:
                assert values(resource.resource.attributes)["service.name"] == "ridgeline"
                found += [read(s) for scope in resource.scope_spans for s in scope.spans]
        return sorted(found, key=lambda span: (span.began, -span.ended))


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Not to the test's output."""


def values(attributes: Any) -> dict[str, Any]:
    found = {}
    for attribute in attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        if kind == "array_value":
            value = [item.string_value for item in value.values]
        found[attribute.key] = value
    return found


def read(span: Any) -> Span:
    return Span(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == span.status.STATUS_CODE_ERROR,
        values(span.attributes),
    )


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: Running, headers: dict[str, str] | None = None, **body: Any) -> int:
    with server.http as http:
        body = {"model": "fake", "max_tokens": 5} | body
        return http.post("/v1/completions", json=body, headers=headers or {}).status_code


def test_a_trace_of_each_request(collector: Collector, fake_model: Path, tmp_path: Path) -> None:
    config = fake_config(fake_model, otlp_endpoint=collector.url)
    with running(config, tmp_path) as server:
        assert ask(server, {"traceparent": CALLER + "1"}, prompt="secret " * 50) == 200
        assert ask(server, {"traceparent": CALLER + "0"}, prompt="not kept") == 200
        assert ask(server, {"traceparent": "nonsense"}, prompt="a", n=2, stop=["zzz"]) == 200
        assert ask(server, prompt="!nan") == 500
        assert ask(server, prompt="a", temperature=-1) == 400
        assert server.stop() == 0  # what is left is sent
        log = server.log.read_text()
    spans = collector.spans()
    assert not any(b"secret" in body for body in collector.bodies)
    assert "Traceback" not in log
    roots = [span for span in spans if span.name == "POST /v1/completions"]
    assert len(roots) == 4
    whole, twice, failed, refused = roots
    see_a_whole_one(whole, [span for span in spans if span.trace_id == TRACE_ID])
    assert twice.parent_id == ""
    inside = [span.name for span in spans if span.parent_id == twice.span_id]
    assert sorted(inside) == ["decode", "decode", "prefill", "prefill", "queue"]
    assert (failed.failed, failed.values["error.type"]) == (True, "internal_error")
    assert failed.values["http.response.status_code"] == 500
    assert (refused.failed, refused.values["error.type"]) == (False, "invalid_value")


def see_a_whole_one(root: Span, spans: list[Span]) -> None:
    """Its prompt of 351 tokens is read in steps of 256 at most."""
    assert root.parent_id == "b7ad6b7169203331"
    assert not root.failed
    names = ["POST /v1/completions", "queue", "prefill", "prefill chunk", "prefill chunk", "decode"]
    assert [span.name for span in spans] == names
    _, queue, prefill, one, two, decode = spans
    assert {span.parent_id for span in (queue, prefill, decode)} == {root.span_id}
    assert {span.parent_id for span in (one, two)} == {prefill.span_id}
    assert root.began <= queue.began <= queue.ended == prefill.began <= one.began
    assert one.ended <= two.began <= two.ended <= prefill.ended == decode.began
    assert decode.began <= decode.ended <= root.ended
    starts = [(c.values["ridgeline.start"], c.values["ridgeline.tokens"]) for c in (one, two)]
    assert starts == [(0, 256), (256, 95)]
    assert one.values["ridgeline.step_expected_seconds"] > 0
    assert decode.values["ridgeline.output_tokens"] == 5
    shown = root.values
    assert shown["gen_ai.usage.input_tokens"] == 351
    assert shown["gen_ai.usage.output_tokens"] == 5
    assert shown["gen_ai.response.finish_reasons"] == ["length"]
    assert shown["gen_ai.operation.name"] == "text_completion"


def test_a_collector_that_is_gone_harms_nobody(fake_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    config = fake_config(fake_model, otlp_endpoint="http://127.0.0.1:9")
    with running(config, tmp_path) as server:
        assert ask(server, prompt="a") == 200
        assert server.stop() == 0
        lines = server.log.read_text().splitlines()
    assert all(line.startswith("20") for line in lines)  # its complaints are lines of our log


def test_without_the_library_the_way_to_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'ridgeline\[otel\]'"):
        open_tracing("http://127.0.0.1:4318", WallClock())


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:4318", "ftp://host", "http://"])
def test_what_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        open_tracing(endpoint, WallClock())
