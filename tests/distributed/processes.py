"""Ranks as real processes: this one is rank 0, the others are started once and do many jobs."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ridgeline.distributed.collectives import open_collective
from ridgeline.distributed.placement import Placement

TIMEOUT_S = 120.0


class Ranks:
    """`run(job, *args, size=n)` calls `job(placement, *args)` on the first n ranks at once and
    returns what each made of it. Jobs are functions of modules. A rank that fails ends, and with it
    the others' waiting."""

    def __init__(self, most: int) -> None:
        context = multiprocessing.get_context("spawn")
        listeners = {n: socket.create_server(("127.0.0.1", 0)) for n in range(2, most + 1)}
        addresses = {n: f"127.0.0.1:{one.getsockname()[1]}" for n, one in listeners.items()}
        self._links: list[Connection] = []
        self._processes = []
        for rank in range(1, most):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, addresses), daemon=True)
            process.start()
            there.close()
            self._links.append(here)
            self._processes.append(process)
        self._placements = {
            size: Placement(
                0,
                size,
                open_collective(
                    "gloo", 0, size, address, listener=listeners[size], timeout_s=TIMEOUT_S
                ),
            )
            for size, address in addresses.items()
        }

    def run(self, job: Callable[..., Any], *args: Any, size: int = 2) -> list[Any]:
        links = self._links[: size - 1]
        for link in links:
            link.send((job, args, size))
        try:
            mine = job(self._placements[size], *args)
        except Exception as error:
            _close(self._placements)  # others wait no longer
            told = [self._answer(link) for link in links]
            others = "\n".join(text for is_well, text in told if not is_well)
            raise AssertionError(f"rank 0 failed: {error!r}\n{others}") from error
        answers = [mine]
        for is_well, answer in map(self._answer, links):
            assert is_well, answer
            answers.append(answer)
        return answers

    def close(self) -> None:
        _close(self._placements)
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


def children_of(pid: int) -> set[int]:
    """Of all threads of a process. One that ends meanwhile hands its own to another, which may have
    been looked at already: then all are looked at again."""
    while True:
        try:
            tasks = Path(f"/proc/{pid}/task").iterdir()
            return {int(n) for task in tasks for n in (task / "children").read_text().split()}
        except (FileNotFoundError, ProcessLookupError):
            if not Path(f"/proc/{pid}").exists():
                return set()


def _serve(link: Connection, rank: int, addresses: dict[int, str]) -> None:
    torch.set_num_threads(1)
    placements = {
        size: Placement(
            rank, size, open_collective("gloo", rank, size, address, timeout_s=TIMEOUT_S)
        )
        for size, address in addresses.items()
        if rank < size
    }
    while True:
        try:
            job, args, size = link.recv()
        except EOFError:
            break
        try:
            link.send((True, job(placements[size], *args)))
        except Exception:
            link.send((False, f"rank {rank} failed: {traceback.format_exc()}"))
            break
    _close(placements)


def _close(placements: dict[int, Placement]) -> None:
    for placement in placements.values():
        if placement.collective is not None:
            placement.collective.close()
