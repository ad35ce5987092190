"""Which block is known to hold which tokens?"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from struct import calcsize, pack

import msgspec

from ridgeline.errors import check
from ridgeline.request import Request
from ridgeline.step import NULL_BLOCK

TOKEN_BYTES = calcsize("q")
LOOK_AHEAD = 8  # times as many blocks are hashed at once, as long as all of them are found


class Prefix(msgspec.Struct, frozen=True):
    """The first `num_tokens` of a request are in these blocks already (one table per group)."""

    num_tokens: int
    tables: tuple[tuple[int, ...], ...]


def first_needed(window: int | None, position: int) -> int:
    """The first position that a query at `position` looks back on."""
    return 0 if window is None else max(0, position - window + 1)


@dataclass(slots=True)
class _Chain:
    """The blocks that were hashed last, from the first on; the next request often begins alike.
    `hashes` are the root, then that of each block."""

    tokens: bytearray
    hashes: list[bytes]

    def leads_to(self, parent: bytes, first: int) -> bool:
        """Is `parent` the hash before its block `first`?"""
        return first < len(self.hashes) and self.hashes[first] == parent

    def num_common(self, tokens: bytes, first: int, size: int) -> int:
        """Of the blocks of `size` bytes at the beginning of `tokens`, those that are the same here
        from block `first` on."""
        low, high = 0, min(len(self.hashes) - 1 - first, len(tokens) // size)
        while low < high:
            middle = (low + high + 1) // 2
            here = self.tokens[(first + low) * size : (first + middle) * size]
            if tokens[low * size : middle * size] == here:
                low = middle
            else:
                high = middle - 1
        return low

    def go_on(self, first: int, tokens: bytes, hashes: list[bytes], size: int) -> None:
        """With these blocks from block `first` on."""
        self.tokens[first * size :] = tokens
        self.hashes[first + 1 :] = hashes


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
        self._last = _Chain(bytearray(), [])
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
        length = self._num_found(request, num_blocks)
        hashes = request.block_hashes[:length]
        if self._has_windows:
            return self._match_windows(hashes)
        tables = [tuple([blocks[known] for known in hashes]) for blocks in self._block_of]
        return Prefix(length * self.block_size, tuple(tables))

    def publish(self, request: Request, first: int, end: int) -> list[int]:
        """Let its blocks `first` .. `end` - 1 be found; they are full, or will be, and will not
        change. Returns those that are found from now on: of equal blocks only the first is."""
        hashes, named = self._hashes(request, end), []
        for g, table in enumerate(request.block_ids):
            blocks = self._block_of[g]
            for i in range(first, end):
                block = table[i]
                if block and self._hash_of[block] is None and hashes[i] not in blocks:
                    blocks[hashes[i]] = block
                    self._hash_of[block], self._group_of[block] = hashes[i], g
                    named.append(block)
        return named

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

    def _num_found(self, request: Request, num_blocks: int) -> int:
        """Leading blocks, of so many, that each group without a window has. Most prompts begin
        with none that is known, or with many: so little is hashed before it is asked for."""
        found = end = 0
        while found == end < num_blocks:
            end = reached = min(max(1, LOOK_AHEAD * end), num_blocks)
            hashes = self._hashes(request, end)
            for window, blocks in zip(self.windows, self._block_of, strict=True):
                if window is None:
                    gaps = (i for i in range(found, reached) if hashes[i] not in blocks)
                    reached = next(gaps, reached)
            found = reached
        return found

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
        ids = request.token_ids[first * size : num_blocks * size]
        tokens = pack(f"{len(ids)}q", *ids)
        size *= TOKEN_BYTES
        parent = hashes[-1] if hashes else self._root(request.cache_salt)
        if not first and not self._last.leads_to(parent, 0):
            self._last = _Chain(bytearray(), [parent])
        last, same = self._last, 0
        if is_last := last.leads_to(parent, first):
            same = last.num_common(tokens, first, size)
            hashes += last.hashes[first + 1 : first + 1 + same]
            parent = hashes[-1] if hashes else parent
        for begin in range(same * size, len(tokens), size):
            parent = sha256(parent + tokens[begin : begin + size]).digest()
            hashes.append(parent)
        if is_last and first + same < len(hashes):
            last.go_on(first + same, tokens[same * size :], hashes[first + same :], size)
        return hashes

    def _root(self, salt: bytes) -> bytes:
        return sha256(b"%d:%b%b" % (len(self._key), self._key, salt)).digest()
