"""How does the server start, and how does it end?

Start: listen (so that probes get an answer), start the engine process, say where we are.
SIGTERM or SIGINT before there is an engine: exit 0 at once.
First SIGTERM or SIGINT after that: refuse new work, let open requests finish until the drain
deadline, fail the rest, exit 0. Second one: exit at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Any

import uvicorn
from msgspec import structs

from ridgeline.asked import check_asked
from ridgeline.clock import WallClock
from ridgeline.errors import ConfigError, EngineFault
from ridgeline.log import say
from ridgeline.server.app import make_admin_app, make_app
from ridgeline.server.auth import KEY_VARIABLE, RIGHTS, load_keys
from ridgeline.server.config import (
    DEFAULT_BUILDER,
    Limits,
    Listening,
    ServeConfig,
    check_serve_numbers,
)
from ridgeline.server.hosts import check_admin_bind, check_bind
from ridgeline.server.http_protocol import max_open_files, protocol_class
from ridgeline.server.outlet import drain, never_block
from ridgeline.server.service import Drained, Service
from ridgeline.server.tracing import open_tracing

BACKLOG = 2048
ACCEPTS_PER_TURN = 16  # connections that asyncio accepts in one turn of its loop; uvloop: one
ADMIN_CONNECTIONS = 16  # of the admin port, beside those of the other
NUM_OWN_FILES = 128  # a server without a client has about 30 open; 64 may be refused and linger
SEND_BUFFER_BYTES = 256 << 10  # the kernel's, per connection; by itself it would take megabytes
TCP_OPTIONS = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # seconds, times
LAST_WORDS_S = 1.0  # for error events and half-sent answers, after the drain deadline
POLL_S = 0.05
EXIT_NO_ENGINE = 70  # EX_SOFTWARE
PLAIN = Listening()
SIGNALS = (signal.SIGTERM, signal.SIGINT)

logger = logging.getLogger(__name__)


def serve(config: ServeConfig, on_listening: Callable[[str], None] | None = None) -> int:
    """Serve until told to stop; the exit code: 0 after a drain, 70 when the engine keeps dying.

    `on_listening` gets the URL. Raises ConfigError when the server cannot start as asked: a number,
    the tokenizer, the address, the keys, or (later) the model.
    """
    never_block()
    with hardened():
        return _serve(config, on_listening)


@contextmanager
def hardened() -> Iterator[None]:
    """What is made here is for its owner alone, a core file would hold prompts, and who is told to
    stop ends, whatever it is at."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    mask = os.umask(0o077)
    handlers = [(name, signal.signal(name, _stop_early)) for name in SIGNALS]
    try:
        yield
    finally:
        os.umask(mask)
        for name, handler in handlers:
            signal.signal(name, handler)


def _stop_early(number: int, frame: FrameType | None) -> None:
    say(logger, logging.INFO, "stopped while starting", signal=number)
    drain()
    os._exit(0)


