"""A block is found only by exactly the tokens, the salt and the group that filled it."""

from __future__ import annotations

import random
from array import array
from hashlib import sha256

import pytest

from ridgeline.request import Request
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.prefix_cache import LOOK_AHEAD, Prefix, PrefixCache
from ridgeline.step import NULL_BLOCK
from tests.scheduler.rig import make_request

SIZE = 4


def fill(blocks: BlockManager, request: Request, num_tokens: int) -> Request:
    blocks.admit(request, Prefix(0, ((),) * len(blocks.windows)))
    assert blocks.extend(request, num_tokens, 1) is not None
    request.num_computed_tokens = request.num_done_tokens = num_tokens
    blocks.publish(request, 0)
    return request


def found(blocks: BlockManager, prompt: tuple[int, ...], salt: bytes = b"") -> int:
    return blocks.match(make_request("x", prompt=prompt, cache_salt=salt), len(prompt)).num_tokens


def test_the_longest_full_prefix_is_found_and_one_token_is_left() -> None:
    blocks = BlockManager(20, SIZE)
    prompt = tuple(range(100, 111))
    fill(blocks, make_request("a", prompt=prompt), 11)
    assert found(blocks, prompt) == 8
    assert found(blocks, prompt[:9]) == 8
    assert found(blocks, prompt[:8]) == 4  # the last token is computed anew
    assert found(blocks, prompt[:4]) == 0
    assert found(blocks, (*prompt[:6], 0, *prompt[7:])) == 4
    assert found(blocks, (0, *prompt[1:])) == 0


def test_another_salt_or_key_finds_nothing() -> None:
    prompt = tuple(range(9))
    one, other = BlockManager(8, SIZE, key=b"1"), BlockManager(8, SIZE, key=b"2")
    a = fill(one, make_request("a", prompt=prompt, cache_salt=b"s"), 9)
    assert found(one, prompt, b"s") == 8
    assert found(one, prompt) == found(one, prompt, b"t") == 0
    b = fill(other, make_request("b", prompt=prompt, cache_salt=b"s"), 9)
    assert set(a.block_hashes).isdisjoint(b.block_hashes)


def test_key_and_salt_cannot_be_shifted_into_each_other() -> None:
    prompt = tuple(range(5))
    roots = []
    for key, salt in ((b"ab", b"c"), (b"a", b"bc"), (b"", b"abc"), (b"abc", b"")):
        blocks = BlockManager(8, SIZE, key=key)
        roots.append(
            fill(blocks, make_request("a", prompt=prompt, cache_salt=salt), 5).block_hashes[0]
        )
    assert len(set(roots)) == len(roots)


def test_the_same_block_after_another_beginning_is_another_block() -> None:
    blocks = BlockManager(20, SIZE)
    common = tuple(range(4))
    a = fill(blocks, make_request("a", prompt=(9, 9, 9, 9, *common, 1)), 9)
    assert found(blocks, (8, 8, 8, 8, *common, 1)) == 0
    b = fill(blocks, make_request("b", prompt=(8, 8, 8, 8, *common, 1)), 9)
    assert a.block_hashes[1] != b.block_hashes[1]


def test_the_first_of_two_equal_blocks_is_the_one_that_is_found() -> None:
    blocks = BlockManager(20, SIZE)
    prompt = tuple(range(9))
    a, b = (fill(blocks, make_request(name, prompt=prompt), 9) for name in "ab")
    hit = blocks.match(make_request("c", prompt=prompt), 9)
    assert hit.tables == (tuple(a.block_ids[0][:2]),)
    assert blocks.num_cached_blocks == 2
    blocks.check_invariants([a, b])


def test_only_what_steps_have_written_is_found() -> None:
    blocks = BlockManager(20, SIZE)
    prompt = tuple(range(16))
    request = make_request("a", prompt=prompt)
    blocks.admit(request, Prefix(0, ((),)))
    assert blocks.extend(request, 15, 1) is not None
    request.num_computed_tokens, request.num_done_tokens = 15, 7
    blocks.publish(request, 0)
    assert found(blocks, prompt) == 4


def test_each_block_is_hashed_once() -> None:
    blocks = BlockManager(80, 1)
    request = fill(blocks, make_request("a", 30), 30)
    before = list(request.block_hashes)
    assert len(before) == 30
    request.token_ids[3] = 0  # would change every later hash
    assert blocks.match(request, 30).num_tokens == 29
    assert request.block_hashes == before


