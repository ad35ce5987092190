"""How do ranks talk? The table of the ways; a line is a file."""

from __future__ import annotations

import socket
from collections.abc import Callable

from ridgeline.distributed.gloo import nobody_knows
from ridgeline.distributed.placement import Collective
from ridgeline.formats import COLLECTIVES
from ridgeline.registry import load


def open_collective(
    name: str,
    rank: int,
    size: int,
    address: str,
    *,
    listener: socket.socket | None = None,
    timeout_s: float = 600.0,
    alive: Callable[[], None] = nobody_knows,
) -> Collective:
    """Returns when all `size` ranks have met at rank 0's `address` (host:port), in any order.

    `listener`: rank 0's socket, bound to that address, for who had to know the port before. A call
    that waits longer than `timeout_s` for another rank fails. `alive` raises when one that is
    awaited will never come. ConfigError for unknown names and
    when ranks do not meet.
    """
    opened: Collective = collective_class(name)(  # type: ignore[call-arg]
        rank, size, address, listener=listener, timeout_s=timeout_s, alive=alive
    )
    return opened


def collective_class(name: str) -> type[Collective]:
    found: type[Collective] = load(COLLECTIVES, name, "collective")
    return found