def _serve(config: ServeConfig, on_listening: Callable[[str], None] | None) -> int:
    check_serve_numbers(config)
    if config.builder != DEFAULT_BUILDER:
        import_module(config.builder.partition(":")[0])  # it may add formats, which are asked for
    check_front(config)
    check_asked(config.engine)
    keys = load_keys(config.api_key_file, os.environ.get(KEY_VARIABLE))
    if config.engine.policy is None and len(keys) > 1:
        config = structs.replace(config, engine=structs.replace(config.engine, policy="fair"))
        say(logger, logging.INFO, "decided", policy="fair (nothing was asked; several keys)")
    check_bind(
        config.host,
        has_keys=bool(keys),
        allow_anyone=config.allow_anyone_on_the_network_without_a_key,
    )
    if config.admin_port is not None:
        check_admin_bind(config.admin_host, keys)
    if missing := [right for right in RIGHTS if keys and not keys.any_may(right)]:
        say(logger, logging.WARNING, "no key has these rights", rights=",".join(missing))
    if not keys and config.allow_anyone_on_the_network_without_a_key:
        say(logger, logging.WARNING, "anyone who reaches this address may use it", host=config.host)
    clock = WallClock()
    tracing = None
    if config.otlp_endpoint is not None:
        tracing = open_tracing(config.otlp_endpoint, clock)
    config = structs.replace(config, limits=with_open_files(config.limits))
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(listen(config.host, config.port))
        service = Service(config, clock, tracing)
        server = _Server(
            service, sock, uvicorn_config(config.limits, make_app(service, keys), config)
        )
        if config.admin_port is not None:
            admin = stack.enter_context(listen(config.admin_host, config.admin_port))
            limits = structs.replace(config.limits, max_connections=ADMIN_CONNECTIONS)
            server.add(
                admin, uvicorn_config(limits, make_admin_app(service, keys), config, shared=False)
            )
            say(logger, logging.INFO, f"admin port: listening on {url_of(admin, config)}")
        url = url_of(sock, config)
        say(logger, logging.INFO, f"listening on {url}")
        if on_listening is not None:
            on_listening(url)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(server.run())


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigError when the address cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as fault:
        raise ConfigError(f"host {host} is no address of this machine: {fault.strerror}") from None
    try:
        _set_options(sock)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as fault:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {fault.strerror}; choose another port, or 0 "
            "for any free one"
        ) from None
    return sock


def with_open_files(limits: Limits) -> Limits:
    """The limits, with no more connections than this process may open files for; it first raises
    its own limit, and tells what it did. ConfigError when there is no room for one connection."""
    needed = limits.max_connections + NUM_OWN_FILES
    before = max_open_files()
    if before >= needed:
        return limits
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(ValueError, OSError):  # some systems have one more limit, which nobody tells
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    now = max_open_files()
    if now > before:
        say(logger, logging.INFO, "raised the limit of open files", before=before, now=now)
    if now >= needed:
        return limits
    num_connections = now - NUM_OWN_FILES
    way_out = f"raise the hard limit of open files to {needed} (ulimit -Hn, or LimitNOFILE=)"
    if num_connections < 1:
        raise ConfigError(f"only {now} files may be open, too few for one connection: {way_out}")
    say(
        logger, logging.WARNING,
        f"fewer connections than --max-connections: {way_out}, or ask for fewer",
        max_connections=num_connections, asked=limits.max_connections, open_files=now,
    )  # fmt: skip
    return structs.replace(limits, max_connections=num_connections)


def _set_options(sock: socket.socket) -> None:
    """Connections inherit these. What a client does not read must be seen by us and not vanish in
    the kernel's buffers."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    keep_alive(sock)


def keep_alive(sock: socket.socket) -> None:
    """A machine that is gone is noticed without sending to it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in TCP_OPTIONS.items():
        if hasattr(socket, name):  # each system has some of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def check_front(config: Listening) -> None:
    """ConfigError for a certificate that is unusable, or a root path that is none."""
    root, cert, key = config.root_path, config.ssl_certfile, config.ssl_keyfile
    if root and not root.startswith("/"):
        raise ConfigError(f"root_path {root} must begin with a slash, as /llm")
    if key is not None and cert is None:
        raise ConfigError("ssl_keyfile needs ssl_certfile, the certificate of that key")
    if cert is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key)
        except OSError as fault:  # of TLS too
            raise ConfigError(
                f"ssl_certfile {cert} (ssl_keyfile {key}) cannot be used: {fault}; give a chain in "
                "PEM and its key without a password"
            ) from None


def url_of(sock: socket.socket, config: Listening = PLAIN) -> str:
    scheme = "http" if config.ssl_certfile is None else "https"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def uvicorn_config(
    limits: Limits, app: object, config: Listening = PLAIN, *, shared: bool = True
) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        http=protocol_class(limits, shared=shared),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # the gate logs what matters, without a client's words
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=ACCEPTS_PER_TURN,
        timeout_keep_alive=limits.idle_connection_timeout_s,
        timeout_graceful_shutdown=1,
    )


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on this system: the standard loop does the same, slower
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio tries to accept some thousand times a second when files run out (uvloop does not)."""
    if isinstance(fault := context.get("exception"), OSError) and fault.errno in (
        errno.EMFILE,
        errno.ENFILE,
    ):
        say(logger, logging.WARNING, "no connection can be accepted", reason=fault.strerror)
    else:
        loop.default_exception_handler(context)


class Http(uvicorn.Server):
    """Its backlog says how many connections are accepted at once, not how many may wait for it."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)