@pytest.mark.parametrize(
    ("num_known", "num_hashed"), [(0, 1), (3, LOOK_AHEAD), (20, 64), (40, 64), (90, 99)]
)
def test_little_is_hashed_of_a_beginning_that_is_not_known(num_known: int, num_hashed: int) -> None:
    blocks, prompt = BlockManager(400, 1), tuple(range(100))
    fill(blocks, make_request("a", prompt=(*prompt[:num_known], 0)), num_known)
    request = make_request("b", prompt=(*prompt[:num_known], *range(1000, 1100 - num_known)))
    assert blocks.match(request, 100).num_tokens == num_known
    assert len(request.block_hashes) == num_hashed


def chain(cache: PrefixCache, request: Request) -> list[bytes]:
    """The definition."""
    hashes = [sha256(b"1:k" + request.cache_salt).digest()]
    size, ids = cache.block_size, request.prompt_token_ids
    for begin in range(0, len(ids) // size * size, size):
        tokens = array("q", ids[begin : begin + size]).tobytes()
        hashes.append(sha256(hashes[-1] + tokens).digest())
    return hashes[1:]


def test_hashes_are_the_same_whatever_was_hashed_before_and_in_whatever_pieces() -> None:
    seed = 17
    rng = random.Random(seed)
    for world in range(200):
        cache = PrefixCache(4, rng.choice([1, 2, 3]), (None,), b"k")
        stem = [rng.randrange(5) for _ in range(30)]
        requests = [
            make_request(
                str(i),
                prompt=(*stem[: rng.randrange(30)], *(rng.randrange(5) for _ in range(20))),
                cache_salt=rng.choice([b"", b"", b"s"]),
            )
            for i in range(4)
        ]
        for _ in range(16):
            request = rng.choice(requests)
            most = len(request.token_ids) // cache.block_size
            num_blocks = rng.randint(0, most)
            hashes = cache._hashes(request, num_blocks)
            assert num_blocks <= len(hashes) <= most
            expected = chain(cache, request)[: len(hashes)]
            assert hashes == expected, f"seed {seed}, world {world}"


def test_no_cache_no_hits() -> None:
    blocks = BlockManager(8, SIZE, prefix_caching=False)
    request = fill(blocks, make_request("a", 9), 9)
    assert found(blocks, request.prompt_token_ids) == 0
    assert blocks.num_cached_blocks == 0


def test_a_window_needs_only_its_own_blocks() -> None:
    blocks = BlockManager(60, SIZE, (None, 6))
    prompt = tuple(range(33))
    request = fill(blocks, make_request("a", prompt=prompt), 20)
    request.num_computed_tokens = request.num_done_tokens = 20
    assert blocks.extend(request, 13, 2) is not None
    request.num_computed_tokens = request.num_done_tokens = 33
    blocks.publish(request, 0)
    hit = blocks.match(make_request("b", prompt=prompt), 33)
    assert hit.num_tokens == 32
    assert hit.tables[1][:6] == (NULL_BLOCK,) * 6
    assert NULL_BLOCK not in hit.tables[1][6:]
    assert NULL_BLOCK not in hit.tables[0]


def slow_match(blocks: BlockManager, request: Request, limit: int) -> int:
    """The definition: try every length."""
    cache = blocks._cache
    hashes = cache._hashes(request, len(request.token_ids) // blocks.block_size)
    best = 0
    for length in range(1, (limit - 1) // blocks.block_size + 1):
        position = length * blocks.block_size
        good = True
        for window, names in zip(blocks.windows, cache._block_of, strict=True):
            for i in range(length):
                seen = window is None or (i + 1) * blocks.block_size > position - window + 1
                good = good and (not seen or hashes[i] in names)
        best = position if good else best
    return best


def test_matching_with_windows_equals_trying_every_length() -> None:
    seed = 11
    rng = random.Random(seed)
    num_hits = 0
    for _ in range(400):
        windows = rng.choice([(None, 3), (5,), (2, 9), (None, None, 7), (1,), (None,)])
        size = rng.choice([1, 2, 3])
        blocks = BlockManager(200, size, windows)
        prompt = tuple(rng.randrange(9) for _ in range(rng.randint(1, 24)))
        fill(blocks, make_request("a", prompt=prompt), len(prompt))
        for names in blocks._cache._block_of:  # lose some, as eviction would
            for block in list(names.values()):
                if rng.random() < 0.2:
                    blocks._cache.forget(block)
        request = make_request("b", prompt=prompt)
        got = blocks.match(request, len(prompt))
        assert got.num_tokens == slow_match(blocks, request, len(prompt)), f"seed {seed}"
        num_hits += got.num_tokens > 0
    assert num_hits > 50
