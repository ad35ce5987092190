"""Ranks as real processes: this one is rank 0, the others are started once and do many jobs."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from ridgeline.distributed.collectives import open_collective
from ridgeline.distributed.placement import Placement

TIMEOUT_S = 120.0


class Ranks:
    """`run(job, *args)` calls `job(placement, *args)` on every rank at once and returns what each
    made of it. Jobs are functions of modules. A rank that fails ends the others' waiting."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        listener = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        self._links: list[Connection] = []
        self._processes = []
        for rank in range(1, size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, size, address), daemon=True)
            process.start()
            there.close()
            self._links.append(here)
            self._processes.append(process)
        self.collective = open_collective(
            "gloo", 0, size, address, listener=listener, timeout_s=TIMEOUT_S
        )
        self.placement = Placement(0, size, self.collective)

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        for link in self._links:
            link.send((job, args))
        try:
            mine = job(self.placement, *args)
        except Exception as error:
            told = [self._answer(link) for link in self._links]
            others = "\n".join(text for is_well, text in told if not is_well)
            raise AssertionError(f"rank 0 failed: {error!r}\n{others}") from error
        answers = [mine]
        for is_well, answer in map(self._answer, self._links):
            assert is_well, answer
            answers.append(answer)
        return answers

    def close(self) -> None:
        self.collective.close()
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(timeout=TIMEOUT_S)
            assert process.exitcode == 0

    def _answer(self, link: Connection) -> tuple[bool, Any]:
        if not link.poll(TIMEOUT_S):
            return False, "a rank said nothing"
        try:
            found: tuple[bool, Any] = link.recv()
        except EOFError:
            return False, "a rank is gone"
        return found


def _serve(link: Connection, rank: int, size: int, address: str) -> None:
    torch.set_num_threads(1)
    collective = open_collective("gloo", rank, size, address, timeout_s=TIMEOUT_S)
    placement = Placement(rank, size, collective)
    while True:
        try:
            job, args = link.recv()
        except EOFError:
            break
        try:
            link.send((True, job(placement, *args)))
        except Exception:
            link.send((False, f"rank {rank} failed: {traceback.format_exc()}"))
            break
    collective.close()
