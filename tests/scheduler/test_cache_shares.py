"""A tenant that fills the cache takes from itself before it takes from the others."""

from __future__ import annotations

from collections import Counter
from hashlib import sha256

import pytest

from ridgeline.request import Request, SamplingParams
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.cache_shares import MOST_SHARES
from tests.scheduler.rig import Rig, make_request
from tests.simulated_world import CheckedBlocks, World

SIZE = 4
A, B, C = b"x", b"y", b"z"
WINDOW, PLAIN = (None,), SamplingParams()


class Cache:
    """Requests that come and go one by one; each block of a prompt is (name, place)."""

    def __init__(self, num_blocks: int, weights: dict[bytes, int] | None = None) -> None:
        self.blocks = BlockManager(num_blocks, SIZE, weights=weights)
        self.num_asked = 0

    def begin(self, tenant: bytes, name: int, num_blocks: int) -> Request:
        prompt = (*tuple(name * 1000 + i for i in range(num_blocks * SIZE)), 0)
        request = make_request(str(self.num_asked), prompt=prompt, tenant=tenant)
        self.num_asked += 1
        self.blocks.admit(request, self.blocks.match(request, len(prompt)))
        request.num_cached_tokens = request.num_computed_tokens
        rest = num_blocks * SIZE - request.num_computed_tokens
        assert self.blocks.extend(request, rest, 0) is not None
        request.num_computed_tokens = request.num_done_tokens = num_blocks * SIZE
        self.blocks.publish(request, 0)
        return request

    def end(self, request: Request) -> None:
        self.blocks.free(request, 0)
        self.blocks.check_invariants(())

    def ask(self, tenant: bytes, name: int, num_blocks: int) -> int:
        """Blocks found."""
        request = self.begin(tenant, name, num_blocks)
        self.blocks.free(request, 0)
        return request.num_cached_tokens // SIZE


@pytest.mark.parametrize(
    ("flooder", "found", "num_prompts"), [(b"flood", 20, 10_000), (b"calm", 0, 1_000)]
)
def test_a_flood_leaves_the_prefixes_of_others(
    flooder: bytes, found: int, num_prompts: int
) -> None:
    """Unless it is their own."""
    cache = Cache(64)
    cache.ask(b"calm", 0, 20)
    for i in range(1, num_prompts + 1):
        cache.ask(flooder, i, 5 + i % 7)
        if i % 200 == 0:  # some 25 pools later
            assert cache.ask(b"calm", 0, 20) == found
    cache.blocks.check_invariants(())


def test_what_runs_counts_too() -> None:
    """A tenant with most of the pool in tables does not get the cached rest as well."""
    cache = Cache(20)
    cache.ask(B, 0, 6)
    running = cache.begin(A, 1, 10)
    for i in range(2, 30):
        cache.ask(A, i, 2)
    assert cache.ask(B, 0, 6) == 6
    cache.end(running)


def test_one_tenant_alone_is_not_counted() -> None:
    cache = Cache(8)
    for i in range(5):
        assert cache.ask(A, i, 3) == 0
    assert cache.blocks._shares is None
    assert cache.ask(A, 4, 3) == 3
    cache.ask(B, 9, 1)
    assert cache.blocks._shares is not None
    cache.blocks.check_invariants(())


def test_without_a_cache_nobody_is_counted() -> None:
    rig = Rig(prefix_caching=False)
    rig.add(make_request("a", tenant=A), make_request("b", tenant=B))
    rig.run()
    assert rig.blocks._shares is None


def test_a_block_counts_for_its_last_user() -> None:
    cache = Cache(8)
    cache.ask(A, 1, 4)
    cache.ask(A, 0, 3)
    assert cache.ask(B, 0, 3) == 3
    cache.ask(B, 3, 2)  # one was free; the other is B's fifth of eight, so its oldest goes
    assert cache.ask(A, 1, 4) == 4
    assert cache.ask(B, 0, 3) == 2


def test_shares_follow_weights() -> None:
    for weights, found in (({A: 3}, 6), ({}, 4)):
        cache = Cache(8, weights)
        cache.ask(A, 0, 6)
        for i in range(1, 9):
            cache.ask(B, i, 1)
        assert cache.ask(A, 0, 6) == found


def test_among_many_tenants_the_oldest_goes() -> None:
    """All ask with one beginning and go away for good; it is no more than the smallest share."""
    cache = Cache(10 * MOST_SHARES)
    common = tuple(range(7 * SIZE))
    for i in range(200):
        own = tuple(10_000 + i * SIZE + k for k in range(2 * SIZE))
        request = make_request(str(i), prompt=(*common, *own, 0), tenant=b"%d" % i)
        prefix = cache.blocks.match(request, 9 * SIZE + 1)
        assert prefix.num_tokens == (len(common) if i else 0)
        cache.blocks.admit(request, prefix)
        cache.blocks.extend(request, 9 * SIZE - prefix.num_tokens, 0)
        request.num_computed_tokens = request.num_done_tokens = 9 * SIZE
        cache.blocks.publish(request, 0)
        cache.end(request)
    assert len(cache.blocks._shares._holders) <= 40  # type: ignore[union-attr]


def test_who_stays_away_gives_first() -> None:
    cache = Cache(16)
    cache.ask(B, 0, 6)
    num_away = 0
    while cache.blocks.num_cached_blocks and cache.ask(A, 1 + num_away, 1) == 0:
        cache.ask(C, 10_000, 4)
        num_away += 1
        if B not in cache.blocks._shares._holders:  # type: ignore[union-attr]
            break
    assert 32 * 16 <= num_away <= 32 * 16 + 16
    assert cache.ask(C, 10_000, 4) == 4


class Renamed(World):
    def _tenant(self) -> bytes:
        return sha256(super()._tenant()).digest()


def test_names_of_tenants_decide_nothing() -> None:
    for seed in range(6):
        worlds = [kind(seed, traced=True) for kind in (World, Renamed)]
        for world in worlds:
            world.run(60)
        assert worlds[0].trace.digest() == worlds[1].trace.digest()  # type: ignore[union-attr]


# ---------------------------------------------------------------------- everything, in small

Move = tuple[str, int]
DEPTH, POOL = 7, 4
EACH_OTHER = str.maketrans("xy", "yx")  # A and B differ by their weights alone


class Play:
    """Requests of one block each, by two tenants, on a pool of four."""

    def __init__(self, weights: dict[bytes, int], most_idle: int, moves: tuple[Move, ...]) -> None:
        self.blocks = CheckedBlocks(POOL, 1, WINDOW, True, b"", weights)
        self.blocks.most_idle = most_idle
        self.held: list[Request] = []  # the first to come first
        self.token_of: dict[int, int] = {}  # by block
        self.num_asked = 0
        for move in moves:
            self.play(*move)

    def known(self) -> list[int]:
        return list(self.blocks._cache._block_of[0].values())

    def moves(self) -> list[Move]:
        """New prompts, hits on what is held or cached, ends after which all or nobody finds it."""
        found: list[Move] = [("new x", 0), ("new y", 0)] if self.blocks.num_free_blocks else []
        ends = range(len(self.held))
        hits = range(len(self.known()) if len(ends) < POOL - 1 else 0)
        found += [(f"hit {who}", i) for who in "xy" for i in hits]
        return found + [(what, i) for what in ("keep", "lose") for i in ends]

    def play(self, what: str, index: int) -> None:
        blocks, tenant = self.blocks, what[-1].encode()
        if what in ("keep", "lose"):
            request = self.held.pop(index)
            if what == "lose":
                blocks.forget(request)
            blocks.free(request, 0)
            return
        self.num_asked += 1
        is_hit = what.startswith("hit")
        token = self.token_of[self.known()[index]] if is_hit else self.num_asked
        request = Request(str(self.num_asked), (token, 0), PLAIN, 0.0, tenant=tenant)
        blocks.admit(request, blocks.match(request, 2))
        if not is_hit:
            assert blocks.extend(request, 1, 0) is not None
            request.num_computed_tokens = request.num_done_tokens = 1
            blocks.publish(request, 0)
        self.token_of[request.block_ids[0][0]] = token
        self.held.append(request)

    def key(self) -> str:
        """All that what follows may depend on, block ids and tokens apart."""
        blocks, names = self.blocks, self.blocks._cache.names
        free = [names(block) and blocks.user[block] for block in blocks._free]
        in_tables = {request.block_ids[0][0] for request in self.held}
        held = sorted((blocks.user[b], names(b), blocks._ref_count[b]) for b in in_tables)
        idle = [
            (name, max(0, blocks.most_idle - blocks.num_taken + last + 1))
            for name, last in blocks.last_use.items()
            if blocks.most_idle < DEPTH
        ]
        large = blocks._shares and list(blocks._shares._large)
        key = str((free, held, idle, blocks._tenant, large))
        return key if blocks._weights else min(key, key.translate(EACH_OTHER))


@pytest.mark.parametrize(
    ("weights", "most_idle", "seen"), [({}, 2, "idle"), ({A: 2}, 1000, "spared")]
)
def test_every_short_history_of_a_small_pool(
    weights: dict[bytes, int], most_idle: int, seen: str
) -> None:
    """The pool compares each block that goes with what a look at all says. Histories that lead to
    the same state go on alike."""
    level: list[tuple[Move, ...]] = [()]
    states: set[str] = set()
    counts: Counter[str] = Counter()
    for _ in range(DEPTH):
        shorter, level = level, []
        for moves in shorter:
            for move in Play(weights, most_idle, moves).moves():
                play = Play(weights, most_idle, (*moves, move))
                counts.update(play.blocks.counts)
                if (key := play.key()) not in states:
                    states.add(key)
                    play.blocks.check_invariants(play.held)
                    level.append((*moves, move))
    assert len(states) > 200, len(states)
    assert min(counts["evictions"], counts["over"], counts[seen]) > 0, counts
