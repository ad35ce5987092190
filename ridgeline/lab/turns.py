"""Whose answer is computed now, and how much of a server's time may answers take?

A few are computed at a time, by turns of the clients; who has many waiting, or comes when there are
too many, is refused and told when to come again. Beside an engine all answers together get a share
of a processor: some seconds at once, so that who moves a slider sees nothing of it, and a fraction
from then on.
"""

from __future__ import annotations

import asyncio
from asyncio import sleep
from collections import Counter, deque
from collections.abc import Callable, Hashable
from math import ceil, inf
from time import monotonic
from typing import TypeVar

from anyio import to_thread

AT_ONCE = 2  # steps of answers, in threads
MAX_OPEN = 32  # answers that are computed or wait
MAX_OF_ONE = 16  # of one client: one address with one key
SHARE = 0.2  # of a processor, beside an engine
BURST_S = 10.0  # that may be taken at once when nothing was for long

T = TypeVar("T")


class Refused(Exception):
    """With the HTTP status, and the seconds after which asking again has a chance."""

    def __init__(self, status: int, message: str, retry_s: int) -> None:
        super().__init__(f"{message}; ask again in {retry_s} s")
        self.status = status
        self.retry_s = retry_s


class Place:
    """The right to have steps computed, until it is closed."""

    def __init__(self, turns: Turns, who: Hashable) -> None:
        self._turns, self._who, self._is_open = turns, who, True

    async def run(self, work: Callable[..., T], *values: object) -> T:
        """`work(*values)` in a thread, when it is this client's turn."""
        return await self._turns.run(self._who, work, *values)

    def passed_on(self) -> Place:
        """The same right, with which this one has nothing to do any more."""
        self._is_open, other = False, Place(self._turns, self._who)
        return other

    def close(self) -> None:
        """Again is harmless."""
        if self._is_open:
            self._is_open = False
            self._turns.give_back(self._who)


class Turns:
    def __init__(self, share: float = inf) -> None:
        """`share` of a processor; without one there is nothing beside that could be harmed."""
        self._share = share
        self._held: Counter[Hashable] = Counter()
        self._num_computed = 0
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        self._left_s, self._told_at = BURST_S, monotonic()

    def take(self, who: Hashable) -> Place:
        """Raises Refused."""
        if self._held[who] >= MAX_OF_ONE:
            raise Refused(429, f"{MAX_OF_ONE} answers of yours are computed or wait already", 1)
        if self._held.total() >= MAX_OPEN:
            raise Refused(503, "others have too many answers computed already", 1)
        if (wait_s := self._wait_s()) > 0:
            raise Refused(503, "the lab has had its share of this server's time", ceil(wait_s))
        self._held[who] += 1
        return Place(self, who)

    def give_back(self, who: Hashable) -> None:
        self._held[who] -= 1
        if not self._held[who]:
            del self._held[who]

    async def run(self, who: Hashable, work: Callable[..., T], *values: object) -> T:
        while (wait_s := self._wait_s()) > 0:
            await sleep(wait_s)
        await self._enter(who)
        began = monotonic()
        try:
            return await to_thread.run_sync(work, *values)
        finally:
            self._left_s -= monotonic() - began
            self._leave()

    def _wait_s(self) -> float:
        """Seconds until the share allows more."""
        now = monotonic()
        self._left_s = min(BURST_S, self._left_s + self._share * (now - self._told_at or 1e-9))
        self._told_at = now
        return max(0.0, -self._left_s / self._share)

    async def _enter(self, who: Hashable) -> None:
        if self._num_computed < AT_ONCE:
            self._num_computed += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had been given already
                self._leave()
            raise

    def _leave(self) -> None:
        """The next client's oldest step has this one's turn."""
        while self._waiting:
            who = next(iter(self._waiting))
            steps = self._waiting.pop(who)
            turn = steps.popleft()
            if steps:
                self._waiting[who] = steps  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._num_computed -= 1
