"""One connection to the HTTP server without a network: what bytes go in, and what comes out?"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import httptools
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from ridgeline.clock import WallClock
from ridgeline.observe.latency import Traffic
from ridgeline.server.admission import Admission
from ridgeline.server.auth import Keys
from ridgeline.server.config import Limits
from ridgeline.server.hosts import HostGuard
from ridgeline.server.http_protocol import protocol_class
from ridgeline.server.json_body import read_body
from ridgeline.server.middleware import Middleware
from ridgeline.server.service import send_json


class Pipe(asyncio.Transport):
    """Keeps what is written to it. `reset`: the client may have lost some of it."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        super().__init__({"peername": (address, 1)})
        self.written = bytearray()
        self.is_paused = self.at_end = self.closed = self.reset = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        assert not self.at_end, "written after the end"
        if not self.closed:
            self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.at_end = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.reset = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_write_buffer_size(self) -> int:
        return 0


class Echo:
    """POST reads the body and tells its size; anything else is answered at once."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.admission = Admission(limits)
        self.admission.max_sequences = 1000
        self.num_bytes = 0  # of all bodies, so far

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.admission.open(scope["state"]["tenant"]) as ticket:
            if scope["method"] == "POST":
                self.num_bytes += len(await read_body(scope, receive, ticket, self.limits))
            await send_json(send, b"{}")


class Counting:
    """A parser that adds what it is fed to its connection's count."""

    def __init__(self, protocol: Any) -> None:
        self._parser = httptools.HttpRequestParser(protocol)
        self._protocol = protocol

    def feed_data(self, data: bytes) -> None:
        self._protocol.num_parsed += len(data)
        self._parser.feed_data(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


class Server:
    """Connections on one event loop, with their own limits."""

    def __init__(self, loop: asyncio.AbstractEventLoop, **limits: Any) -> None:
        self.loop = loop
        self.faults: list[str] = []  # that no task caught
        loop.set_exception_handler(lambda _, context: self.faults.append(str(context)))
        self.limits = Limits(**limits)
        self.app = Echo(self.limits)
        self.traffic = Traffic()
        self.methods: list[str] = []  # of all requests
        self._gate = Middleware(
            self.app, Keys(), HostGuard("127.0.0.1", ()), self.traffic, WallClock()
        )
        self._config = uvicorn.Config(
            self._serve, interface="asgi3", lifespan="off", log_config=None, access_log=False
        )
        self._config.load()
        self.state = ServerState()
        self._make = functools.partial(
            protocol_class(self.limits), self._config, self.state, {}, loop
        )

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.methods.append(scope["method"])
        await self._gate(scope, receive, send)

    def connect(self, address: str = "127.0.0.1") -> Connection:
        return Connection(self, self._make(), address)

    def settle(self) -> None:
        """Let the tasks run as far as they come."""
        for _ in range(50):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
            if not self.state.tasks:
                return


class Connection:
    def __init__(self, server: Server, protocol: Any, address: str) -> None:
        self.server = server
        self.protocol = protocol  # its parser's calls are counted
        self.protocol.num_parsed = 0
        self.protocol.parser = Counting(self.protocol)
        self.pipe = Pipe(address)
        self.protocol.connection_made(self.pipe)

    def send(self, data: bytes) -> bool:
        """Whether it was taken: nothing is read of a closed connection, or of one that waits."""
        if self.pipe.closed or self.pipe.is_paused:
            return False
        self.protocol.data_received(data)
        return True

    @property
    def num_parsed(self) -> int:
        return int(self.protocol.num_parsed)

    @property
    def is_over(self) -> bool:
        """Everything that will be said has been said."""
        return self.pipe.at_end or self.pipe.closed

    def leave(self) -> None:
        self.protocol.connection_lost(None)
        self.pipe.closed = True
        self.server.settle()
