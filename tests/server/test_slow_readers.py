"""Is a client that does not read cut off, without harm to those that do?"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.fake_build import reference
from tests.server.model_folder import byte_ids
from tests.server.running import PATIENCE_S, Running, fake_config, running, until


def ask_without_reading(server: Running, **fields: Any) -> socket.socket:
    body = json.dumps({"model": "fake", "prompt": "mute", "temperature": 1} | fields).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(PATIENCE_S)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    return sock


def read_to_the_end(sock: socket.socket) -> None:
    while sock.recv(1 << 20):
        pass


def check_others(server: Running) -> None:
    with server.http as http:
        body = {"model": "fake", "prompt": "hello", "max_tokens": 50}
        text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert text == bytes(reference(byte_ids("hello"), 50)).decode("utf-8", "replace")


BIG: dict[str, Any] = {"n": 8, "logprobs": 20, "max_tokens": 500, "stream": True}


@pytest.fixture(scope="module", params=["time", "bytes"])
def server(
    request: pytest.FixtureRequest, fake_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Once with little patience and much room, once the other way round."""
    limits: dict[str, Any] = {
        "time": {"write_timeout_s": 0.5, "max_stream_bytes": 1 << 30},
        "bytes": {"write_timeout_s": 1000.0, "max_stream_bytes": 64 << 10},
    }[request.param]
    limits["idle_connection_timeout_s"] = 1
    with running(fake_config(fake_model, limits), tmp_path_factory.mktemp("server")) as started:
        yield started


def test_streams_that_nobody_reads_are_cut(server: Running) -> None:
    socks = [ask_without_reading(server, **BIG) for _ in range(3)]
    try:
        until(lambda: server.metric("ridgeline_requests_total") >= 3, "them to be admitted")
        check_others(server)
        server.wait_until_idle()
        until(lambda: server.metric("ridgeline_http_connections") <= 1, "connections to be cut")
        with pytest.raises(ConnectionResetError):
            read_to_the_end(socks[0])
        check_others(server)
    finally:
        for sock in socks:
            sock.close()


def test_a_whole_answer_that_nobody_reads_holds_no_connection_for_ever(server: Running) -> None:
    sock = ask_without_reading(server, **BIG | {"stream": False, "prompt": ["a", "b"]})
    try:
        server.wait_until_idle()
        until(lambda: server.metric("ridgeline_http_connections") <= 1, "the connection to be cut")
    finally:
        sock.close()


def test_a_slow_reader_that_keeps_up_gets_everything(server: Running) -> None:
    sock = ask_without_reading(server, prompt="!slow", temperature=0, max_tokens=60, stream=True)
    data = b""
    with sock:
        while b"[DONE]" not in data:
            part = sock.recv(64)
            assert part, data
            data += part
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
    text = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
    assert text == bytes(reference(byte_ids("!slow"), 60)).decode("utf-8", "replace")
