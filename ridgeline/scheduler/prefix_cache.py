"""Which block is known to hold which tokens?"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from struct import calcsize, pack

from ridgeline.errors import check
from ridgeline.request import Request
from ridgeline.step import NULL_BLOCK

TOKEN_BYTES = calcsize("q")


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `num_tokens` of a request are in these blocks already (one table per group)."""

    num_tokens: int
    tables: tuple[tuple[int, ...], ...]


def first_needed(window: int | None, position: int) -> int:
    """The first position that a query at `position` looks back on."""
    return 0 if window is None else max(0, position - window + 1)


class PrefixCache:
    """Full blocks by the hash of all tokens up to their end, one table per KV group.

    The hashes of a request are a chain of SHA-256 whose root is `key` and the request's
    cache_salt: blocks are found only under the same salt, and nobody without the key can make up
    a hash. A block has at most one hash and a hash names at most one block of a group.
    """

    def __init__(
        self, num_blocks: int, block_size: int, windows: tuple[int | None, ...], key: bytes
    ) -> None:
        self.block_size = block_size
        self.windows = windows
        self._has_windows = any(window is not None for window in windows)
        self._key = key
        self._hash_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._group_of = [0] * (num_blocks + 1)  # of those with a hash
        self._block_of: tuple[dict[bytes, int], ...] = tuple({} for _ in windows)

    def __len__(self) -> int:
        return sum(len(blocks) for blocks in self._block_of)

    def names(self, block: int) -> bool:
        """May others find it?"""
        return self._hash_of[block] is not None

    def match(self, request: Request, limit: int) -> Prefix:
        """The longest prefix that ends at a block's end and before token `limit` - 1.

        Groups with a window need only the blocks that the next query looks back on.
        """
        num_blocks = max(0, limit - 1) // self.block_size
        hashes = self._hashes(request, num_blocks)[:num_blocks]
        if not self._has_windows:
            return self._match_full(hashes)
        longest = len(hashes)
        for window, blocks in zip(self.windows, self._block_of, strict=True):
            if window is None:
                gaps = (i for i in range(longest) if hashes[i] not in blocks)
                longest = next(gaps, longest)
        return self._match_windows(hashes[:longest])

    def publish(self, request: Request, first: int, end: int) -> None:
        """Let its blocks `first` .. `end` - 1 be found; they are full and will not change."""
        hashes = self._hashes(request, end)
        for g, table in enumerate(request.block_ids):
            blocks = self._block_of[g]
            for i in range(first, end):
                block = table[i]
                if block and self._hash_of[block] is None and hashes[i] not in blocks:
                    blocks[hashes[i]] = block
                    self._hash_of[block], self._group_of[block] = hashes[i], g

    def forget(self, block: int) -> None:
        """Nobody finds it any more; safe for one that nobody could find."""
        if (old := self._hash_of[block]) is not None:
            self._hash_of[block] = None
            del self._block_of[self._group_of[block]][old]

    def check_invariants(self) -> None:
        for g, blocks in enumerate(self._block_of):
            for block_hash, block in blocks.items():
                check(self._hash_of[block] == block_hash, "hash and block are one-to-one")
                check(self._group_of[block] == g, "a hash is in its block's group")
        check(self._hash_of[NULL_BLOCK] is None, "the null block has no hash")
        named = len(self._hash_of) - self._hash_of.count(None)
        check(named == len(self), "each hash is findable", named=named)

    # ------------------------------------------------------------------ details

    def _match_full(self, hashes: list[bytes]) -> Prefix:
        hits: list[list[int]] = [[] for _ in self.windows]
        for block_hash in hashes:
            found = [blocks.get(block_hash, NULL_BLOCK) for blocks in self._block_of]
            if NULL_BLOCK in found:
                break
            for hit, block in zip(hits, found, strict=True):
                hit.append(block)
        return Prefix(len(hits[0]) * self.block_size, tuple(tuple(hit) for hit in hits))

    def _match_windows(self, hashes: list[bytes]) -> Prefix:
        """Walk back from the end of what full groups have to the first place that all allow."""
        size, length = self.block_size, len(hashes)
        while length > 0:
            firsts = [first_needed(window, length * size) // size for window in self.windows]
            gaps = (
                i
                for first, blocks in zip(firsts, self._block_of, strict=True)
                for i in range(length - 1, first - 1, -1)
                if hashes[i] not in blocks
            )
            gap = next(gaps, None)
            if gap is None:
                tables = (
                    (NULL_BLOCK,) * first + tuple(blocks[h] for h in hashes[first:length])
                    for first, blocks in zip(firsts, self._block_of, strict=True)
                )
                return Prefix(length * size, tuple(tables))
            length = gap  # every longer prefix that ends behind the gap needs it too
        return Prefix(0, ((),) * len(self.windows))

    def _hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """The chain of at least its first `num_blocks` blocks; each is hashed once in its life."""
        hashes, first = request.block_hashes, len(request.block_hashes)
        if first >= num_blocks:
            return hashes
        size = self.block_size
        token_ids = request.token_ids[first * size : num_blocks * size]
        tokens = pack(f"{len(token_ids)}q", *token_ids)
        size *= TOKEN_BYTES
        for i in range(num_blocks - first):
            parent = hashes[-1] if hashes else self._root(request.cache_salt)
            hashes.append(sha256(parent + tokens[i * size : (i + 1) * size]).digest())
        return hashes

    def _root(self, salt: bytes) -> bytes:
        return sha256(b"%d:%b%b" % (len(self._key), self._key, salt)).digest()
