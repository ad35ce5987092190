"""How are others asked over HTTP? Kept connections, answers as they come, nothing buffered beyond a
mark. The parser is httptools', as on the server's own side."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from ridgeline.errors import ConfigError
from ridgeline.server.lifecycle import keep_alive

Headers = list[tuple[bytes, bytes]]

CONNECT_S = 2.0
HIGH_WATER_BYTES = 256 << 10  # of an answer that nobody has taken: the rest stays with its sender
MAX_HEAD_BYTES = 64 << 10
MAX_IDLE = 64  # connections of one address
# What is about one connection and not about the message (RFC 9110, 7.6.1).
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)


class Lost(Exception):
    """There is no answer, or not all of it. `was_kept`: on a kept connection, before any byte, as
    when the other side closes it at that moment; `is_unheard`: nothing was sent."""

    def __init__(self, why: str, *, was_kept: bool = False, is_unheard: bool = False) -> None:
        super().__init__(why)
        self.was_kept = was_kept
        self.is_unheard = is_unheard


class Exchange(asyncio.Protocol):
    """One connection; one request after the other."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.is_open = False
        self.is_complete = True
        self.num_used = 0
        self._has_head = False
        self._head_bytes = 0
        self._ends_with_connection = False
        self._why = "the connection was closed"
        self._parts: list[bytes] = []
        self._num_waiting = 0  # bytes in _parts
        self._is_paused = False
        self._waiter: asyncio.Future[None] | None = None

    # ------------------------------------------------------------------ the transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.is_open = True
        if (sock := transport.get_extra_info("socket")) is not None:
            keep_alive(sock)

    def data_received(self, data: bytes) -> None:
        if self.is_complete:  # nobody asked
            self.abort()
            return
        if not self._has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._end("the answer is no HTTP")
        if not self._has_head and self._head_bytes > MAX_HEAD_BYTES:
            self._end("the head of the answer never ends")
        if self._num_waiting > HIGH_WATER_BYTES and not self._is_paused and self.is_open:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.is_open and exc is None and self._has_head and self._ends_with_connection:
            self.is_complete = True
        self.is_open = False
        self._wake()

    def _end(self, why: str) -> None:
        self._why = why
        self.abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ------------------------------------------------------------------ the parser's calls

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # trailers are dropped
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:
            return
        self._has_head = True
        names = {name for name, _ in self.headers}
        has_body = self.status not in (204, 304)
        self._ends_with_connection = has_body and not (
            names & {b"content-length", b"transfer-encoding"}
        )

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._num_waiting += len(data)

    def on_message_complete(self) -> None:
        if self._has_head:
            self.is_complete = True
        else:  # an interim answer, such as 100 Continue
            self.headers = []

    # ------------------------------------------------------------------ for who asks

    async def ask(self, request: bytes) -> None:
        """Send all of it and wait for the head of the answer. Raises Lost."""
        was_kept = self.num_used > 0
        self.num_used += 1
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers, self._has_head, self._head_bytes = 0, [], False, 0
        self.is_complete = self._ends_with_connection = False
        self._transport.write(request)
        while not self._has_head:
            if not self.is_open:
                raise Lost(self._why, was_kept=was_kept and not self._head_bytes)
            await self._news()

    async def read(self) -> bytes:
        """What has come of the body since; nothing at its end. Raises Lost."""
        while not self._parts:
            if self.is_complete:
                return b""
            if not self.is_open:
                raise Lost(self._why)
            await self._news()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._num_waiting = 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    async def rest(self, most: int) -> bytes:
        """All of a short body. Raises Lost."""
        parts, size = [], 0
        while data := await self.read():
            parts.append(data)
            size += len(data)
            if size > most:
                raise Lost(f"the answer has more than {most} bytes")
        return b"".join(parts)

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def may_be_kept(self) -> bool:
        """For the next request."""
        return self.is_open and self.is_complete and self._parser.should_keep_alive()

    def abort(self) -> None:
        if self.is_open:
            self.is_open = False
            self._transport.abort()
            self._wake()


@dataclass(frozen=True, slots=True)
class Address:
    """Of a server: http://host:port."""

    url: str
    host: str
    port: int
    is_secure: bool

    @property
    def name(self) -> bytes:
        """For the Host header."""
        return self.url.partition("://")[2].encode()


def read_address(text: str) -> Address:
    """Raises ConfigError."""
    try:
        parts = urlsplit(text.rstrip("/"))
        port = parts.port
    except ValueError as fault:
        raise ConfigError(f"backend {text!r} is no address: {fault}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not text.isascii():
        raise ConfigError(f"backend {text!r} is no address: write http://HOST:PORT")
    if parts.path or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(
            f"backend {text!r} has more than an address: write http://HOST:PORT alone; paths are "
            "those of each request, and keys are passed on from clients"
        )
    is_secure = parts.scheme == "https"
    url = f"{parts.scheme}://{parts.netloc}".lower()
    return Address(url, parts.hostname, port or (443 if is_secure else 80), is_secure)


class Connections:
    """To one address. The one used last is used first, so that what is not needed grows old."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: list[Exchange] = []
        self._context = ssl.create_default_context() if address.is_secure else None

    async def take(self) -> Exchange:
        """Raises Lost when nobody is there."""
        while self._idle:
            kept = self._idle.pop()
            if kept.is_open:
                return kept
        address, loop = self.address, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, exchange = await loop.create_connection(
                    Exchange, address.host, address.port, ssl=self._context
                )
        except TimeoutError:
            raise Lost(f"no connection within {CONNECT_S:g} s", is_unheard=True) from None
        except OSError as fault:
            why = fault.strerror or str(fault)
            raise Lost(f"no connection: {why}", is_unheard=True) from None
        return exchange

    def give_back(self, exchange: Exchange) -> None:
        """After an answer, or instead of the rest of it."""
        if exchange.may_be_kept and len(self._idle) < MAX_IDLE:
            self._idle.append(exchange)
        else:
            exchange.abort()

    async def ask(self, request: bytes) -> Exchange:
        """The answer's head is there. Raises Lost. A kept connection that the other side closed as
        we wrote is no answer: another is taken."""
        while True:
            exchange = await self.take()
            try:
                await exchange.ask(request)
            except Lost as lost:
                if not lost.was_kept:
                    raise
            except BaseException:
                exchange.abort()
                raise
            else:
                return exchange

    def close(self) -> None:
        for exchange in self._idle:
            exchange.abort()
        self._idle.clear()


def request_bytes(
    address: Address, method: bytes, path: bytes, headers: Iterable[tuple[bytes, bytes]],
    body: bytes = b"",
) -> bytes:  # fmt: skip
    """A request with the headers that are about the message."""
    lines = [method + b" " + path + b" HTTP/1.1", b"host: " + address.name]
    lines += [name + b": " + value for name, value in of_message(headers, {b"host"})]
    if body:
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join((*lines, b"", body))


def of_message(headers: Iterable[tuple[bytes, bytes]], without: set[bytes]) -> Headers:
    """Those that are passed on: not about one connection, nor named by it, nor `without`."""
    found = list(headers)
    named = {
        word.strip().lower()
        for name, value in found
        if name == b"connection"
        for word in value.split(b",")
    }
    dropped = HOP_BY_HOP | without | named
    return [(name, value) for name, value in found if name not in dropped]
