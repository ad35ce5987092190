"""Do raw bytes on a connection, or a body, ever get anything but an answer or a clear refusal?

A case of `http` is the pieces that arrive one after the other, each behind two bytes of length.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import re

from tests.server.connection import Connection, Server
from tools.fuzz import Target

H, MAX_HEADERS, MAX_BODY = 512, 8, 2048
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[a-z0-9-]+: [^\r\n]+\r\n)*)\r\n")
STATUSES = frozenset({200, 400, 408, 413, 421, 431})

METHODS = (b"GET", b"POST", b"POST", b"POST", b"HEAD", b"PUT", b"CONNECT", b"PRI", b"get", b"X")
TARGETS = (
    b"/", b"/v1/completions", b"*", b"http://localhost/x", b"a:1", b"//", b"/%00%ff%", b"/?a=b#c",
    b"/\xff", b"?", b"/" + b"a" * 600, b"http://", b"/ /",
)  # fmt: skip
VERSIONS = (b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1.", b"", b"http/1.1", b"HTTP/0.9")
HEADERS = (
    b"connection: close", b"connection: keep-alive", b"connection: upgrade\r\nupgrade: h2c",
    b"expect: 100-continue", b"transfer-encoding: chunked", b"transfer-encoding: gzip, chunked",
    b"transfer-encoding: chunked, x", b"content-length: 5", b"content-length: -1",
    b"content-length: 99999999999999999999", b"content-length: 0", b"content-length: 5, 5",
    b"content-type: application/json", b"host: evil", b"x:", b": x", b"x", b"x : y", b"x: a\r\n b",
    b"x: \x00", b"x: \xff", b"x: " + b"y" * 500, b"x\xff: y", b"upgrade: websocket", b"x: a\rb",
    b"x: a\nb: c", b"content-length: 4096", b"trailer: x",
)  # fmt: skip
SIZES = (b"%x", b"%X", b"0%x", b"%x ", b"%x;a=b", b'%x;a="b', b"+%x", b"%xg", b"0x%x", b"%x\t")
ENDINGS = (b"\r\n",) * 8 + (b"\n", b"\r", b"", b"\r\r\n")
FILLERS = (b"a", b"0", b"\r\n", b"x: y\r\n", b";a", b"1;a\r\nz\r\n", b"GET / HTTP/1.1\r\n\r\n")
JUNK = (b"\r\n", b"\r\n" * 300, b"\x16\x03\x01\x02", b"\0" * 40, b"a" * 700, b"GET", b"PRI * HTTP")


def _pick(rng: random.Random, usual: bytes, others: tuple[bytes, ...], share: float) -> bytes:
    return rng.choice(others) if rng.random() < share else usual


def _chunks(rng: random.Random, body: bytes, odd: float) -> bytes:
    parts = []
    while body:
        count = rng.choice((1, 1, 7, len(body)))
        size = _pick(rng, b"%x", SIZES, odd) % len(body[:count])
        parts += [size, _pick(rng, b"\r\n", ENDINGS, odd), body[:count]]
        parts.append(_pick(rng, b"\r\n", ENDINGS, odd))
        body = body[count:]
        if rng.random() < odd / 4:
            parts.append(b"1;" + b"e" * rng.choice((3, 600)))
    parts.append(_pick(rng, b"0\r\n", (b"00\r\n", b"0;x\r\n", b"0", b"-0\r\n", b""), odd))
    for _ in range(rng.choice((0, 0, 0, 1, 2, 30))):
        parts.append(_pick(rng, b"x: y", HEADERS, 0.5) + b"\r\n")
    return b"".join(parts) + _pick(rng, b"\r\n", ENDINGS, odd)


def _request(rng: random.Random, odd: float) -> bytes:
    """`odd` is the share of strange parts."""
    body = rng.choice((b"", b"hello", b'{"a": 1}', b"z" * 100, b"z" * 3000))
    headers = [_pick(rng, b"host: localhost", HEADERS, odd)]
    framed = body
    kind = rng.random()
    if kind < 0.4:
        headers.append(b"transfer-encoding: chunked")
        framed = _chunks(rng, body, odd)
    elif kind < 0.9:
        headers.append(b"content-length: %d" % len(body))
    for _ in range(rng.choice((0, 0, 1, 3, 12))):
        headers.insert(rng.randrange(len(headers) + 1), _pick(rng, b"x: y", HEADERS, 0.2 + odd))
    method, target = _pick(rng, b"POST", METHODS, 0.3), _pick(rng, b"/", TARGETS, odd)
    line = method + b" " + target + b" " + _pick(rng, b"HTTP/1.1", VERSIONS, odd)
    ends = [_pick(rng, b"\r\n", ENDINGS, odd) for _ in range(len(headers) + 2)]
    lines = b"".join(part + end for part, end in zip([line, *headers, b""], ends, strict=True))
    return lines + framed


def _mutate(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            changed[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del changed[at : at + rng.choice((1, 4, 40))]
        elif kind == 2:
            changed[at:at] = rng.choice((b"\r\n", b"\0", b":", b" ", b"0\r\n", b"\r\n\r\n"))
        else:
            start = rng.randrange(len(changed) + 1)
            changed[at:at] = changed[start : start + rng.choice((5, 50, 500))]
    return bytes(changed[:20_000])


def make_http(rng: random.Random) -> bytes:
    odd = rng.choice((0.0, 0.02, 0.1, 0.4))
    data = b"".join(
        rng.choice(JUNK) if rng.random() < odd / 2 else _request(rng, odd)
        for _ in range(rng.choice((1, 1, 1, 2, 3, 8)))
    )
    if rng.random() < 0.4:
        data = _mutate(rng, data)
    if rng.random() < 0.03:
        at, filler = rng.randrange(len(data) + 1), rng.choice(FILLERS)
        data = data[:at] + filler * (50_000 // len(filler)) + data[at:]
    longest = rng.choice((60_000, 60_000, 400, 40, 1 if len(data) < 500 else 100))
    pieces = []
    while data:
        count = min(len(data), rng.randint(1, longest), 60_000)
        pieces.append(count.to_bytes(2) + data[:count])
        data = data[count:]
    return b"".join(pieces)


@functools.cache
def server() -> Server:
    limits = {"max_header_bytes": H, "max_headers": MAX_HEADERS, "max_body_bytes": MAX_BODY}
    return Server(asyncio.new_event_loop(), **limits)


def check_http(case: bytes) -> None:
    try:
        _check(case, server())
    except Exception:
        server.cache_clear()  # what is left of this case is no fault of the next
        raise


def _check(case: bytes, world: Server) -> None:
    world.app.num_bytes = 0
    world.methods.clear()
    connection = world.connect()
    at = longest = 0
    while at < len(case):
        end = at + 2 + int.from_bytes(case[at : at + 2])
        longest = max(longest, end - at)
        if not connection.send(case[at + 2 : end]):
            break
        world.settle()
        _check_held(connection)
        at = end
    num_answers = _check_answers(bytes(connection.pipe.written), world.methods)
    # Each message may empty the purse four times, and each byte of body refills a little. The
    # application can refuse a body only between two pieces, so one piece may come on top.
    limit = 4 * H * (num_answers + 1) + 10 * (world.app.num_bytes + MAX_BODY + H) + longest
    assert connection.num_parsed <= limit, f"{connection.num_parsed} bytes parsed, over {limit}"
    connection.leave()
    assert not world.state.tasks, "a task is left"
    assert not world.state.connections, "a connection is left"
    assert world.app.admission.num_requests == world.app.admission.num_bytes == 0, "leaked"
    assert not world.faults, world.faults.pop()


def _check_held(connection: Connection) -> None:
    protocol = connection.protocol
    assert len(protocol.headers or ()) <= MAX_HEADERS, "too many headers"
    held = sum(len(name) + len(value) for name, value in protocol.headers or ())
    assert held <= 2 * H, f"{held} bytes of headers"


def _check_answers(written: bytes, methods: list[str]) -> int:
    """The number of answers. Each is whole, and one of ours; one to none of the requests, whose
    `methods` are given, is the last."""
    at = num_answers = 0
    is_last = False
    while at < len(written):
        found = STATUS.match(written, at)
        assert found, written[at : at + 200]
        assert not is_last, "an answer after the last"
        at, status = found.end(), int(found[1])
        if status == 100:
            continue
        method = methods[num_answers] if num_answers < len(methods) else ""
        num_answers += 1
        assert status in STATUSES, status
        headers = dict(line.split(b": ", 1) for line in found[2].splitlines())
        assert headers[b"x-request-id"].startswith(b"req-")
        is_last = headers.get(b"connection") == b"close"
        assert is_last or method, "an answer to nobody"
        if method == "HEAD":
            continue
        length = int(headers[b"content-length"])
        body, at = written[at : at + length], at + length
        assert len(body) == length, "half an answer"
        if status >= 400:
            error = json.loads(body)["error"]
            assert sorted(error) == ["code", "message", "param", "type"], error
    return num_answers


http = Target(make_http, check_http)