class Doors:
    """The sockets of a process that serves, and its signals: the first drains, the second ends."""

    def __init__(self, service: Drained) -> None:
        self._drained = service
        self._doors: list[tuple[socket.socket, uvicorn.Server]] = []
        self._stop = asyncio.Event()
        self._num_signals = 0

    def add(self, sock: socket.socket, config: uvicorn.Config) -> uvicorn.Server:
        """One more socket to answer on."""
        http = Http(config)
        self._doors.append((sock, http))
        return http

    def _begin(self) -> asyncio.Task[None]:
        """Answer, and listen to signals."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_tell)
        for name in SIGNALS:
            loop.add_signal_handler(name, self._on_signal, name)
        return asyncio.create_task(self._answer())

    async def _answer(self) -> None:
        await asyncio.gather(*(http._serve([sock]) for sock, http in self._doors))

    def _on_signal(self, name: int) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            say(logger, logging.INFO, "draining; a second signal ends at once", signal=name)
            self._drained.drain()
            self._stop.set()
            return
        say(logger, logging.WARNING, "ending at once", signal=name)
        self.kill()
        drain()
        os._exit(128 + name)

    def kill(self) -> None:
        """End what others do for us: this process ends now."""

    async def _drain(self) -> None:
        service = self._drained
        deadline = service.clock.now() + service.limits.drain_s
        while service.num_open and service.clock.now() < deadline:
            await asyncio.sleep(POLL_S)
        if service.num_open:
            say(
                logger, logging.WARNING, "the drain deadline has passed",
                open_requests=service.num_open,
            )  # fmt: skip
        service.fail_all("shutting_down", "the server shut down before this was finished")
        deadline = service.clock.now() + LAST_WORDS_S
        while service.num_open and service.clock.now() < deadline:
            await asyncio.sleep(POLL_S)

    def _close_doors(self) -> None:
        for _, server in self._doors:
            server.should_exit = True


class _Server(Doors):
    """The event loop's main task: HTTP, engine supervisor, timekeeper, signals."""

    def __init__(self, service: Service, sock: socket.socket, config: uvicorn.Config) -> None:
        super().__init__(service)
        self._service = service
        service.connections = self.add(sock, config).server_state.connections

    def kill(self) -> None:
        self._service.engine.kill()

    async def run(self) -> int:
        http = self._begin()
        engine = asyncio.create_task(self._service.engine.run())
        text = asyncio.create_task(self._service.read_early())
        timekeeper = asyncio.create_task(self._service.keep_time())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((http, engine, text, stop), return_when=asyncio.FIRST_COMPLETED)
            if text.done():
                await text
            return await self._end(engine)
        finally:
            for task in (timekeeper, stop, text):
                task.cancel()
            await self._close(http, engine)

    async def _end(self, engine: asyncio.Task[None]) -> int:
        """Drain, unless there is no engine any more to finish anything."""
        if engine.done():
            self._service.draining = True
            fault = engine.exception()
            self._service.fail_all("engine_unavailable", "the engine is gone")
            if isinstance(fault, EngineFault):
                say(logger, logging.CRITICAL, "no engine", reason=fault)
                return EXIT_NO_ENGINE
            if fault is not None:
                raise fault
            return EXIT_NO_ENGINE
        await self._drain()
        return 0

    async def _close(self, http: asyncio.Task[None], engine: asyncio.Task[None]) -> None:
        self._close_doors()
        await self._service.engine.stop()
        await asyncio.gather(http, engine, self._service.text.close(), return_exceptions=True)
        self._service.close()
        if self._service.tracing is not None:
            self._service.tracing.close()
