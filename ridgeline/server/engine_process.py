"""How does the engine live in a process of its own? `python -m ridgeline.server.engine_process`.

It is started by the HTTP process with one end of a socket pair, which is its only way in and out:
nobody else can connect to it, and it ends as soon as the other end is closed, however that came
about. `--builder module:function` names what makes the engine from an EngineConfig and a progress
callback; the default is ridgeline.build:build_without_text, and tests and extensions may name
another.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import socket
import threading
from contextlib import suppress
from importlib import import_module
from math import inf
from typing import TYPE_CHECKING, NoReturn

from ridgeline.child import die_with_parent, harden
from ridgeline.clock import WallClock
from ridgeline.devices import wake_driver
from ridgeline.devices.host_memory import keep_for_others
from ridgeline.errors import ConfigError, EngineLost
from ridgeline.frames import BrokenWire, frame, read_frame
from ridgeline.imports import import_engine
from ridgeline.log import say, set_up
from ridgeline.server.config import DEFAULT_BUILDER
from ridgeline.server.engine_loop import Builder, EngineLoop, Served, ready_message
from ridgeline.server.heartbeat import Heartbeat
from ridgeline.server.outlet import drain, never_block
from ridgeline.server.tripwire import arm
from ridgeline.server.wire import (
    Command,
    Event,
    Faulted,
    Loading,
    Start,
    StartFailed,
    read_command,
)
from ridgeline.startup import Started, StartUp, keep_what_is_there, say_phases

if TYPE_CHECKING:
    from ridgeline.distributed.links import Ranks

MAX_WAITING_COMMANDS = 4096
PROGRESS_PERIOD_S = 0.2
EXIT_FAULT = 70  # EX_SOFTWARE
EXIT_CONFIG = 78  # EX_CONFIG

logger = logging.getLogger("ridgeline.server.engine_process")


class Wire:
    """The engine's end of the socket pair: a thread reads, the engine's loop writes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._inbox: queue.Queue[Command] = queue.Queue(MAX_WAITING_COMMANDS)
        self._sending = threading.Lock()  # whoever watches the other ranks has a last word

    def listen(self) -> None:
        """Start reading. The process ends when the other side is gone, whatever it is doing."""
        threading.Thread(target=self._read, name="wire", daemon=True).start()

    def take(self, *, wait_s: float) -> list[Command]:
        """What has come in. If that is nothing, what comes first within so many seconds."""
        commands = []
        if wait_s and self._inbox.empty():
            with suppress(queue.Empty):
                commands.append(self._inbox.get(timeout=None if wait_s == inf else wait_s))
        while not self._inbox.empty():
            commands.append(self._inbox.get_nowait())
        return commands

    def send(self, event: Event) -> None:
        try:
            with self._sending:
                self._sock.sendall(frame(event))
        except OSError:
            leave()

    def _read(self) -> None:
        try:
            while True:
                self._inbox.put(read_command(read_frame(self._sock)))
        except (EOFError, OSError):
            leave()
        except BrokenWire as fault:
            say(logger, logging.CRITICAL, "the HTTP side broke the protocol", reason=fault)
            leave()


def leave(code: int = 0) -> NoReturn:
    """End at once, from any thread: nothing here is worth saving but the last line of the log, and
    memory is the system's."""
    drain()
    os._exit(code)


def _watch_ranks(ranks: Ranks, wire: Wire, overdue_s: float) -> None:
    """A group without one of its ranks is of no use: the HTTP side starts another."""

    def end(words: str) -> None:
        wire.send(Faulted(words))
        leave(EXIT_FAULT)

    ranks.overdue_s = overdue_s
    ranks.on_lost = end


def load_builder(name: str) -> Builder:
    module, _, function = name.partition(":")
    builder: Builder = getattr(import_module(module), function)
    return builder


def _build(wire: Wire, start: Start, builder: str, startup: StartUp) -> Served:
    """Raises ConfigError as the builder does."""
    clock = WallClock()
    said = clock.now()

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal said
        if done == total or clock.now() - said > PROGRESS_PERIOD_S:
            said = clock.now()
            wire.send(Loading(stage, done, total))

    if builder == DEFAULT_BUILDER:
        wake_driver(start.config.device)
        import_engine(startup, DEFAULT_BUILDER.partition(":")[0])
    served = load_builder(builder)(start.config, progress)
    if isinstance(served, Started):
        startup.take(served.startup)
    return served


def _report(served: Served) -> None:
    """What was decided and what memory it takes: a line each, for the operator."""
    decisions = "; ".join(f"{d.field}={d.got} ({d.because})" for d in served.resolved.decisions)
    memory = "; ".join(
        f"{row.what}={row.predicted}"
        + ("" if row.measured is None else f" (measured {row.measured})")
        for row in served.memory
    )
    say(logger, logging.INFO, "resolved", decisions=decisions or "none")
    say(logger, logging.INFO, "memory contract in bytes", items=memory)
    if served.run_record is not None:
        setup = served.run_record.pricer.setup
        say(
            logger, logging.INFO, "steps are priced",
            device=setup.device.label, origin=setup.constants.origin,
        )  # fmt: skip


def run(wire: Wire, builder: str, heartbeat_fd: int | None = None) -> int:
    """Build, say so, and serve until the wire closes. The exit code."""
    wire.listen()
    start = wire.take(wait_s=inf)[0]
    if not isinstance(start, Start):
        return EXIT_FAULT
    set_up(start.log_level, start.log_format)
    keep_for_others(start.http_bytes)
    try:
        startup = StartUp.of_process("Python")
        served = _build(wire, start, builder, startup)
        if (ranks := getattr(served, "ranks", None)) is not None:
            _watch_ranks(ranks, wire, start.overdue_s)
        keep_what_is_there()
        _report(served)
        phases = startup.report()
        say_phases(phases)
        heartbeat = None
        if heartbeat_fd is not None and served.run_record is not None:
            heartbeat = Heartbeat(heartbeat_fd, served.run_record)
            served.engine.listeners.append(heartbeat)
            if served.run_record.computes_in_submit:
                threading.Thread(target=heartbeat.show_long_steps, daemon=True).start()
        if start.tripwire and served.resolved.device == "cpu":
            arm()
        wire.send(ready_message(served, os.getpid(), phases))
        EngineLoop(served, wire, WallClock(), heartbeat).run()
    except ConfigError as fault:
        wire.send(StartFailed(str(fault)))
        return EXIT_CONFIG
    except EngineLost as fault:
        wire.send(Faulted(str(fault)))
        return EXIT_FAULT
    except Exception as fault:
        say(logger, logging.CRITICAL, "the engine failed", trace=True)
        wire.send(Faulted(f"{type(fault).__name__}: {fault}"[:500]))
        return EXIT_FAULT
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="ridgeline.server.engine_process")
    parser.add_argument("--fd", type=int, required=True, help="our end of the socket pair")
    parser.add_argument("--heartbeat-fd", type=int, help="a page for which step we are at")
    parser.add_argument("--builder", default=DEFAULT_BUILDER)
    options = parser.parse_args()
    die_with_parent()
    harden()
    never_block()
    os.set_inheritable(options.fd, False)
    return run(Wire(socket.socket(fileno=options.fd)), options.builder, options.heartbeat_fd)


if __name__ == "__main__":
    code = main()
    drain()
    os._exit(code)  # no interpreter teardown: a device library may hang in it
