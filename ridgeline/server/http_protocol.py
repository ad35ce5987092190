"""What must hold of a connection before there is a request? Sizes, times and clean framing.

uvicorn leaves these to a proxy in front; we do not count on one. It adds to uvicorn's httptools
protocol: a limit for every byte, our error bodies, no pipelining (a second request sent before the
first is answered would hide a closed connection), deadlines for heads and for clients that never
read, and a close that lets a client which is still sending read the answer first.

What is not body is paid from one purse of `max_header_bytes`: it is filled for a head and for what
comes after it, and each byte of body puts FRAMING_BYTES into it. So chunk sizes, extensions,
trailers and junk end where a head would, and the parser is never given more than the purse holds:
httptools joins the pieces of a line by copying, which takes the square of a line's length.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import secrets
import socket
import struct
import sys
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from types import SimpleNamespace
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ridgeline.log import ACCESS, say
from ridgeline.server.config import Limits
from ridgeline.server.connections import Places, Slices
from ridgeline.server.errors import ApiError

FRAMING_BYTES = 9  # a chunk of one byte has 5 around it, if its size is not padded
MAX_DISCARDED_BYTES = 16 << 20  # sent after a refusal, before we hang up
LINGER_S = 2.0  # without a byte from or to the client, then we hang up
NUM_LINGERING = 64  # connections over the limit that may still read why they are refused
NUM_LAST_FDS = 16  # file descriptors that no connection gets: a new engine needs some
PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 429: b"Too Many Requests",
           431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}  # fmt: skip
READY_PATHS = ("/health/ready", "/health", "/v1/health", "/ping")  # probes of many kinds
OPEN_PATHS = frozenset({"/health/live", *READY_PATHS})  # they need no key, and start at once

EXTENSION = "ridgeline.connection"

logger = logging.getLogger(__name__)


class Phase(Enum):
    """Of the message that is being received."""

    NONE = auto()  # between messages
    HEAD = auto()
    BODY = auto()


def new_request_id() -> str:
    return "req-" + secrets.token_hex(12)


class GuardedProtocol(HttpToolsProtocol):
    """One connection. What it shares with others is set by `protocol_class`."""

    limits = Limits()
    places = Places(limits)
    slices = Slices()

    def __init__(self, *args: Any, **options: Any) -> None:
        # Chunks of one byte come by the ten thousand; the parser calls this without Python.
        self._parts: list[bytes] = []
        self.on_body = self._parts.append  # type: ignore[assignment, method-assign]
        super().__init__(*args, **options)
        self.fault: ApiError | None = None  # why the body of the current request will never end
        self._phase = Phase.NONE
        self._purse = self.limits.max_header_bytes
        self._num_headers = 0  # of the current message, with its trailers
        self._keep_alive = False  # after the current message, as its head says
        self._deaf = False  # what comes now is dropped
        self._discarded = 0  # bytes dropped
        self._header_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0
        self._has_place = False

    # ------------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        is_last = _is_last_fd(transport)
        error = ApiError("overloaded", "too many connections; try again later")
        if not is_last:
            refusal = self.places.take(self._address)
            if refusal is None:
                self._has_place = True
                self._start_header_timer()
                return
            error = refusal
        say(
            logger, logging.WARNING, "connections are refused", open=len(self.connections),
            reason="no file descriptors are left" if is_last else "--max-connections",
        )  # fmt: skip
        self.places.num_refused += 1
        self._refuse(error)
        if is_last or self.places.num_refused > NUM_LINGERING:
            self.transport.close()

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(self._header_timer)
        self._stop(self._linger_timer)
        self._unset_keepalive_if_required()
        if self._has_place:
            self.places.give_back(self._address)
        else:
            self.places.num_refused -= 1
        self.slices.do(self.loop, partial(super().connection_lost, exc))

    def data_received(self, data: bytes) -> None:
        if self._header_timer is None and self._phase is not Phase.BODY:
            self._start_header_timer()
        self._unset_keepalive_if_required()
        while data and not self._deaf:
            part, data = data[: self._purse], data[self._purse :]
            self._purse -= len(part)
            self._feed(part)
            self._take_body()
            if self._purse <= 0:
                self._refuse_headers()
        self._discarded += len(data)
        if self._discarded > MAX_DISCARDED_BYTES:
            self.abort()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._feed(self._head_without_upgrade() + data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(ApiError("invalid_http", "this is not a well-formed HTTP request"))

    def _head_without_upgrade(self) -> bytes:
        """We do not upgrade, and httptools would take the body for the other protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def abort(self) -> None:
        """Drop the connection and everything not yet sent, the kernel's buffers included."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None and not self.transport.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def close_after_response(self) -> None:
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def timeout_keep_alive_handler(self) -> None:
        """Also for a client that does not read: as long as it reads something, it may go on."""
        if self.transport is None or self.transport.is_closing():
            return
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent != self._unsent_bytes:
            self._unsent_bytes = unsent
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        elif unsent:
            self.abort()
        else:
            self.transport.close()

    # ------------------------------------------------------------------ the parser's calls
    # An exception in one of them ends the parsing.

    def on_message_begin(self) -> None:
        if self._is_answering:
            raise ValueError("pipelined: answer the first, then close")
        self._phase, self._num_headers = Phase.HEAD, 0
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: self}  # type: ignore[dict-item]

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > self.limits.max_headers:
            self._refuse_headers()
            raise ValueError("too many headers")
        if self._phase is Phase.HEAD:  # a trailer does not change what was checked before the body
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("we are no proxy")
            return
        super().on_headers_complete()
        self._stop(self._header_timer)
        self._header_timer = None
        self._phase, self._purse = Phase.BODY, self.limits.max_header_bytes
        # An answer to half a request says "connection: close".
        self._keep_alive, self.cycle.keep_alive = self.cycle.keep_alive, False
        self.cycle.transport = SimpleNamespace(  # type: ignore[assignment]
            write=self.transport.write, is_closing=self.transport.is_closing, close=self._hang_up
        )

    def _take_body(self) -> None:
        if not self._parts or self._deaf:
            return
        if len(self._parts) > 1:  # chunks take time: others get their turn before the next read
            self.flow.pause_reading()
        body = b"".join(self._parts)
        self._parts.clear()
        more = self._purse + FRAMING_BYTES * len(body)
        self._purse = min(more, self.limits.max_header_bytes)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._take_body()
        super().on_message_complete()
        self._phase, self._purse = Phase.NONE, self.limits.max_header_bytes
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keep_alive

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._linger_timer is not None:
            self._unset_keepalive_if_required()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Probes go first: who asks them restarts a server that answers late."""
        start = partial(super()._start_asgi_task, cycle, app)
        if cycle.scope["path"] in OPEN_PATHS:
            start()
        else:
            self.slices.do(self.loop, start)

    def expect_body(self) -> asyncio.TimerHandle:
        """From now on the rest of the body has `body_timeout_s`, then `fault` is set."""
        return self._later(self.limits.body_timeout_s, self._body_too_slow, self.cycle)

    def _body_too_slow(self, cycle: object) -> None:
        if self.cycle is cycle and self._phase is Phase.BODY:
            limit = self.limits.body_timeout_s
            self.fault = ApiError("request_timeout", f"the body did not arrive within {limit:g} s")
            self.cycle.message_event.set()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # ------------------------------------------------------------------ hanging up

    def _hang_up(self) -> None:
        """After an answer."""
        if self._deaf or self._phase is Phase.BODY:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """End our side and drop what still comes: a connection that is closed with bytes unread is
        reset, and the client may lose our answer."""
        self._deaf = True
        self._stop(self._header_timer)
        if self.transport.is_closing() or self._linger_timer is not None:
            return
        if self.transport.can_write_eof():  # not through TLS
            self.transport.write_eof()
        self.flow.resume_reading()
        self._linger_on(self.loop.time() + self.limits.body_timeout_s, ())

    def _linger_on(self, deadline: float, before: tuple[int, ...]) -> None:
        """As long as bytes move, up to the deadline."""
        if self.transport.is_closing():
            return
        moved = (self._discarded, unsent := self.transport.get_write_buffer_size())
        if moved != before and self.loop.time() < deadline:
            self._linger_timer = self._later(LINGER_S, self._linger_on, deadline, moved)
        elif unsent:
            self.abort()
        else:
            self.transport.close()

    def _refuse_headers(self) -> None:
        limits = self.limits
        self._refuse(
            ApiError(
                "headers_too_large",
                f"headers may be {limits.max_header_bytes} bytes and {limits.max_headers} lines; "
                "so may all that is not body behind them",
            )
        )

    def _too_slow(self) -> None:
        self._header_timer = None
        if self._phase is Phase.HEAD:
            limit = self.limits.header_timeout_s
            self._refuse(ApiError("request_timeout", f"headers must arrive within {limit:g} s"))
        elif not self._is_answering:
            self.transport.close()  # it never said a word

    def _refuse(self, error: ApiError) -> None:
        """Parse nothing more. An answer that is due is still given, and takes up the error if it
        waits for the body; if there is none, the error is the answer."""
        if self._deaf:
            return
        self._deaf = True
        if not self._is_answering:
            self._answer(error)
            self._linger()
            return
        self.cycle.keep_alive = False
        if self._phase is Phase.BODY:
            self.fault = error
            self.cycle.message_event.set()

    def _answer(self, error: ApiError) -> None:
        body, request_id = error.body(), new_request_id()
        say(
            ACCESS, logging.INFO, "request", request_id=request_id,
            client=self.client and self.client[0], status=error.status, error=error.code,
        )  # fmt: skip
        lines = [
            b"HTTP/1.1 %d %s" % (error.status, PHRASES.get(error.status, b"")),
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"x-request-id: " + request_id.encode(),
            *(name + b": " + value for name, value in error.headers),
            b"connection: close",
            b"",
            body,
        ]
        self.transport.write(b"\r\n".join(lines))

    def _start_header_timer(self) -> None:
        self._header_timer = self._later(self.limits.header_timeout_s, self._too_slow)

    def _later(
        self, seconds: float, work: Callable[..., object], *values: object
    ) -> asyncio.TimerHandle:
        """In so many seconds, or when those have had theirs whose time came before."""
        return self.loop.call_later(seconds, self.slices.do, self.loop, partial(work, *values))

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def max_open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _is_last_fd(transport: asyncio.Transport) -> bool:
    """Whether hardly more can be opened: the system gives the lowest number that is free."""
    sock = transport.get_extra_info("socket")
    return sock is not None and sock.fileno() >= max_open_files() - NUM_LAST_FDS


def protocol_class(limits: Limits, *, shared: bool = True) -> type[GuardedProtocol]:
    """A protocol with these limits; uvicorn makes one object of it per connection. `shared`: no
    client address may take all connections."""
    own = {"limits": limits, "places": Places(limits, shared=shared), "slices": Slices()}
    return type("GuardedProtocolWithLimits", (GuardedProtocol,), own)
