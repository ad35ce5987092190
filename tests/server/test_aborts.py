"""Does a client that leaves, at whatever moment, leave nothing behind?

How many random departures: RIDGELINE_TEST_ABORTS (60 by default, 1,000 in the slow run).
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.fake_build import reference
from tests.server.model_folder import byte_ids
from tests.server.running import PATIENCE_S, Running, fake_config, running, until

ABORTS = int(os.environ.get("RIDGELINE_TEST_ABORTS", "60"))


@pytest.fixture(scope="module")
def server(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = {"max_num_seqs": 4, "num_blocks": 128, "max_num_batched_tokens": 64}
    config = fake_config(fake_model, {"body_timeout_s": 5.0}, engine)
    with running(config, tmp_path_factory.mktemp("server")) as started:
        yield started


def request_bytes(path: str = "/v1/completions", **fields: Any) -> bytes:
    body = json.dumps({"model": "fake", "prompt": "!slow", "max_tokens": 400} | fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)


def leave(sock: socket.socket, how: str) -> None:
    """`fin` closes politely, `half` only says that no more will come, `rst` slams the door."""
    if how == "rst":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half":
        sock.shutdown(socket.SHUT_WR)
    else:
        sock.close()


def num_running(server: Running) -> float:
    return server.metric("ridgeline_sequences_running")


@pytest.mark.parametrize("how", ["fin", "rst", "half"])
@pytest.mark.parametrize("streams", [True, False])
def test_leaving_in_the_middle_of_an_answer(server: Running, streams: bool, how: str) -> None:
    with connect(server) as sock:
        sock.sendall(request_bytes(stream=streams))
        until(lambda: num_running(server) == 1, "the request to run")
        if streams:
            assert b"200 OK" in sock.recv(100)
        leave(sock, how)
        assert server.wait_until_idle() < 5


@pytest.mark.parametrize("how", ["fin", "rst"])
def test_leaving_the_queue(server: Running, how: str) -> None:
    """Four run; the fifth waits, leaves, and is never run; the four are not harmed."""
    busy = [connect(server) for _ in range(4)]
    for sock in busy:
        sock.sendall(request_bytes())
    until(lambda: num_running(server) == 4, "four to run")
    with connect(server) as sock:
        sock.sendall(request_bytes(stream=how == "fin"))
        until(lambda: server.metric("ridgeline_sequences_waiting") == 1, "the fifth to wait")
        leave(sock, how)
        until(lambda: server.metric("ridgeline_sequences_waiting") == 0, "the queue to empty", 5)
    assert num_running(server) == 4
    for sock in busy:
        sock.close()
    server.wait_until_idle()


def test_leaving_during_a_long_prefill(server: Running) -> None:
    with connect(server) as sock:
        sock.sendall(request_bytes(prompt="!crawl" + "x" * 440, max_tokens=5))
        until(lambda: num_running(server) == 1, "the prefill to begin")
        leave(sock, "rst")
        assert server.wait_until_idle() < 5
    assert server.metric("ridgeline_generation_tokens_total") >= 0


@pytest.mark.parametrize("cut", [5, 60, 120, 140])
def test_leaving_before_the_request_is_whole(server: Running, cut: int) -> None:
    with connect(server) as sock:
        sock.sendall(request_bytes()[:cut])
    server.wait_until_idle()
    until(lambda: server.metric("ridgeline_http_connections") <= 1, "the connection to go")


def test_all_of_n_are_aborted(server: Running) -> None:
    with connect(server) as sock:
        sock.sendall(request_bytes(n=4, temperature=1, stream=True, prompt=["!slow", "!slow b"]))
        until(lambda: num_running(server) == 4, "them to run")
        leave(sock, "rst")
        assert server.wait_until_idle() < 5


def test_one_cancel_does_not_touch_the_others(server: Running) -> None:
    expected = bytes(reference(byte_ids("!slow me"), 60)).decode("utf-8", "replace")
    texts: list[str] = []

    def ask() -> None:
        with server.http as http:
            body = {"model": "fake", "prompt": "!slow me", "max_tokens": 60}
            texts.append(http.post("/v1/completions", json=body).json()["choices"][0]["text"])

    thread = threading.Thread(target=ask)
    thread.start()
    for how in ("fin", "rst", "half") * 3:
        with connect(server) as sock:
            sock.sendall(request_bytes(prompt="!slow me", stream=True))
            sock.recv(10)
            leave(sock, how)
    thread.join(PATIENCE_S)
    assert texts == [expected]


def abort_at_random(server: Running, rng: random.Random) -> None:
    """One request of a random kind, left after a random part of it or of its answer."""
    fields: dict[str, Any] = {
        "stream": rng.random() < 0.7,
        "prompt": rng.choice(["a", "!slow", "b" * 100, ["x", "!slow y"], "c" * 400]),
        "max_tokens": rng.choice([1, 5, 50, 100]),
        "n": rng.choice([1, 1, 3]),
        "temperature": 1,
        "stop": rng.choice([None, "e", ["q", "zz"]]),
        "logprobs": rng.choice([None, 2]),
    }
    data = request_bytes(**fields)
    with connect(server) as sock:
        sock.sendall(data[: rng.choice([len(data)] * 9 + [rng.randrange(1, len(data))])])
        if rng.random() < 0.7:
            sock.settimeout(rng.choice([0.001, 0.01, 0.1]))
            try:
                for _ in range(rng.randrange(4)):
                    sock.recv(rng.choice([1, 100, 65536]))
            except (TimeoutError, ConnectionResetError):
                pass
        leave(sock, rng.choice(["fin", "rst", "half"]))


def run_random_aborts(server: Running, count: int) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    with server.http as http:  # warm, so that what is counted before has all its pools
        for _ in range(3):
            http.post("/v1/completions", json={"model": "fake", "prompt": "warm", "n": 2})
    server.wait_until_idle()
    fds, tasks = server.num_fds(), server.metric("ridgeline_http_tasks")

    def some(part: int) -> None:
        rng = random.Random(seed + part)
        for _ in range(count // 4):
            abort_at_random(server, rng)

    threads = [threading.Thread(target=some, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S * 10)
    server.wait_until_idle()
    until(lambda: server.metric("ridgeline_http_connections") <= 1, "connections to go")
    until(lambda: server.metric("ridgeline_http_tasks") <= tasks, "tasks to end")
    until(lambda: server.num_fds() <= fds, "file descriptors to be closed")
    assert server.metric("ridgeline_http_held_body_bytes") == 0
    _still_serves(server)
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "never retrieved" not in log


def _still_serves(server: Running) -> None:
    with server.http as http:
        reply: httpx.Response = http.post(
            "/v1/completions", json={"model": "fake", "prompt": "hello", "max_tokens": 9}
        )
    text = bytes(reference(byte_ids("hello"), 9)).decode("utf-8", "replace")
    assert reply.json()["choices"][0]["text"] == text


def test_random_aborts_leave_nothing(server: Running) -> None:
    run_random_aborts(server, ABORTS)


@pytest.mark.slow
def test_a_thousand_random_aborts_leave_nothing(server: Running) -> None:
    run_random_aborts(server, 1000)
