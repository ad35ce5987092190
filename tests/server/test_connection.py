"""Does every byte of a connection count in a limit? One connection without a network."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator

import pytest

from ridgeline.server import http_protocol
from ridgeline.server.config import Limits
from ridgeline.server.http_protocol import MAX_DISCARDED_BYTES
from tests.server.connection import Connection, Server
from tests.server.running import until

H = 4096
PIECE = 1 << 16
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
WHOLE = POST + b"content-length: 2\r\n\r\n{}"


@pytest.fixture
def server() -> Iterator[Server]:
    loop = asyncio.new_event_loop()
    server = Server(loop, max_header_bytes=H, max_body_bytes=1 << 20)
    yield server
    for connection in server.state.connections.copy():
        connection.connection_lost(None)
    server.settle()
    left = server.faults, server.state.tasks, server.app.admission.num_requests
    loop.close()
    assert left == ([], set(), 0)
    assert server.app.admission.num_bytes == 0


def send(connection: Connection, *pieces: bytes) -> bytes:
    """What was written in return."""
    start = len(connection.pipe.written)
    for piece in pieces:
        assert connection.send(piece)
        connection.server.settle()
    return bytes(connection.pipe.written[start:])


def check_error(reply: bytes, status: int, code: str) -> None:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), reply[:200]
    assert b"\r\nconnection: close" in head
    assert json.loads(body)["error"]["code"] == code


# (what comes first, what comes without end, status and code of the answer)
ENDLESS = {
    "request line": (b"GET /", b"a", 431),
    "header name": (GET, b"a", 431),
    "header value": (GET + b"x: ", b"a", 431),
    "headers": (GET, b"x: y\r\n", 431),
    "folded header": (GET + b"x: y\r\n", b" y\r\n", 400),
    "empty lines": (b"", b"\r\n", 431),
    "empty lines later": (WHOLE, b"\r\n", 431),
    "chunk size": (CHUNKED, b"0", 431),
    "chunk extension": (CHUNKED + b"3;", b"a", 431),
    "chunk extensions": (CHUNKED + b"3", b";a=b", 431),
    "quoted extension": (CHUNKED + b'3;a="', b"b", 431),
    "extension of each byte": (CHUNKED, b"1;" + b"a" * 100 + b"\r\nz\r\n", 431),
    "trailer name": (CHUNKED + b"0\r\n", b"a", 431),
    "trailer value": (CHUNKED + b"0\r\nX: ", b"a", 431),
    "trailer behind a body": (
        CHUNKED + b"8000\r\n" + b"z" * 0x8000 + b"\r\n0\r\nX: ", b"a", 431
    ),
    "trailers": (CHUNKED + b"3\r\nabc\r\n0\r\n", b"x: y\r\n", 431),
    "trailer behind an upgrade": (
        CHUNKED[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n0\r\nX: ", b"a", 431
    ),
}  # fmt: skip


@pytest.mark.parametrize(("first", "filler", "status"), ENDLESS.values(), ids=ENDLESS.keys())
def test_what_never_ends(server: Server, first: bytes, filler: bytes, status: int) -> None:
    """The parser sees no more of it than two heads, and is not fed any more after the refusal."""
    connection = server.connect()
    reply = send(connection, *([first] if first else []), filler * (PIECE // len(filler)))
    if first == WHOLE:
        assert reply.startswith(b"HTTP/1.1 200 ")
        reply = reply[reply.index(b"HTTP/1.1 ", 1) :]
    check_error(reply, status, "invalid_http")
    assert connection.num_parsed <= 2 * H + len(first)
    assert connection.is_over
    num_parsed = connection.num_parsed
    num_sent = 0
    while connection.send(filler * (PIECE // len(filler))):
        num_sent += PIECE
        assert num_sent <= MAX_DISCARDED_BYTES
    assert connection.pipe.reset
    assert connection.num_parsed == num_parsed
    connection.leave()


@pytest.mark.parametrize("size", [1, 7, PIECE])
def test_pieces_of_any_size_count_alike(server: Server, size: int) -> None:
    connection = server.connect()
    data = CHUNKED + b"0\r\nX: " + b"a" * PIECE
    for at in range(0, len(data), size):
        if not connection.send(data[at : at + size]) or connection.is_over:
            break
        if at % 512 < size:
            server.settle()
    server.settle()
    check_error(bytes(connection.pipe.written), 431, "invalid_http")
    assert connection.num_parsed <= 2 * H
    connection.leave()


def test_many_small_chunks_are_a_body(server: Server) -> None:
    """As of a client that sends JSON as it is made: five bytes around each byte."""
    connection = server.connect()
    assert send(connection, CHUNKED, b"1\r\nz\r\n" * 50_000) == b""
    assert send(connection, b"0\r\nx: y\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    assert server.app.num_bytes == 50_000
    connection.leave()


@pytest.mark.parametrize("first", [GET, CHUNKED + b"0\r\n"], ids=["headers", "trailers"])
def test_the_number_of_lines_counts(server: Server, first: bytes) -> None:
    connection = server.connect()
    check_error(send(connection, first + b"x: y\r\n" * 101 + b"\r\n"), 431, "invalid_http")
    connection.leave()


def test_a_trailer_is_no_header(server: Server) -> None:
    connection = server.connect()
    send(connection, CHUNKED, b"0\r\nauthorization: Bearer x\r\na: b\r\n\r\n")
    assert connection.protocol.headers == [
        (b"host", b"localhost"), (b"transfer-encoding", b"chunked")
    ]  # fmt: skip
    connection.leave()


# ------------------------------------------------------------------ what follows a request


def test_a_flood_of_requests(server: Server) -> None:
    """Who does not wait for the answer gets the first one, and the parser stops there."""
    connection = server.connect()
    reply = send(connection, (GET + b"\r\n") * 2000)
    assert reply.count(b"HTTP/1.1 200 ") == reply.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in reply
    assert connection.num_parsed <= H
    assert connection.is_over
    connection.leave()


def test_bytes_that_follow_a_last_request(server: Server) -> None:
    connection = server.connect()
    reply = send(connection, GET + b"connection: close\r\n\r\n" + b"junk" * 100_000)
    assert reply.count(b"HTTP/1.1 ") == 1
    assert connection.num_parsed <= 2 * H
    assert connection.is_over
    connection.leave()


def test_a_body_behind_an_upgrade_is_a_body(server: Server) -> None:
    """httptools takes what follows for another protocol's; here it is neither lost nor a request
    of its own."""
    smuggled = GET + b"\r\n"
    head = POST + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: %d\r\n\r\n"
    for cut in (0, 5, len(smuggled)):
        connection = server.connect()
        server.app.num_bytes = 0
        reply = send(connection, head % len(smuggled) + smuggled[:cut], smuggled[cut:] + b"\r\n")
        assert reply.count(b"HTTP/1.1 200 ") == reply.count(b"HTTP/1.1 ") == 1
        assert server.app.num_bytes == len(smuggled)
        assert send(connection, WHOLE).startswith(b"HTTP/1.1 200 ")
        connection.leave()
    connection = server.connect()
    check_error(send(connection, b"CONNECT a:1 HTTP/1.1\r\n\r\n"), 400, "invalid_http")
    connection.leave()


def test_empty_lines_between_requests(server: Server) -> None:
    connection = server.connect()
    for _ in range(3):
        assert send(connection, WHOLE, b"\r\n", b"\r").startswith(b"HTTP/1.1 200 ")
        send(connection, b"\n")
    connection.leave()


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("bad", [b"zz\r\n", b"3\r\nabcX0\r\n\r\n", b"-1\r\n", b"0\r\n : x\r\n\r\n"])
def test_a_malformed_chunk(server: Server, bad: bytes) -> None:
    """The application, which waits for the rest, hears of it and answers."""
    for pieces in ([CHUNKED + bad], [CHUNKED, bad], [CHUNKED, b"2\r\n{}\r\n", bad]):
        connection = server.connect()
        check_error(send(connection, *pieces), 400, "invalid_http")
        assert connection.is_over
        assert not server.state.tasks
        connection.leave()
    assert server.traffic.refused == {"invalid_http": 3}


@pytest.mark.parametrize(
    "start",
    [POST + b"content-length: 2000000\r\n\r\n", CHUNKED + b"1f0000\r\n" + b"z" * 0x1F0000],
    ids=["declared", "while reading"],
)
def test_a_refusal_can_be_read_while_one_sends(server: Server, start: bytes) -> None:
    connection = server.connect()
    check_error(send(connection, start), 413, "request_too_large")
    assert connection.pipe.at_end
    assert not connection.pipe.closed
    num_parsed = connection.num_parsed
    send(connection, *[b"z" * PIECE] * 16)
    assert not connection.pipe.closed
    assert connection.num_parsed == num_parsed
    connection.leave()


def test_lingering_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With silence on both sides, or at the deadline if there never is."""
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.01)

    def closed(connection: Connection) -> bool:
        server.loop.run_until_complete(asyncio.sleep(0.001))
        return connection.pipe.closed

    for timeout_s, unsent in ((1000.0, itertools.repeat(0)), (0.05, itertools.count(1))):
        connection = server.connect()
        connection.protocol.limits = Limits(body_timeout_s=timeout_s)
        monkeypatch.setattr(connection.pipe, "get_write_buffer_size", unsent.__next__)
        send(connection, b"junk\r\n\r\n")
        until(lambda: closed(connection), "the end", 10)  # noqa: B023
        assert connection.pipe.reset == (timeout_s < 1)  # what is unsent then goes nowhere
        connection.leave()
