"""Is the body one that we read, and all there in time?"""

from __future__ import annotations

from starlette.types import Receive, Scope

from ridgeline.server.admission import Ticket
from ridgeline.server.config import Limits
from ridgeline.server.errors import ApiError
from ridgeline.server.http_protocol import EXTENSION, GuardedProtocol


class ClientGone(Exception):
    """The connection is closed; there is nobody to answer."""


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def check_headers(scope: Scope) -> None:
    """Raises ApiError unless the headers announce plain JSON."""
    kinds = header_values(scope, b"content-type")
    kind, _, options = kinds[0].partition(b";") if len(kinds) == 1 else (b"", b"", b"")
    charset = options.strip().lower().replace(b'"', b"")
    if kind.strip().lower() != b"application/json" or charset not in (b"", b"charset=utf-8"):
        raise ApiError("unsupported_media_type", "send the header Content-Type: application/json")
    encodings = header_values(scope, b"content-encoding")
    if any(value.strip().lower() not in (b"", b"identity") for value in encodings):
        raise ApiError("unsupported_encoding", "compressed bodies are not read; send it plain")


async def read_body(scope: Scope, receive: Receive, ticket: Ticket, limits: Limits) -> bytes:
    """The whole body. Raises ApiError when it is too large, too slow or no HTTP, ClientGone when
    the client is."""
    declared = header_values(scope, b"content-length")
    length = int(declared[0]) if declared and declared[0].isdigit() else None
    if length is not None and length > limits.max_body_bytes:
        raise _too_large(limits)
    if length:
        ticket.hold_bytes(length)
    connection: GuardedProtocol = scope["extensions"][EXTENSION]
    timer = connection.expect_body()
    try:
        return await _collect(connection, receive, ticket if length is None else None, limits)
    finally:
        timer.cancel()


async def _collect(
    connection: GuardedProtocol, receive: Receive, ticket: Ticket | None, limits: Limits
) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        if connection.fault is not None:
            raise connection.fault
        part = message.get("body", b"")
        size += len(part)
        if size > limits.max_body_bytes:
            raise _too_large(limits)
        if ticket is not None:
            ticket.hold_bytes(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limits: Limits) -> ApiError:
    return ApiError("request_too_large", f"a body may have at most {limits.max_body_bytes} bytes")


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection, or the response is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass
