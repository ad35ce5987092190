"""Whose question is the next, when several tenants wait for few workers?

Tenants take turns, and no tenant may keep all workers busy, unless there is one alone: whoever
comes while somebody sends bombs finds a worker free. Who waits holds a ticket of admission, which
bounds how many can.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """What waits, by tenant, for `num_workers` workers."""

    def __init__(self, num_workers: int) -> None:
        self._most = max(1, num_workers - 1)
        self._waiting: dict[bytes, deque[T]] = {}  # the first is next
        self._busy: Counter[bytes] = Counter()

    def add(self, tenant: bytes, item: T, *, first: bool = False) -> None:
        queue = self._waiting.setdefault(tenant, deque())
        (queue.appendleft if first else queue.append)(item)

    def remove(self, tenant: bytes, item: T) -> None:
        """Who does not wait any more, if it does."""
        queue = self._waiting.get(tenant, deque())
        with suppress(ValueError):
            queue.remove(item)
            if not queue:
                del self._waiting[tenant]

    def take(self) -> tuple[bytes, T] | None:
        """The next for a worker that is free; `done` says that it is again. None where nobody waits
        or all who do have their share."""
        for tenant, queue in self._waiting.items():
            if self._busy[tenant] >= self._most:
                continue
            item = queue.popleft()
            del self._waiting[tenant]
            if queue:
                self._waiting[tenant] = queue
            self._busy[tenant] += 1
            return tenant, item
        return None

    def done(self, tenant: bytes) -> None:
        self._busy[tenant] -= 1
        if not self._busy[tenant]:
            del self._busy[tenant]

    def drop_all(self) -> list[T]:
        """Everything that waits, and waits no more."""
        dropped = [item for queue in self._waiting.values() for item in queue]
        self._waiting.clear()
        return dropped
