"""How is a body read, and is it one clean JSON object? Stricter than the standard library, with a
bound.

msgspec would be faster but takes the last of two equal keys; two readers that disagree on which
key counts are a way past a filter, so duplicates are refused here.
"""

from __future__ import annotations

import json
import math
from typing import Never

from starlette.types import Receive, Scope

from ridgeline.server.admission import Ticket
from ridgeline.server.config import Limits
from ridgeline.server.errors import ApiError
from ridgeline.server.http_protocol import EXTENSION, GuardedProtocol

MAX_CONTAINERS = 65_536  # the parser makes them without ever letting another thread run
ITEM_BYTES = 80  # a number of Python, its place in the list, and once more while it is converted
BOM = b"\xef\xbb\xbf"
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))


def _refuse(why: str) -> Never:
    raise ApiError("invalid_json", f"the body is not usable JSON: {why}")


def parse_object(body: bytes, max_depth: int = 64) -> dict[str, object]:
    """The object that `body` spells. Raises ApiError invalid_json, saying why.

    Refused: bytes that are not UTF-8, a byte order mark, anything after the object, NaN and
    Infinity (also 1e999), two equal keys, more than `max_depth` levels or 65,536 lists and objects,
    a top that is no object.
    """
    if not body.strip():
        _refuse("it is empty")
    if body.startswith(BOM):
        _refuse("it starts with a byte order mark")
    brackets = structure(body)
    if brackets.count(b"[") > MAX_CONTAINERS:
        _refuse(f"it has more than {MAX_CONTAINERS} lists and objects")
    if too_deep(brackets, max_depth):
        _refuse(f"it is nested deeper than {max_depth} levels, or its brackets do not match")
    try:
        value = _DECODER.decode(body.decode("utf-8"))
    except UnicodeDecodeError:
        _refuse("it is not UTF-8")
    except json.JSONDecodeError as fault:
        _refuse(f"{fault.msg.lower()} at character {fault.pos}")
    except (ValueError, RecursionError):
        _refuse("a number in it is too long")
    if not isinstance(value, dict):
        _refuse("the top level must be an object")
    return value


def parsed_bytes(body: bytes) -> int:
    """What the object takes in memory until it is answered, beside the body: at most, and nearly
    that for a list of token ids."""
    return 2 * len(body) + ITEM_BYTES * body.count(b",")


def structure(body: bytes) -> bytes:
    """The brackets of `body` that stand outside strings, braces as brackets.

    Works on whole buffers, so that megabytes take milliseconds.
    """
    without_escapes = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = without_escapes.translate(_BRACKETS, _NOT_STRUCTURE)
    return b"".join(marks.split(b'"')[::2])


def too_deep(brackets: bytes, max_depth: int) -> bool:
    """Whether they nest deeper than `max_depth`, or do not match: a round removes a level."""
    for _ in range(max_depth):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        _refuse("an object has the same key twice")
    return values


def _constant(name: str) -> Never:
    _refuse(f"{name} is not a JSON number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _refuse("a number in it is too large")
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_float, strict=True
)


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
