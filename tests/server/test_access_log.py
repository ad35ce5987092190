"""Does the log say of each request what came of it, under the id that its client got, without a
word of what was asked or answered?"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import Running, fake_config, running, until

SECRET = "!slow the-secret-words"


@pytest.fixture(scope="module")
def server(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = fake_config(fake_model, log_format="json", access_log=True)
    with running(config, tmp_path_factory.mktemp("server")) as started:
        yield started


def rows(server: Running) -> list[dict[str, Any]]:
    lines = server.log.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def access(server: Running, **wanted: object) -> dict[str, Any]:
    """The one access line with these values, as soon as it is there."""

    def found() -> list[dict[str, Any]]:
        mine = (row for row in rows(server) if row["logger"] == "ridgeline.access")
        return [row for row in mine if wanted.items() <= row.items()]

    until(lambda: bool(found()), f"an access line with {wanted}")
    [row] = found()
    return row


def test_a_whole_answer_and_a_stream(server: Running) -> None:
    body = {"model": "fake", "prompt": SECRET, "max_tokens": 5}
    with server.http as http:
        for stream in (False, True):
            reply = http.post("/v1/completions?key=hidden", json=body | {"stream": stream})
            row = access(server, request_id=reply.headers["x-request-id"])
            assert (row["method"], row["path"]) == ("POST", "/v1/completions")
            assert (row["status"], row["finish_reason"], row["client"]) == (
                200,
                "length",
                "127.0.0.1",
            )
            assert (row["prompt_tokens"], row["output_tokens"]) == (len(SECRET) + 1, 5)
            assert 0 <= row["queue_seconds"] <= row["first_token_seconds"] <= row["seconds"]
            assert "error" not in row
    assert "secret" not in server.log.read_text()
    assert "hidden" not in server.log.read_text()


def test_refusals_and_odd_paths(server: Running) -> None:
    with server.http as http:
        reply = http.get("/no%0Awhere%22" + "x" * 300)
        row = access(server, request_id=reply.headers["x-request-id"])
        assert (row["status"], row["error"]) == (404, "not_found")
        assert row["path"].startswith('/no\nwhere"xx')
        assert len(row["path"]) == 200
        reply = http.post("/v1/completions", json={"model": "fake", "prompt": "!nan"})
        row = access(server, request_id=reply.headers["x-request-id"])
        assert (row["status"], row["error"]) == (500, "internal_error")
        failed = [r for r in rows(server) if r["message"] == "the engine failed one request"]
        assert reply.headers["x-request-id"] in {r["request_id"] for r in failed}
    assert server.is_ready()
    assert all(row.get("path") != "/health/ready" for row in rows(server))  # probes are left out


def test_what_is_not_even_http(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"NONSENSE\r\n\r\n")
        reply = sock.makefile("rb").read().decode()
    [request_id] = [line[14:] for line in reply.splitlines() if line.startswith("x-request-id: ")]
    assert access(server, request_id=request_id)["error"] == "invalid_http"


def test_a_client_that_leaves(server: Running) -> None:
    body = {"model": "fake", "prompt": "!crawl", "max_tokens": 400, "stream": True}
    with server.http as http, http.stream("POST", "/v1/completions", json=body) as reply:
        request_id = reply.headers["x-request-id"]
        next(reply.iter_lines())
    row = access(server, request_id=request_id)
    assert (row["status"], row["error"], row["finish_reason"]) == (200, "client_gone", None)
