"""What must hold of a connection before there is a request? Sizes, times and clean framing.

uvicorn leaves these to a proxy in front; we do not count on one. It adds to uvicorn's httptools
protocol: limits on headers and connections, a deadline for headers, our error bodies, no
pipelining (a second request sent before the first is answered would hide a closed connection),
bounded reading of bodies nobody wants, and no waiting for clients that never read.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import struct
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ridgeline.log import ACCESS, say
from ridgeline.server.config import Limits
from ridgeline.server.errors import ApiError

MAX_DISCARDED_BYTES = 16 << 20  # of a body that was refused, before we hang up
PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large",
           503: b"Service Unavailable"}  # fmt: skip

EXTENSION = "ridgeline.connection"


def new_request_id() -> str:
    return "req-" + secrets.token_hex(12)


class GuardedProtocol(HttpToolsProtocol):
    """One connection. `limits` is set by `protocol_class`."""

    limits = Limits()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_headers = True
        self._raw_header_bytes = 0  # received since the last message, headers not yet complete
        self._header_bytes = 0  # of the lines that the parser has seen
        self._num_headers = 0
        self._discarded = 0
        self._deaf = False  # refused or about to close: no more parsing
        self._header_timer: asyncio.TimerHandle | None = None
        self._discard_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0

    # ------------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(ApiError("overloaded", "too many connections; try again later"))
            return
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(self._header_timer)
        self._stop(self._discard_timer)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf or self.transport.is_closing():
            return
        if self._in_headers:
            self._raw_header_bytes += len(data)
            if self._header_timer is None:
                self._start_header_timer()
        super().data_received(data)
        if self._in_headers and self._raw_header_bytes > self.limits.max_header_bytes:
            self._refuse_headers()

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

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._deaf = True  # pipelined: answer the first, then close
            self.cycle.keep_alive = False
            return
        self._header_bytes = self._num_headers = self._discarded = 0
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: self}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        if not self._deaf:
            self._header_bytes += len(url)
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._deaf:
            return
        self._num_headers += 1
        self._header_bytes += len(name) + len(value) + 4
        if self._num_headers > self.limits.max_headers:
            self._refuse_headers()
            return
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        self._in_headers = False
        self._stop(self._header_timer)
        self._header_timer = None
        if self._header_bytes > self.limits.max_header_bytes:
            self._refuse_headers()
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._deaf:
            return
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > MAX_DISCARDED_BYTES:
                self._deaf = True
                self.transport.close()
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._deaf:
            return
        super().on_message_complete()
        self._in_headers = True
        self._raw_header_bytes = 0
        if self._discard_timer is not None:
            self._stop(self._discard_timer)
            self._discard_timer = None
            self._wait_for_next()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body and not self.transport.is_closing():
            self._discard_timer = self.loop.call_later(
                self.limits.body_timeout_s, self.transport.close
            )

    def _wait_for_next(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    # ------------------------------------------------------------------ refusals without a request

    def send_400_response(self, msg: str) -> None:
        """uvicorn's word for "this is not HTTP"."""
        if not self._deaf:
            self._refuse(ApiError("invalid_http", "this is not a well-formed HTTP request"))

    def _unsupported_upgrade_warning(self) -> None:
        """An Upgrade header is answered as if it were not there."""

    def _refuse_headers(self) -> None:
        if self._deaf:
            return
        limits = self.limits
        self._refuse(
            ApiError(
                "headers_too_large",
                f"headers may be {limits.max_header_bytes} bytes and {limits.max_headers} lines",
            )
        )

    def _too_slow(self) -> None:
        self._header_timer = None
        if self.transport.is_closing() or self._deaf:
            return
        if not self._raw_header_bytes:
            self.transport.close()  # it never said a word
            return
        limit = self.limits.header_timeout_s
        self._refuse(ApiError("request_timeout", f"headers must arrive within {limit:g} s"))

    def _refuse(self, error: ApiError) -> None:
        """Answer and hang up; in the middle of another answer, only hang up."""
        self._deaf = True
        if self.cycle is None or self.cycle.response_complete:
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
        self.transport.close()

    def _start_header_timer(self) -> None:
        self._stop(self._header_timer)
        self._header_timer = self.loop.call_later(self.limits.header_timeout_s, self._too_slow)

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def protocol_class(limits: Limits) -> type[GuardedProtocol]:
    """A protocol with these limits; uvicorn makes one object of it per connection."""
    return type("GuardedProtocolWithLimits", (GuardedProtocol,), {"limits": limits})
