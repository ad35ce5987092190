"""Whose cached block is taken first, where several tenants share the pool?

A block counts for the tenant that took it, and from a hit of another tenant on for that one: for
its last user. Two tenants find each other's blocks only where both have the same salt, which the
server's keys rule out: tenants that are told apart by address alone may share a prefix.

All blocks count that a tenant holds, in tables or cached. Its share is the pool times its weight
over the weights of all who hold blocks, but no less than the pool over `MOST_SHARES`: among many
tenants a prefix that one of them (or the last of all) uses all the time would be more than its
share, and go before what nobody uses any more. Where a cached block must go, in this order:

1. the oldest of a tenant that used nothing while `IDLE_POOLS` whole pools were taken;
2. the oldest of the tenant that is most over its share, the block to be taken included;
3. the oldest of all.

Nothing depends on the tenants' names, only on the order in which they came. Each block that is
taken, hit or given back costs the same, however many tenants and blocks there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ridgeline.errors import check
from ridgeline.step import NULL_BLOCK

MOST_SHARES = 8  # so few tenants at most can be over their share, so few are looked at
IDLE_POOLS = 32  # minutes of a flood, hours of the usual load


@dataclass(slots=True, eq=False)
class _Holder:
    tenant: bytes
    weight: int
    last_use: int = 0  # blocks that all had taken by then
    num_blocks: int = 0
    evictable: OrderedDict[int, None] = field(default_factory=OrderedDict)  # the oldest first


class CacheShares:
    """The tenant of each block that somebody holds or may find; all tenants that have one.

    `weights` are of tenants by name; others weigh 1.
    """

    def __init__(self, num_blocks: int, weights: Mapping[bytes, int]) -> None:
        self._num_blocks = num_blocks
        self._weights = weights
        self._most_idle = IDLE_POOLS * num_blocks  # blocks
        self._total_weight = 0
        self._num_taken = 0
        self._holder_of: list[_Holder | None] = [None] * (num_blocks + 1)
        self._holders: OrderedDict[bytes, _Holder] = OrderedDict()  # the longest idle first
        self._large: dict[bytes, _Holder] = {}  # those with more than the smallest share

    def take(self, tenant: bytes, oldest: int) -> int:
        """A block for this tenant: `oldest`, or what goes before it. All others are cached where
        `oldest` is."""
        self._num_taken += 1
        holder = self._used_by(tenant)
        self._count(holder, 1)
        block = oldest
        if self._holder_of[oldest] is not None:
            block = self._first(oldest)
            self.drop(block)
        self._holder_of[block] = holder
        return block

    def hit(self, block: int, tenant: bytes) -> None:
        """This tenant uses a block that is held or cached."""
        holder, old = self._used_by(tenant), self._holder_of[block]
        if holder is old:
            holder.evictable.pop(block, None)
            return
        self._count(holder, 1)
        self.drop(block)
        self._holder_of[block] = holder

    def keep(self, block: int) -> None:
        """Nobody holds it any more; it stays cached for its last user."""
        if holder := self._holder_of[block]:
            holder.evictable[block] = None

    def drop(self, block: int) -> None:
        """It counts for nobody; safe for one that never did."""
        if holder := self._holder_of[block]:
            self._holder_of[block] = None
            holder.evictable.pop(block, None)
            self._count(holder, -1)

    def check_invariants(self, free: Iterable[int], is_cached: Iterable[bool]) -> None:
        """`free` with the oldest first."""
        wanted: dict[bytes, list[int]] = {name: [] for name in self._holders}
        plain = [NULL_BLOCK]
        for block, cached in zip(free, is_cached, strict=True):
            holder = self._holder_of[block]
            check((holder is not None) == cached, "a free block has a tenant while it is cached")
            if holder is not None:
                wanted[holder.tenant].append(block)
            else:
                plain.append(block)
        check(self._holder_of.count(None) == len(plain), "all others count for a tenant")
        for name, holder in self._holders.items():
            count = self._holder_of.count(holder)
            check(holder.num_blocks == count > 0, "counts equal a recount", tenant=name.hex())
            check(list(holder.evictable) == wanted[name], "a tenant's blocks are in order of age")
            is_large = holder.num_blocks * MOST_SHARES > self._num_blocks
            check((name in self._large) == is_large, "the large ones are known")
        check(len(self._large) <= len(self._holders), "only holders are large")
        total = sum(holder.weight for holder in self._holders.values())
        check(total == self._total_weight, "weights add up")

    # ------------------------------------------------------------------ details

    def _used_by(self, tenant: bytes) -> _Holder:
        holder = self._holders.get(tenant)
        if holder is None:
            holder = self._holders[tenant] = _Holder(tenant, self._weights.get(tenant, 1))
            self._total_weight += holder.weight
        self._touch(holder)
        return holder

    def _touch(self, holder: _Holder) -> None:
        holder.last_use = self._num_taken
        self._holders.move_to_end(holder.tenant)

    def _count(self, holder: _Holder, change: int) -> None:
        holder.num_blocks += change
        if not holder.num_blocks:
            del self._holders[holder.tenant]
            self._total_weight -= holder.weight
        if holder.num_blocks * MOST_SHARES > self._num_blocks:
            self._large[holder.tenant] = holder
        else:
            self._large.pop(holder.tenant, None)

    def _first(self, oldest: int) -> int:
        """The cached block that goes."""
        expired = self._num_taken - self._most_idle
        while (idle := next(iter(self._holders.values()))).last_use < expired:
            if idle.evictable:
                return next(iter(idle.evictable))
            self._touch(idle)  # what it has is in tables
        worst, most = None, self._num_blocks / self._total_weight
        for holder in self._large.values():
            if holder.evictable and holder.num_blocks / holder.weight > most:
                worst, most = holder, holder.num_blocks / holder.weight
        return next(iter(worst.evictable)) if worst else oldest
