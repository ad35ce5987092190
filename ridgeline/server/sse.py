"""How does a stream of server-sent events begin, and how does it end? Exactly once each."""

from __future__ import annotations

from enum import Enum

from starlette.types import Send

from ridgeline.errors import check
from ridgeline.server.errors import ApiError
from ridgeline.server.replies import DONE, KEEPALIVE

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)


class State(Enum):
    NEW = "new"
    OPEN = "open"
    ENDED = "ended"


class EventStream:
    """NEW -> OPEN -> ENDED. `[DONE]` is written by `finish` alone, an error event by `fail`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.state = State.NEW

    async def write(self, data: bytes) -> None:
        """Send events, the status line first if need be."""
        check(self.state is not State.ENDED, "nothing follows the end of a stream")
        if self.state is State.NEW:
            self.state = State.OPEN
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": list(HEADERS)}
            )
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def keep_alive(self) -> None:
        await self.write(KEEPALIVE)

    async def finish(self, data: bytes) -> None:
        """The last events of a success."""
        await self.write(b"")
        await self._end(data + DONE)

    async def fail(self, error: ApiError) -> None:
        """Before the first byte the error is raised and keeps its status; after it, one event."""
        if self.state is State.NEW:
            raise error
        await self._end(error.event())

    async def _end(self, data: bytes) -> None:
        check(self.state is State.OPEN, "a stream ends once")
        self.state = State.ENDED
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
