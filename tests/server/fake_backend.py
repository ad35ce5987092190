"""A server that answers as a test scripts it, and a router in a thread in front of some."""

from __future__ import annotations

import asyncio
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from ridgeline.clock import WallClock
from ridgeline.server.config import Limits, RouteConfig
from ridgeline.server.lifecycle import Http, listen, loop_factory, url_of, uvicorn_config
from ridgeline.server.route import RouterService, make_route_app
from tests.server.running import PATIENCE_S, until

Parts = Iterator[bytes]
Script = Callable[[dict[str, Any]], Parts]  # the body to the pieces that are written


def answer(
    body: bytes, status: str = "200 OK", *headers: str, kind: str = "application/json"
) -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        f"content-type: {kind}",
        f"content-length: {len(body)}",
        *headers,
    ]
    return "\r\n".join((*lines, "", "")).encode() + body


def json_answer(value: object, status: str = "200 OK", *headers: str) -> bytes:
    return answer(json.dumps(value).encode(), status, *headers)


def refusal(code: str, status: str = "503 Service Unavailable", *headers: str) -> bytes:
    return json_answer({"error": {"message": code, "code": code}}, status, *headers)


def usage(num_prompt: int, num_cached: int) -> dict[str, Any]:
    details = {"cached_tokens": num_cached}
    return {"usage": {"prompt_tokens": num_prompt, "prompt_tokens_details": details}}


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def events(*words: str) -> Parts:
    yield STREAM_HEAD
    for word in words:
        yield chunk(f"data: {word}\n\n".encode())
    yield chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class FakeBackend:
    """`seen` are the bodies of its POSTs; `num_gone` its answers that nobody read to their end."""

    def __init__(self, script: Script, model: str = "m", load: object = None) -> None:
        self.script = script
        self.model = model
        self.load = load
        self.seen: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.num_gone = 0
        fake = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with suppress(OSError):
                    fake._serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

        self._open: set[socket.socket] = set()
        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        self._open.add(sock)
        data = b""
        while True:
            while b"\r\n\r\n" not in data:
                if not (more := sock.recv(65536)):
                    return
                data += more
            head, _, data = data.partition(b"\r\n\r\n")
            text = head.decode("latin-1")
            path = text.split(" ")[1]
            if text.startswith("GET"):
                sock.sendall(self._page(path))
                continue
            self.heads.append(text)
            lengths = [
                line for line in text.lower().split("\r\n") if line.startswith("content-length:")
            ]
            length = int(lengths[0].partition(":")[2])
            while len(data) < length:
                data += sock.recv(65536)
            body, data = json.loads(data[:length]), data[length:]
            self.seen.append(body)
            try:
                for part in self.script(body):
                    if not part:  # the script wants the connection closed
                        sock.shutdown(socket.SHUT_RDWR)
                        return
                    sock.sendall(part)
            except OSError:
                self.num_gone += 1
                return

    def _page(self, path: str) -> bytes:
        if path == "/v1/models":
            return json_answer({"object": "list", "data": [{"id": self.model, "object": "model"}]})
        if path == "/load" and self.load is not None:
            return self.load if isinstance(self.load, bytes) else json_answer(self.load)
        return json_answer({}, "404 Not Found")

    def stop(self) -> None:
        """As a machine that is gone: no new connection, and those there are closed."""
        self._server.shutdown()
        self._server.server_close()
        for sock in list(self._open):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Routed:
    """A router, seen from both sides."""

    loop: asyncio.AbstractEventLoop  # the router's

    def __init__(self, service: RouterService, url: str) -> None:
        self.service = service
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False)

    def ask(self, **fields: object) -> httpx.Response:
        body = {"model": "m", "prompt": "once"} | fields
        return self.http.post("/v1/completions", json=body)

    def backend(self, fake: FakeBackend) -> Any:
        return next(one for one in self.service.backends if one.url == fake.url)


@contextmanager
def routing(
    *fakes: FakeBackend, limits: dict[str, Any] | None = None, wait: bool = True, **options: Any
) -> Iterator[Routed]:
    """A router in front of them, in a thread; all of them end with the block."""
    options = {"policy": "least-loaded"} | options
    config = RouteConfig(
        backends=tuple(fake.url for fake in fakes), limits=Limits(**(limits or {})), **options
    )
    service = RouterService(config, WallClock())
    sock = listen("127.0.0.1", 0)
    http = Http(uvicorn_config(config.limits, make_route_app(service, config)))

    routed = Routed(service, url_of(sock))

    async def serve() -> None:
        routed.loop = asyncio.get_running_loop()
        service.begin()
        await http._serve([sock])
        await service.close()

    def run() -> None:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        if wait:
            until(lambda: all(one.is_up for one in service.backends), "all backends to be up")
        yield routed
    finally:
        routed.http.close()
        http.should_exit = True
        thread.join(PATIENCE_S)
        sock.close()
        for fake in fakes:
            fake.stop()
