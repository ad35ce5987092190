"""What do all connections of one port share? Places, and turns of the event loop."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter, deque
from collections.abc import Callable

from ridgeline.server.config import Limits
from ridgeline.server.errors import ApiError

SHARE = 8  # times what is free, for one of several addresses
PER_TURN = 16  # pieces of work of about 0.1 ms, between two looks at what else there is to do
NETWORK_BITS = 64  # of IPv6: what one customer of a provider has at least


class Places:
    """Who holds how many connections.

    No address takes the last places: with f free it may hold at most SHARE * f. So alone it gets
    8 of 9, as a proxy in front or the only machine that asks should, and of k that ask for all
    each gets 8 of 8k + 1. Fewer than nine places are anybody's.
    """

    def __init__(self, limits: Limits, *, shared: bool = True) -> None:
        self._most = limits.max_connections
        self._is_shared = shared
        self._held: Counter[str] = Counter()  # by network
        self.num_refused = 0  # that may still read why

    def take(self, address: str) -> ApiError | None:
        """None, or why there is no place for one more connection from this address."""
        free = self._most - self._held.total()
        if free <= 0:
            return ApiError("overloaded", "too many connections; try again later")
        network = _network(address)
        held = self._held[network]
        if self._is_shared and held + 1 > (limit := SHARE * free):
            return ApiError(
                "rate_limit_exceeded",
                f"your address holds {held} connections and may hold {limit} while {free} are "
                "free: close some, or have the server's --max-connections raised",
            )
        self._held[network] += 1
        return None

    def give_back(self, address: str) -> None:
        network = _network(address)
        self._held[network] -= 1
        if self._held[network] <= 0:
            del self._held[network]


def _network(address: str) -> str:
    """What counts as one: an IPv4 address, or a customer's IPv6 addresses together."""
    if ":" not in address:
        return address
    found = ipaddress.IPv6Address(address.partition("%")[0])
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(int(found) >> (128 - NETWORK_BITS))


class Slices:
    """What a thousand connections want at the same moment, a few in each turn of the event loop,
    in the order in which they wanted it: all others get their turns between."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._num_left = PER_TURN
        self._is_counting = False

    def do(self, loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> None:
        """Now, or in one of the next turns."""
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._next_turn, loop)
        if self._num_left and not self._waiting:
            self._num_left -= 1
            work()
        else:
            self._waiting.append(work)

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        num_due = min(PER_TURN, len(self._waiting))
        self._num_left = PER_TURN - num_due
        self._is_counting = bool(num_due)
        if num_due:
            loop.call_soon(self._next_turn, loop)
        for _ in range(num_due):
            self._waiting.popleft()()
