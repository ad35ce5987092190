"""Who owns which KV block where several devices attend, each for rows of its own?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ridgeline.errors import check
from ridgeline.request import Request
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.prefix_cache import Prefix
from ridgeline.step import BlockCopy, BlockTables


def open_pools(make: Callable[[], BlockManager], number: int, chunk: int) -> BlockManager:
    """So many pools made by `make`, all with the same key; `chunk` as in BlockPools."""
    return make() if number == 1 else BlockPools([make() for _ in range(number)], chunk)


class BlockPools(BlockManager):
    """All that a BlockManager does, by the pool of each request. Amounts are those of all pools.

    `match` chooses the pool, anew at each admission: of those with room the one whose device has
    least to read before this request's first token, which are the request's own tokens that are not
    cached there and all that its running rows have pending; of equal ones the one with fewer rows,
    then with more free blocks. `chunk`: the most tokens that one step computes.
    """

    def __init__(self, pools: Sequence[BlockManager], chunk: int) -> None:
        check(len(pools) > 1, "there are several pools")
        first = pools[0]
        self.pools = tuple(pools)
        self.num_blocks = sum(pool.num_blocks for pool in pools)
        self.block_size, self.windows = first.block_size, first.windows
        self.prefix_caching, self.edges = first.prefix_caching, first.edges
        self.no_blocks, self._windowed = first.no_blocks, first._windowed
        self._chunk = chunk
        self._rows: list[dict[str, Request]] = [{} for _ in pools]  # that hold blocks

    # ------------------------------------------------------------------ of all pools

    @property
    def num_free_blocks(self) -> int:
        return sum(pool.num_free_blocks for pool in self.pools)

    @property
    def free_blocks(self) -> tuple[int, ...]:
        return tuple(pool.num_free_blocks for pool in self.pools)

    @property
    def num_deferred_blocks(self) -> int:
        return sum(pool.num_deferred_blocks for pool in self.pools)

    @property
    def num_cached_blocks(self) -> int:
        return sum(pool.num_cached_blocks for pool in self.pools)

    def hash_blocks(self) -> None:
        for pool in self.pools:
            pool.hash_blocks()

    def withdraw_early(self, row_id: str | None = None) -> None:
        for pool in self.pools:
            pool.withdraw_early(row_id)

    def complete(self, step_id: int) -> None:
        for pool in self.pools:
            pool.complete(step_id)

    def clear_cache(self) -> None:
        for pool in self.pools:
            pool.clear_cache()

    def check_invariants(self, requests: Iterable[Request]) -> None:
        every = list(requests)
        for number, pool in enumerate(self.pools):
            pool.check_invariants([one for one in every if one.pool == number])
            holding = {one.request_id for one in every if one.pool == number and one.block_ids}
            check(self._rows[number].keys() == holding, "rows are counted where their blocks are")

    # ------------------------------------------------------------------ of one request

    def match(self, request: Request, limit: int) -> Prefix:
        found = [pool.match(request, limit) for pool in self.pools]

        def rank(number: int) -> tuple[int, ...]:
            pool, rows = self.pools[number], self._rows[number].values()
            num_tokens = len(request.token_ids) - found[number].num_tokens
            has_room = pool.fits(found[number], num_tokens, self._chunk)
            to_read = num_tokens + sum(max(1, row.num_pending_tokens) for row in rows)
            return (not has_room, to_read, len(rows), -pool.num_free_blocks)

        request.pool = min(range(len(found)), key=rank)
        return found[request.pool]

    def share(self, parent: Request, num_tokens: int) -> Prefix | None:
        return self.pools[parent.pool].share(parent, num_tokens)

    def admit(self, request: Request, prefix: Prefix) -> None:
        self.pools[request.pool].admit(request, prefix)
        self._rows[request.pool][request.request_id] = request

    def free(self, request: Request, in_flight: int) -> None:
        self.pools[request.pool].free(request, in_flight)
        self._rows[request.pool].pop(request.request_id, None)

    def num_leaving(self, request: Request) -> int:
        return self.pools[request.pool].num_leaving(request)

    def num_held(self, request: Request) -> list[int]:
        return self.pools[request.pool].num_held(request)

    def num_to_copy(self, request: Request) -> int:
        return self.pools[request.pool].num_to_copy(request)

    def missing(self, request: Request, num_tokens: int) -> int:
        return self.pools[request.pool].missing(request, num_tokens)

    def extend(
        self, request: Request, num_tokens: int, step_id: int
    ) -> tuple[BlockTables, tuple[BlockCopy, ...]] | None:
        return self.pools[request.pool].extend(request, num_tokens, step_id)

    def can_extend_by_one(self, request: Request, end: int) -> bool:
        return self.pools[request.pool].can_extend_by_one(request, end)

    def extend_by_one(self, request: Request) -> BlockTables:
        return self.pools[request.pool].extend_by_one(request)

    def publish_early(self, request: Request, step_id: int) -> None:
        self.pools[request.pool].publish_early(request, step_id)

    def publish(self, request: Request, in_flight: int) -> None:
        self.pools[request.pool].publish(request, in_flight)

    def forget(self, request: Request) -> None:
        self.pools[request.pool].forget(request)
