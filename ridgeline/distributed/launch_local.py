"""How are the other ranks of a group started on this host, and how do they end?

Each is a fresh process, never a fork, with one end of a socket pair that no other process has: as
soon as the driver is gone, however that came about, it reads the end of the file. The secret comes
in its environment.
"""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
from collections import deque
from contextlib import suppress
from threading import Thread, current_thread, main_thread
from typing import IO

from ridgeline.child import environment
from ridgeline.config import EngineConfig
from ridgeline.distributed.links import EXIT_S, SECRET_BYTES, SECRET_VARIABLE, Processes, Ranks

WORKER = (sys.executable, "-m", "ridgeline.worker")
MOST_WORDS = 300  # characters of a line
KILL_S = 5.0


class LocalProcesses(Processes):
    """Ranks 1 .. size - 1. `socks` are our ends of their socket pairs, in order."""

    host = "127.0.0.1"
    wait_s = 60.0
    how = "see their log lines"

    def __init__(self, size: int, secret: bytes) -> None:
        self.socks: list[socket.socket] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._lines: list[deque[str]] = []
        self._readers: list[Thread] = []
        env = environment() | {SECRET_VARIABLE: secret.hex()}
        # The kernel ends a child with the thread that has started it, not with the process.
        bound = ("--die-with-parent",) if current_thread() is main_thread() else ()
        try:
            for rank in range(1, size):
                self._start(rank, env, bound)
        except OSError:
            self.kill()
            raise

    def _start(self, rank: int, env: dict[str, str], bound: tuple[str, ...]) -> None:
        ours, theirs = socket.socketpair()
        self.socks.append(ours)
        with theirs:
            process = subprocess.Popen(
                [*WORKER, "--fd", str(theirs.fileno()), "--rank", str(rank), *bound],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=env,
                text=True,
                errors="backslashreplace",
            )
        self._processes.append(process)
        self._lines.append(deque(maxlen=1))
        if process.stderr is not None:
            told = process.stderr, self._lines[-1]
            self._readers.append(Thread(target=_pass_on, args=told, name="words", daemon=True))
            self._readers[-1].start()

    def kill(self) -> None:
        """All of them, and wait until they are gone."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_S)
        for reader in self._readers:
            reader.join(EXIT_S)

    def last_words(self, rank: int) -> str:
        """How a rank ended, and what it wrote last."""
        process, reader = self._processes[rank - 1], self._readers[rank - 1]
        with suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_S)
        reader.join(EXIT_S)
        code = process.poll()
        how = "it closed its socket" if code is None else f"exit code {code}"
        return ": ".join([how, *self._lines[rank - 1]])


def launch(config: EngineConfig) -> Ranks:
    """All of them but rank 0."""
    secret = secrets.token_bytes(SECRET_BYTES)
    processes = LocalProcesses(config.num_ranks, secret)
    return Ranks(config.num_ranks, secret, processes.socks, processes)


def _pass_on(words: IO[str], kept: deque[str]) -> None:
    """To our own standard error, whole lines."""
    with words:
        for line in words:
            if line.strip():
                kept.append(line.strip()[:MOST_WORDS])
            sys.stderr.write(line)
