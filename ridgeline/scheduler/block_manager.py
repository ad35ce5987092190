"""Who owns which KV block? Knows token ids and block ids; knows nothing of tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from ridgeline.errors import check
from ridgeline.request import UNKNOWN_TOKEN, Request
from ridgeline.scheduler.cache_shares import CacheShares
from ridgeline.scheduler.prefix_cache import Prefix, PrefixCache, first_needed
from ridgeline.step import NULL_BLOCK, BlockCopy, BlockTables

UNBOUNDED_TOKENS = 1 << 30  # what a pool can serve when every layer has a window


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@cache
def _no_blocks(num_groups: int) -> BlockTables:
    """The same object for all pools."""
    return ((),) * num_groups


def blocks_needed(
    num_tokens: int, block_size: int, windows: Sequence[int | None], chunk: int
) -> int:
    """Most blocks that one request of `num_tokens` (prompt and answer) ever holds at once.

    The last token is never computed. A group with a window holds what the window and one chunk of
    `chunk` tokens (the most that one step computes) overlap.
    """
    every = _ceil_div(max(1, num_tokens - 1), block_size)
    total = 0
    for window in windows:
        span = every * block_size if window is None else window - 1 + chunk
        total += min(every, 1 if span <= 1 else (span + block_size - 2) // block_size + 1)
    return total


def beam_blocks_needed(
    num_prompt: int,
    num_tokens: int,
    width: int,
    block_size: int,
    windows: Sequence[int | None],
    chunk: int,
) -> int:
    """Most blocks that `width` beams hold: they share the full blocks of their prompt, except in
    groups with a window, where nothing need be common."""
    one = [blocks_needed(num_tokens, block_size, (window,), chunk) for window in windows]
    common = (width - 1) * (num_prompt // block_size)
    return sum(
        width * need - (common if window is None else 0)
        for need, window in zip(one, windows, strict=True)
    )


def max_servable_tokens(
    num_blocks: int, block_size: int, windows: Sequence[int | None], chunk: int
) -> int:
    """Longest request (prompt and answer) that a pool of `num_blocks` can serve; 0 when none.

    The one answer to "how long may it be", for start-up, admission and the cap on an answer.
    """
    low, high = 0, UNBOUNDED_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        fits = blocks_needed(middle, block_size, windows, chunk) <= num_blocks
        low, high = (middle, high) if fits else (low, middle - 1)
    return low if low > 1 else 0


class BlockManager:
    """One pool of blocks for all KV groups.

    A block is held (by one or more tables), deferred (given back, but a step in flight may touch
    it) or free. A free block may still be cached: it keeps its hash until it is taken. Cached
    blocks are taken last, the one that was given back first before the others; from the second
    tenant on, tenants that have more than their share give first (`cache_shares`).

    Others find a block from the moment its last token is planned, if a step computes it together
    with other tokens of its row (`publish_early`). One rule makes that safe: until the step that
    fills it is over, such a block is held or deferred, never free, and whoever takes it has tokens
    in that step or a later one. The device runs steps in order, and in a step with prompts each
    layer writes all keys and values before any row attends, so nobody reads what is not there. A
    plan is sent as soon as it is made: what happens to the row afterwards (abort, preemption)
    changes nothing of that; only a failed step or a fault of the row withdraws its blocks. A failed
    step ends all that have tokens in flight, so all takers. After a fault a taker goes by its own
    numbers.

    `windows` has one entry per KV group; `key` makes the hashes of the prefix cache unguessable;
    `weights` of tenants decide how much of the pool is their share, 1 where there is none.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: tuple[int | None, ...] = (None,),
        prefix_caching: bool = True,
        key: bytes = b"",
        weights: Mapping[bytes, int] | None = None,
    ) -> None:
        check(num_blocks > 0 and block_size > 0, "a pool has blocks", num_blocks=num_blocks)
        check(len(windows) > 0, "a pool serves at least one group")
        self.pools: tuple[BlockManager, ...] = (self,)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = windows
        self.prefix_caching = prefix_caching
        self._windowed = tuple(g for g, window in enumerate(windows) if window is not None)
        # After one more token `publish` has something to do where the tokens that are done, modulo
        # the block size, are one of these: a block is full, or one leaves a window.
        self.edges = frozenset(
            {0} | {(window - 1) % block_size for window in windows if window is not None}
        )
        self.no_blocks = _no_blocks(len(windows))
        self._nothing = Prefix(0, self.no_blocks)
        self._no_change: tuple[BlockTables, tuple[BlockCopy, ...]] = (self.no_blocks, ())
        # Free blocks are taken in this order: those that nobody may find, the last one first; then
        # those that are cached, the oldest first (or by tenant).
        self._plain = list(range(num_blocks, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._deferred: OrderedDict[int, int] = OrderedDict()  # block -> last step that touches it
        self._ref_count = [0] * (num_blocks + 1)
        self._cache = PrefixCache(num_blocks, block_size, windows, key)
        self._weights = weights or {}
        self._tenant: bytes | None = None  # the only one so far
        self._shares: CacheShares | None = None  # from the second tenant on
        self._last_completed = 0  # this step and all before it are over
        self._read_in: dict[int, int] = {}  # held blocks that a copy is made of: the last such step
        # By step that is to fill them, the oldest first: rows, and their blocks that were named.
        self._published_early: dict[int, list[tuple[str, list[int]]]] = {}
        self._unnamed: list[tuple[int, Request, int, int]] = []  # step, whose, first and last + 1

    # ------------------------------------------------------------------ how much

    @property
    def num_free_blocks(self) -> int:
        return len(self._plain) + len(self._cached)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Of each pool."""
        return (self.num_free_blocks,)

    @property
    def num_deferred_blocks(self) -> int:
        return len(self._deferred)

    @property
    def num_cached_blocks(self) -> int:
        self.hash_blocks()
        return len(self._cache)

    @property
    def has_windows(self) -> bool:
        return bool(self._windowed)

    def num_leaving(self, request: Request) -> int:
        """Blocks that leave its windows once the steps in flight are over."""
        total = 0
        for g in self._windowed:
            bound = first_needed(self.windows[g], request.num_computed_tokens) // self.block_size
            total += max(0, bound - request.num_dropped_blocks[g])
        return total

    def num_held(self, request: Request) -> list[int]:
        """Blocks in its table of each group."""
        tables = zip(request.block_ids, request.num_dropped_blocks, strict=True)
        return [len(table) - dropped for table, dropped in tables]

    def num_to_copy(self, request: Request) -> int:
        """Blocks that it shares and writes to next."""
        index = request.num_computed_tokens // self.block_size
        return len(self._shared(request, index)) if index < len(request.block_ids[0]) else 0

    def missing(self, request: Request, num_tokens: int) -> int:
        """How many more free blocks `extend` needs. Not above zero: it will succeed."""
        return self._num_to_take(request, num_tokens) - self.num_free_blocks

    def missing_for(self, prefix: Prefix, num_tokens: int) -> int:
        """How many more free blocks a request needs for `num_tokens` after `prefix`."""
        end = _ceil_div(prefix.num_tokens + num_tokens, self.block_size)
        need = (end - len(prefix.tables[0])) * len(self.windows)
        if prefix.num_tokens % self.block_size:
            need += len(self.windows)  # the half-filled block is copied
        return need + self._num_unheld(prefix) - self.num_free_blocks

    def fits(self, prefix: Prefix, num_tokens: int, chunk: int) -> bool:
        """Is there room to compute all `num_tokens` after `prefix`, at most `chunk` in a step?

        What windows give back on the way is counted.
        """
        if not self._windowed:
            return self.missing_for(prefix, num_tokens) <= 0
        held = [sum(block != NULL_BLOCK for block in table) for table in prefix.tables]
        size = self.block_size
        every = _ceil_div(prefix.num_tokens + num_tokens, size)
        need = self._num_unheld(prefix)
        for g, window in enumerate(self.windows):
            most = every
            if window is not None:
                most = min(every, blocks_needed(every * size + 1, size, (window,), chunk))
            need += max(0, most - held[g]) + bool(prefix.num_tokens % size)
        return need <= self.num_free_blocks

    # ------------------------------------------------------------------ what is known already

    def match(self, request: Request, limit: int) -> Prefix:
        """The longest cached prefix that ends at a block's end and before token `limit` - 1.

        Groups with a window need only the blocks that the next query looks back on.
        """
        if not self.prefix_caching:
            return self._nothing
        self.hash_blocks()
        return self._cache.match(request, limit)

    def share(self, parent: Request, num_tokens: int) -> Prefix | None:
        """The parent's blocks as a prefix of `num_tokens`, or None where its windows passed on."""
        size = self.block_size
        end = _ceil_div(num_tokens, size)
        tables = []
        for g, window in enumerate(self.windows):
            first = first_needed(window, num_tokens) // size
            if parent.num_dropped_blocks[g] > first and first < end:
                return None
            tables.append((NULL_BLOCK,) * min(first, end) + tuple(parent.block_ids[g][first:end]))
        parent.num_tokens_with_slots = 0  # it may write to one of them next
        return Prefix(num_tokens, tuple(tables))

    def publish_early(self, request: Request, step_id: int) -> None:
        """Let others find its full blocks up to the last of its tokens that is planned: step
        `step_id`, which was just planned, fills them and is sent before any other. They are named
        as soon as somebody looks, or by `hash_blocks`.

        Not for what a step computes as the only token of a row: the kernel that answers such rows
        may write their keys while others read.
        """
        full = request.num_computed_tokens // self.block_size
        first = request.num_published_blocks
        if full <= first or not self.prefix_caching:
            return
        is_known = request.token_ids[full * self.block_size - 1] != UNKNOWN_TOKEN
        check(is_known, "only known tokens are published", id=request.request_id)
        request.num_published_blocks = full
        self._unnamed.append((step_id, request, first, full))

    def hash_blocks(self) -> None:
        """Hash what was published early, which may take longer than all else that a step needs of
        the host: so it waits until the step is sent, or until somebody looks."""
        for step_id, request, first, end in self._unnamed:
            if named := self._cache.publish(request, first, end):
                self._published_early.setdefault(step_id, []).append((request.request_id, named))
        self._unnamed.clear()

    def withdraw_early(self, row_id: str | None = None) -> None:
        """What steps in flight compute for this row is wrong, or (None) nothing in flight will be
        computed: nobody shall find it from now on."""
        self.hash_blocks()
        for made in self._published_early.values():
            for name, named in made:
                if row_id is None or name == row_id:
                    for block in named:
                        self._cache.forget(block)

    def publish(self, request: Request, in_flight: int) -> None:
        """Let others find the blocks that it is known to have filled, and give back those that
        left its windows: no query to come looks back on them."""
        if self._unnamed:
            self.hash_blocks()
        full = request.num_done_tokens // self.block_size
        if full > (first := request.num_published_blocks):
            request.num_published_blocks = full
            if self.prefix_caching:
                self._cache.publish(request, first, full)
        if self._windowed and request.block_ids:
            self._drop(request, in_flight)

    def forget(self, request: Request) -> None:
        """Its numbers went wrong: nobody shall find any of its blocks again."""
        self.hash_blocks()
        for table in request.block_ids:
            for block in table:
                self._cache.forget(block)

    # ------------------------------------------------------------------ give and take

    def admit(self, request: Request, prefix: Prefix) -> None:
        """Open its tables with the blocks of `prefix`, one more reference to each."""
        check(not request.block_ids, "a request is admitted once", id=request.request_id)
        if request.tenant != self._tenant and self._shares is None:
            self._meet(request.tenant)
        for table in prefix.tables:
            for block in table:
                if block != NULL_BLOCK:
                    self._hold(block, request.tenant)
        request.block_ids = [list(table) for table in prefix.tables]
        request.num_dropped_blocks = [
            min(first_needed(w, prefix.num_tokens) // self.block_size, len(table))
            for w, table in zip(self.windows, prefix.tables, strict=True)
        ]
        request.num_computed_tokens = request.num_done_tokens = prefix.num_tokens
        request.num_published_blocks = prefix.num_tokens // self.block_size

    def extend(
        self, request: Request, num_tokens: int, step_id: int
    ) -> tuple[BlockTables, tuple[BlockCopy, ...]] | None:
        """Room for `num_tokens` more: the blocks that are new and those to copy before the write.

        All or nothing: None leaves everything as it was. `step_id` is the step that will write.
        """
        start, size = request.num_computed_tokens, self.block_size
        num_held, index = len(request.block_ids[0]), start // size
        num_new = -(-(start + num_tokens) // size) - num_held
        shared = self._shared(request, index) if index < num_held else ()
        if num_new <= 0 and not shared:
            self._note_room(request, start + num_tokens)
            return self._no_change
        if max(0, num_new) * len(self.windows) + len(shared) > self.num_free_blocks:
            return None
        self._note_room(request, start + num_tokens)
        copies = tuple([self._copy(request, g, index, step_id) for g in shared])
        if num_new <= 0:
            return self._no_change[0], copies
        new = tuple([tuple(self._take(num_new, request.tenant)) for _ in self.windows])
        for mine, more in zip(request.block_ids, new, strict=True):
            mine.extend(more)
        return new, copies

    def can_extend_by_one(self, request: Request, end: int) -> bool:
        """Does one more block in each of its tables, which are full, make room for its tokens up to
        `end`, and are there as many?"""
        room = len(request.block_ids[0]) * self.block_size
        return (
            request.num_tokens_with_slots == room >= request.num_computed_tokens
            and end <= min(room + self.block_size, request.num_computable_tokens)
            and self.num_free_blocks >= len(self.windows)
        )

    def extend_by_one(self, request: Request) -> BlockTables:
        """One more block in each of its tables, which are full; as many must be free."""
        self._note_room(request, len(request.block_ids[0]) * self.block_size + 1)
        taken = self._take(len(self.windows), request.tenant)
        for table, block in zip(request.block_ids, taken, strict=True):
            table.append(block)
        return tuple([(block,) for block in taken])

    def free(self, request: Request, in_flight: int) -> None:
        """Take back every block. Step `in_flight` may still touch them until it is complete."""
        self.hash_blocks()
        for table, dropped in zip(request.block_ids, request.num_dropped_blocks, strict=True):
            self._release(table[: dropped - 1 if dropped else None : -1], in_flight)  # tail first
        request.block_ids = []
        request.num_dropped_blocks = []
        request.num_computed_tokens = request.num_done_tokens = 0
        request.num_published_blocks = request.num_tokens_with_slots = 0

    def complete(self, step_id: int) -> None:
        """Step `step_id` and all before it are over."""
        if self._unnamed:
            self.hash_blocks()
        self._last_completed = step_id
        if self._published_early:  # those of these steps were kept
            self._published_early = {
                step: p for step, p in self._published_early.items() if step > step_id
            }
        if not (deferred := self._deferred):
            return
        over = []
        for block, last_step in deferred.items():
            if last_step > step_id:
                break
            over.append(block)
        if len(over) == len(deferred):
            deferred.clear()
        else:
            for block in over:
                del deferred[block]
        self._put_free(over)

    def clear_cache(self) -> None:
        """Forget every cached block; running requests keep theirs."""
        self.hash_blocks()
        for block in range(1, self.num_blocks + 1):
            self._cache.forget(block)
            if self._shares and block in self._cached:
                self._shares.drop(block)

    # ------------------------------------------------------------------ invariants

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Everything that must hold between two steps, given all requests with tables."""
        uses = [0] * (self.num_blocks + 1)
        for request in requests:
            self._check_tables(request)
            for table in request.block_ids:
                for block in table:
                    uses[block] += 1
        uses[NULL_BLOCK] = 0
        free, deferred = dict.fromkeys(self._free), self._deferred
        check(uses == self._ref_count, "reference counts equal uses")
        check(len(free) == self.num_free_blocks, "a block is free once")
        check(not any(map(self._cache.names, self._plain)), "what is cached is taken last")
        check(free.keys().isdisjoint(deferred.keys()), "no block is both free and deferred")
        check(NULL_BLOCK not in free and NULL_BLOCK not in deferred, "the null block is never free")
        unused = uses.count(0) - 1
        check(len(free) + len(deferred) == unused, "an unused block is free or deferred")
        check(all(uses[b] == 0 for b in free), "a free block is in no table")
        check(all(uses[b] == 0 for b in deferred), "a deferred block is in no table")
        check(
            all(step > self._last_completed for step in deferred.values()), "deferred blocks wait"
        )
        for step, made in self._published_early.items():
            check(step > self._last_completed, "what is published early is in flight", step=step)
            is_there = all(block not in free for _, named in made for block in named)
            check(is_there, "such a block is held or deferred", step=step)
        self._cache.check_invariants()
        if self._shares:
            self._shares.check_invariants(free, map(self._cache.names, free))

    def _check_tables(self, request: Request) -> None:
        tables = request.block_ids
        if not tables:
            return
        end, size = len(tables[0]), self.block_size
        check(len(tables) == len(self.windows), "one table per group")
        check(request.num_done_tokens <= request.num_computed_tokens, "done follows computed")
        check(request.num_computed_tokens <= end * size, "every computed token has a slot")
        self._check_room(request)
        for g, table in enumerate(tables):
            dropped = request.num_dropped_blocks[g]
            check(len(table) == end, "tables are of equal length", id=request.request_id)
            check(not any(table[:dropped]), "what left the window is the null block")
            check(all(table[dropped:]), "what is in the window is a real block")
            bound = first_needed(self.windows[g], request.num_done_tokens) // size
            check(dropped <= bound, "only what no query needs has left")

    def _check_room(self, request: Request) -> None:
        start, room = request.num_computed_tokens, request.num_tokens_with_slots
        if start >= room:
            return
        index, size = start // self.block_size, self.block_size
        check(room <= len(request.block_ids[0]) * size, "room is in its tables")
        check(room <= request.num_computable_tokens, "the last needs no room")
        for first in range(index, -(-room // size)):
            check(not self._shared(request, first), "room is all its own", id=request.request_id)

    # ------------------------------------------------------------------ details

    @property
    def _free(self) -> list[int]:
        """In the order in which one tenant alone would take them."""
        return [*reversed(self._plain), *self._cached]

    def _num_unheld(self, prefix: Prefix) -> int:
        """Free blocks in it: they are cached, since somebody found them."""
        return sum([sum(map(self._cached.__contains__, table)) for table in prefix.tables])

    def _note_room(self, request: Request, end: int) -> None:
        """The block of its token `end` - 1 is its own, to the last slot."""
        room = -(-end // self.block_size) * self.block_size
        request.num_tokens_with_slots = min(room, request.num_computable_tokens)

    def _num_to_take(self, request: Request, num_tokens: int) -> int:
        end = _ceil_div(request.num_computed_tokens + num_tokens, self.block_size)
        num_new = max(0, end - len(request.block_ids[0]))
        return num_new * len(self.windows) + self.num_to_copy(request)

    def _shared(self, request: Request, index: int) -> Sequence[int]:
        """The groups whose block at `index` others hold too, or may find."""
        found: tuple[int, ...] = ()
        for g, table in enumerate(request.block_ids):
            block = table[index]
            if self._ref_count[block] > 1 or self._cache.names(block):
                found += (g,)
        return found

    def _copy(self, request: Request, group: int, index: int, step_id: int) -> BlockCopy:
        table = request.block_ids[group]
        source, (target,) = table[index], self._take(1, request.tenant)
        table[index] = target
        self._release((source,), step_id)  # this very step reads it
        if self._ref_count[source]:  # and so does it if another row gives it back in this very plan
            self._read_in[source] = step_id
        return BlockCopy(request.request_id, group, index, source, target)

    def _meet(self, tenant: bytes) -> None:
        """The first tenant, which has all, or the second, from which on blocks are counted."""
        if self._tenant is None or not self.prefix_caching:
            self._tenant = tenant
            return
        self._shares = CacheShares(self.num_blocks, self._weights)
        free, names = self._free, self._cache.names
        plain = {block for block in free if not names(block)}
        for block in range(1, self.num_blocks + 1):
            if block not in plain:
                self._shares.hit(block, self._tenant)
        for block in free:
            self._shares.keep(block)

    def _hold(self, block: int, tenant: bytes) -> None:
        if self._ref_count[block] == 0:
            if block in self._cached:
                del self._cached[block]
            else:
                del self._deferred[block]
        self._ref_count[block] += 1
        if self._shares:
            self._shares.hit(block, tenant)

    def _take(self, count: int, tenant: bytes) -> list[int]:
        """Free ones; there are as many."""
        if shares := self._shares:
            taken = [self._take_of(shares, tenant) for _ in range(count)]
        else:
            plain, cached = self._plain, self._cached
            first = max(0, len(plain) - count)
            taken = plain[first:]
            taken.reverse()
            del plain[first:]
            while len(taken) < count:
                taken.append(cached.popitem(last=False)[0])
                self._cache.forget(taken[-1])
        ref_count = self._ref_count
        for block in taken:
            ref_count[block] = 1
        return taken

    def _take_of(self, shares: CacheShares, tenant: bytes) -> int:
        if plain := self._plain:
            return shares.take(tenant, plain.pop())
        block = shares.take(tenant, next(iter(self._cached)))
        del self._cached[block]
        self._cache.forget(block)
        return block

    def _release(self, blocks: Iterable[int], in_flight: int) -> None:
        """One reference to each is gone. Step `in_flight` may still touch them."""
        ref_count, deferred, freed = self._ref_count, self._deferred, list[int]()
        last_completed, read_in = self._last_completed, self._read_in
        for block in blocks:
            count = ref_count[block] - 1
            if count < 0:
                check(False, "only what is held is given back", block=block)
            ref_count[block] = count
            if count:
                continue
            last_step = max(in_flight, read_in.pop(block, 0)) if read_in else in_flight
            if last_step <= last_completed:
                freed.append(block)
            else:
                deferred[block] = last_step
        if freed:
            self._put_free(freed)

    def _put_free(self, blocks: list[int]) -> None:
        if not self.prefix_caching:
            self._plain += blocks
            return
        names, shares = self._cache.names, self._shares
        for block in blocks:
            is_cached = names(block)
            if is_cached:
                self._cached[block] = None
            else:
                self._plain.append(block)
            if shares:
                (shares.keep if is_cached else shares.drop)(block)

    def _drop(self, request: Request, in_flight: int) -> None:
        for g in self._windowed:
            table, dropped = request.block_ids[g], request.num_dropped_blocks[g]
            bound = first_needed(self.windows[g], request.num_done_tokens) // self.block_size
            if bound > dropped:
                self._release(table[dropped:bound], in_flight)
                table[dropped:bound] = [NULL_BLOCK] * (bound - dropped)
                request.num_dropped_blocks[g] = bound
