"""How do ranks talk over sockets, on any device? PyTorch's gloo, in a group of our own.

The group is made from a store at an explicit address. The process-wide default group of
torch.distributed is left alone: a library that makes one does not meet ours. Store and group trust
whoever can connect to them, so the address has to be on loopback or in a private network.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from time import sleep
from typing import Any

import torch
from torch import distributed

from ridgeline.clock import WallClock
from ridgeline.distributed.placement import Collective
from ridgeline.errors import ConfigError, EngineFault

C10D: Any = distributed  # whose stubs leave most of it out


MEET_TURN_S = 0.01  # between two looks at who is there
WAIT_TURN = timedelta(seconds=0.5)  # between two looks at whether anybody is still awaited


def nobody_knows() -> None:
    """Whether the ranks that are awaited still live."""


class Gloo(Collective):
    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        *,
        listener: socket.socket | None = None,
        timeout_s: float,
        alive: Callable[[], None] = nobody_knows,
    ) -> None:
        host, _, port = address.rpartition(":")
        gloo, wait = C10D.ProcessGroupGloo, timedelta(seconds=timeout_s)
        try:
            if rank == 0 and listener is None:
                listener = socket.create_server((host, int(port)))
            # Without a socket of ours the store would listen on every interface.
            listen = {} if listener is None else {"master_listen_fd": listener.detach()}
            store = C10D.TCPStore(
                host,
                int(port),
                is_master=rank == 0,
                timeout=wait,
                wait_for_workers=False,
                **listen,
            )
            _await_all(store, rank, size, timeout_s, alive)
            options = gloo._Options()
            options._timeout = wait
            options._threads = 1
            options._devices = [gloo.create_device(hostname=own_host(address))]
            self._group = gloo(store, rank, size, options)
        except (RuntimeError, OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"rank {rank} of {size} did not meet the others at {address} within"
                f" {timeout_s:.0f} s ({reason}); see whether every rank was started and whether"
                " that host and port can be reached from here"
            ) from error
        self._store = store  # rank 0's serves the others
        self._is_abandoned = False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        self._finish(self._group.allreduce([x]))
        return x

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.contiguous()
        found = [torch.empty_like(x) for _ in range(self._group.size())]
        self._finish(self._group.allgather([found], [x]))
        return found

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        x, options = x.contiguous(), C10D.BroadcastOptions()
        options.rootRank = source
        self._finish(self._group.broadcast([x], options))
        return x

    def _finish(self, work: Any) -> None:
        """Waits for a collective. Between two ranks a wait that ends early would break the line, so
        that `send` and `recv` are not waited for like this."""
        while True:
            try:
                work.wait(WAIT_TURN)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
                if self._is_abandoned:
                    raise EngineFault("the ranks do not talk any more") from None

    def abandon(self) -> None:
        self._is_abandoned = True

    # gloo sends host memory alone: what is on a GPU goes by way of it.

    def send(self, x: torch.Tensor, to: int) -> None:
        self._group.send([x.contiguous().cpu()], to, 0).wait()

    def post(self, x: torch.Tensor, to: int) -> Callable[[], None]:
        kept = x.contiguous().cpu()
        work = self._group.send([kept], to, 0)

        def wait() -> None:
            work.wait()
            kept.numel()  # which had to live until now

        return wait

    def recv(self, into: torch.Tensor, source: int) -> None:
        there = into.cpu() if into.is_cuda else into
        self._group.recv([there], source, 0).wait()
        if there is not into:
            into.copy_(there)

    def close(self) -> None:
        self._group.shutdown()


def _await_all(
    store: Any, rank: int, size: int, timeout_s: float, alive: Callable[[], None]
) -> None:
    """What gloo does cannot be broken off, so it begins when all of them are there."""
    clock = WallClock()
    until = clock.now() + timeout_s
    store.set(f"here/{rank}", "")
    while not store.check([f"here/{one}" for one in range(size)]):
        alive()
        if clock.now() > until:
            raise RuntimeError("not all of them came")
        sleep(MEET_TURN_S)


def own_host(address: str) -> str:
    """This machine's on the way to that address (host:port)."""
    host, _, port = address.rpartition(":")
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(where)
        return str(way.getsockname()[0])
