"""Ranks for tests with many engines: forked from a process that has loaded all libraries."""

from __future__ import annotations

import logging
import multiprocessing
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess

import pytest

from ridgeline import worker
from ridgeline.config import EngineConfig
from ridgeline.distributed.links import SECRET_BYTES, DriverLink, Processes, Ranks

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["ridgeline.build", "ridgeline.build_ranks", "ridgeline.worker"])


class Forked(Processes):
    host = "127.0.0.1"
    wait_s = 60.0

    def __init__(self, size: int, secret: bytes, must_record: bool) -> None:
        self.socks: list[socket.socket] = []
        self._processes: list[BaseProcess] = []
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            args = theirs, secret, rank, must_record
            process = FORKS.Process(target=_rank, args=args, daemon=True)
            process.start()
            theirs.close()
            self.socks.append(ours)
            self._processes.append(process)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def last_words(self, rank: int) -> str:
        self._processes[rank - 1].join(5.0)
        return f"exit code {self._processes[rank - 1].exitcode}"


def start(config: EngineConfig, *, must_record: bool = False) -> Ranks:
    secret = secrets.token_bytes(SECRET_BYTES)
    processes = Forked(config.num_ranks, secret, must_record)
    return Ranks(config.num_ranks, secret, processes.socks, processes)


@contextmanager
def prepared(*, must_record: bool = False) -> Iterator[None]:
    """Engines that begin in this context have such ranks. `must_record`: a rank ends, and with it
    its engine, where it cannot record a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ridgeline.build.start_ranks", partial(start, must_record=must_record))
        yield


def _rank(sock: socket.socket, secret: bytes, rank: int, must_record: bool) -> None:
    logging.basicConfig(level=logging.WARNING)
    if must_record:
        logging.getLogger("ridgeline.devices.cpu").setLevel(logging.INFO)
        logging.getLogger("ridgeline.devices.cpu").addFilter(fails)
    worker.run(DriverLink(sock, secret, rank))


def fails(record: logging.LogRecord) -> bool:
    """What this logger says of a step ends the rank that says it."""
    raise AssertionError(record.getMessage())
