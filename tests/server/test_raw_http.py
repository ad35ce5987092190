"""What happens below HTTP's good manners? Raw sockets: framing, sizes, slowness, pipelining."""

from __future__ import annotations

import json
import re
import resource
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running import PATIENCE_S, Running, fake_config, running, until

LIMITS = {"header_timeout_s": 1.0, "body_timeout_s": 1.0, "max_connections": 40}
BODY = b'{"model": "fake", "prompt": "hello", "max_tokens": 2}'


@pytest.fixture(scope="module")
def server(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = fake_config(fake_model, LIMITS)
    with running(config, tmp_path_factory.mktemp("server")) as started:
        yield started


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes."""
    data = b""
    try:
        while part := sock.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


def read_reply(sock: socket.socket) -> bytes:
    """One whole response with a content-length."""
    data = b""
    while not (found := re.search(rb"content-length: (\d+)(?s:.*?)\r\n\r\n", data)) or len(
        data
    ) < found.end() + int(found[1]):
        part = sock.recv(65536)
        assert part, data
        data += part
    return data


def exchange(server: Running, *parts: bytes) -> bytes:
    with connect(server) as sock:
        for part in parts:
            sock.sendall(part)
        return read_all(sock)


def post(body: bytes = BODY, *headers: bytes, close: bool = True) -> bytes:
    lines = [
        b"POST /v1/completions HTTP/1.1",
        b"host: localhost",
        b"content-type: application/json",
        *([b"connection: close"] if close else []),
        *(headers or [b"content-length: %d" % len(body)]),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def check_error(reply: bytes, status: int, code: str) -> None:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), reply[:200]
    assert b"x-request-id: req-" in head
    assert json.loads(body)["error"]["code"] == code


def test_a_plain_request(server: Running) -> None:
    reply = exchange(server, post())
    assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b'"text_completion"' in reply


BROKEN = {
    "no HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "two lengths": post(BODY, b"content-length: 5", b"content-length: 6"),
    "length and chunked": post(BODY, b"content-length: 53", b"transfer-encoding: chunked"),
    "negative length": post(BODY, b"content-length: -5"),
    "length with plus": post(BODY, b"content-length: +53"),
    "unknown coding": post(BODY, b"transfer-encoding: chunked, gzip, x"),
    "space before colon": post(BODY, b"content-length : 53"),
    "folded header": post(BODY, b"x: a\r\n b", b"content-length: 53"),
    "NUL in a header": post(BODY, b"x: a\0b", b"content-length: 53"),
    "bare CR": post(BODY, b"x: a\rb", b"content-length: 53"),
    "bad version": b"GET / HTTP/9.9\r\nhost: localhost\r\n\r\n",
    "bad target": b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    "bad chunk size": post(b"zz\r\nabc\r\n0\r\n\r\n", b"transfer-encoding: chunked"),
    "bad chunk end": post(b"3\r\nabcX0\r\n\r\n", b"transfer-encoding: chunked"),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_broken_framing(server: Running, data: bytes) -> None:
    """A 4xx and a closed connection, or only the latter; never a 200 and never a 5xx."""
    reply = exchange(server, data)
    if reply:
        check_error(reply, 400, "invalid_http")


def test_no_host_header(server: Running) -> None:
    reply = exchange(server, b"GET /v1/models HTTP/1.1\r\nconnection: close\r\n\r\n")
    check_error(reply, 421, "invalid_host")
    two = b"GET / HTTP/1.1\r\nhost: localhost\r\nhost: evil\r\nconnection: close\r\n\r\n"
    check_error(exchange(server, two), 421, "invalid_host")


def test_headers_too_large(server: Running) -> None:
    for header in (b"x: " + b"y" * (70 << 10), b"\r\n".join(b"x%d: y" % i for i in range(101))):
        check_error(exchange(server, post(BODY, header)), 431, "invalid_http")
    endless = b"GET / HTTP/1.1\r\nx: " + b"y" * (300 << 10)
    check_error(exchange(server, endless), 431, "invalid_http")
    path = b"GET /" + b"y" * (70 << 10) + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
    check_error(exchange(server, path), 431, "invalid_http")


def test_slow_headers(server: Running) -> None:
    reply = exchange(server, b"POST /v1/completions HTTP/1.1\r\nhost: local")
    check_error(reply, 408, "request_timeout")
    assert exchange(server) == b""  # not a word: closed without one


def test_slow_body(server: Running) -> None:
    reply = exchange(server, post(b'{"model"', b"content-length: 53", close=False))
    check_error(reply, 408, "request_timeout")
    chunked = post(b"3\r\n{  \r\n", b"transfer-encoding: chunked", close=False)
    check_error(exchange(server, chunked), 408, "request_timeout")


def test_chunked_bodies_are_read(server: Running) -> None:
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    assert b"text_completion" in exchange(server, post(body, b"transfer-encoding: chunked"))


def test_a_declared_giant_is_refused_before_it_is_sent(server: Running) -> None:
    with connect(server) as sock:
        sock.sendall(post(b"", b"content-length: 100000000", close=False))
        check_error(read_reply(sock), 413, "request_too_large")


def test_expect_continue(server: Running) -> None:
    with connect(server) as sock:
        headers = (b"content-length: %d" % len(BODY), b"expect: 100-continue")
        sock.sendall(post(b"", *headers))
        assert sock.recv(65536).startswith(b"HTTP/1.1 100 ")
        sock.sendall(BODY)
        assert b"text_completion" in read_all(sock)
    headers = (b"content-length: 100000000", b"expect: 100-continue")
    check_error(exchange(server, post(b"", *headers, close=False)), 413, "request_too_large")


def test_a_refused_body_ends_the_connection(server: Running) -> None:
    """What is left of the body is dropped, and never taken for the next request."""
    with connect(server) as sock:
        smuggled = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000
        sock.sendall(
            b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
            % len(smuggled)
        )
        reply = read_reply(sock)
        check_error(reply, 404, "not_found")
        assert b"connection: close" in reply
        sock.sendall(smuggled)
        sock.sendall(post())
        assert read_all(sock) == b""


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nothing"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_refusal_reaches_who_sends_everything_first(
    server: Running, path: bytes, chunked: bool
) -> None:
    """Not a reset connection, although most of the body is never read."""
    body = b"z" * (9 << 20)
    data = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    header = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
    with connect(server) as sock:
        sock.sendall(post(b"", header, close=False).replace(b"/v1/completions", path) + data)
        reply = b""
        while part := sock.recv(65536):
            reply += part
    code = "not_found" if path == b"/nothing" else "request_too_large"
    check_error(reply, 404 if path == b"/nothing" else 413, code)


@pytest.mark.parametrize(
    "start",
    [
        b"GET /",
        b"GET / HTTP/1.1\r\nx: ",
        post(b"1;", b"transfer-encoding: chunked"),
        post(b"2\r\n{}\r\n0", b"transfer-encoding: chunked"),
        post(b"0\r\nx: ", b"transfer-encoding: chunked"),
    ],
    ids=["request line", "header", "chunk extension", "chunk size", "trailer"],
)
def test_one_byte_at_a_time(server: Running, start: bytes) -> None:
    """Bytes do not put off a deadline."""
    with connect(server) as sock:
        sock.sendall(start)
        while not select.select([sock], [], [], 0.02)[0]:
            sock.send(b"0")
        check_error(read_reply(sock), 408, "request_timeout")


def test_two_requests_in_turn_but_no_pipelining(server: Running) -> None:
    with connect(server) as sock:
        for _ in range(2):
            sock.sendall(post(close=False))
            assert b"text_completion" in read_reply(sock)
    slow = b'{"model": "fake", "prompt": "!slow", "max_tokens": 20}'
    reply = exchange(server, post(slow, close=False) + post())
    assert reply.count(b"HTTP/1.1 ") == 1
    assert b"text_completion" in reply


def test_a_pipelining_client_that_leaves_is_noticed(server: Running) -> None:
    body = b'{"model": "fake", "prompt": "!slow", "max_tokens": 500}'
    with connect(server) as sock:
        sock.sendall(post(body, close=False) + post())
        until(lambda: server.metric("ridgeline_sequences_running") == 1, "it to run")
    assert server.wait_until_idle() < 5


def test_http_1_0_and_head(server: Running) -> None:
    reply = exchange(server, b"GET /version HTTP/1.0\r\nhost: localhost\r\n\r\n")
    assert b'"version"' in reply
    head = b"HEAD /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    assert exchange(server, head).endswith(b"\r\n\r\n")


def test_upgrades_are_ignored(server: Running) -> None:
    upgrade = (
        b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-key: x\r\nsec-websocket-version: 13\r\n\r\n"
    )
    with connect(server) as sock:
        sock.sendall(upgrade)
        assert b'"version"' in read_reply(sock)


def test_too_many_connections(server: Running) -> None:
    socks = [connect(server) for _ in range(45)]
    try:
        refused = [sock for sock in socks if _says(sock, b"429")]
        assert 3 <= len(refused) <= 10
    finally:
        for sock in socks:
            sock.close()
    until(lambda: server.metric("ridgeline_http_connections") < 5, "connections to go")


def _says(sock: socket.socket, word: bytes) -> bool:
    sock.settimeout(0.2)
    try:
        return word in sock.recv(4096)
    except TimeoutError:
        return False


def test_no_file_descriptor_is_left(server: Running) -> None:
    """Some connections are lost, which is told once; the server goes on."""
    pid, fewer = server.process.pid, server.num_fds() + 30  # the last 16 are for nobody
    _, hard = before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (fewer, hard))
    socks = [connect(server) for _ in range(35)]
    try:
        answered = [sock for sock in socks if b"200 OK" in _ask(sock)]
        assert 10 <= len(answered) < 20
        assert server.num_fds() <= fewer
    finally:
        for sock in socks:
            sock.close()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    until(lambda: server.metric("ridgeline_http_connections") < 5, "connections to go")
    assert 1 <= server.log.read_text().count("no file descriptors are left") <= 3


def _ask(sock: socket.socket) -> bytes:
    try:
        sock.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        return sock.recv(4096)
    except ConnectionError:
        return b""


def test_nothing_is_left(server: Running) -> None:
    server.wait_until_idle()
    until(lambda: server.metric("ridgeline_http_tasks") < 12, "tasks to end")
    assert "Traceback" not in server.log.read_text()
