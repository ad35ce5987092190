"""Blocks are held, deferred or free; nothing is lost and nothing is handed out twice."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest

from ridgeline.errors import InternalError
from ridgeline.request import Request
from ridgeline.scheduler.block_manager import (
    UNBOUNDED_TOKENS,
    BlockManager,
    beam_blocks_needed,
    blocks_needed,
    max_servable_tokens,
)
from ridgeline.scheduler.prefix_cache import Prefix
from ridgeline.step import NULL_BLOCK
from tests.scheduler.rig import make_request

EMPTY = Prefix(0, ((),))


def state(blocks: BlockManager) -> object:
    cache = blocks._cache
    return deepcopy(
        (list(blocks._free), list(blocks._deferred), blocks._ref_count, cache._block_of)
    )


def compute(blocks: BlockManager, request: Request, num_tokens: int, step: int) -> None:
    assert blocks.extend(request, num_tokens, step) is not None
    request.num_computed_tokens += num_tokens
    request.num_done_tokens = request.num_computed_tokens


def admitted(blocks: BlockManager, request: Request, num_tokens: int, step: int = 1) -> Request:
    blocks.admit(request, blocks.match(request, len(request.token_ids)))
    compute(blocks, request, num_tokens, step)
    return request


@pytest.mark.parametrize("windows", [(None,), (None, None, 5), (3,), (None, 1), (2, 7)])
@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_capacity_is_what_a_walk_through_the_request_needs(
    windows: tuple[int | None, ...], block_size: int
) -> None:
    rng = random.Random(f"{windows}{block_size}")
    for _ in range(20):
        num_tokens, chunk = rng.randint(2, 60), rng.choice([1, 2, 5, 16, 100])
        blocks = BlockManager(200, block_size, windows)
        request = make_request("r", num_tokens - 1, 1)
        blocks.admit(request, Prefix(0, ((),) * len(windows)))
        most = 0
        while request.num_computed_tokens < num_tokens - 1:
            left = num_tokens - 1 - request.num_computed_tokens
            compute(blocks, request, min(chunk, left), 1)
            most = max(most, 200 - blocks.num_free_blocks)
            blocks.publish(request, 0)
        needed = blocks_needed(num_tokens, block_size, windows, chunk)
        assert most <= needed
        if windows == (None,):
            assert most == needed
        longest = max_servable_tokens(needed, block_size, windows, chunk)
        assert longest >= num_tokens
        if longest < UNBOUNDED_TOKENS:
            assert blocks_needed(longest + 1, block_size, windows, chunk) > needed


def test_capacity_at_the_edges() -> None:
    assert max_servable_tokens(4, 4, (None,), 64) == 17  # the last token is never computed
    assert max_servable_tokens(1, 1, (None,), 64) == 2
    assert max_servable_tokens(1, 16, (None, None), 64) == 0
    assert max_servable_tokens(8, 4, (4,), 8) == UNBOUNDED_TOKENS
    assert beam_blocks_needed(8, 13, 3, 4, (None,), 64) == 2 + 3
    assert beam_blocks_needed(8, 13, 3, 4, (4,), 1) == 3 * 2


def test_a_failed_extend_changes_nothing() -> None:
    blocks = BlockManager(3, 2)
    request = admitted(blocks, make_request("a", 5), 3)
    other = admitted(blocks, make_request("b", 2), 1)
    before, tables = state(blocks), deepcopy(request.block_ids)
    assert blocks.missing(request, 2) == 1
    assert blocks.extend(request, 2, 2) is None
    assert state(blocks) == before
    assert request.block_ids == tables
    blocks.check_invariants([request, other])


def test_a_block_is_not_reissued_while_a_step_may_touch_it() -> None:
    blocks = BlockManager(2, 2)
    request = admitted(blocks, make_request("a", 4), 4, step=1)
    blocks.free(request, in_flight=1)
    assert (blocks.num_free_blocks, blocks.num_deferred_blocks) == (0, 2)
    waiting = make_request("b", 2)
    blocks.admit(waiting, EMPTY)
    assert blocks.extend(waiting, 1, 2) is None
    blocks.complete(1)
    assert (blocks.num_free_blocks, blocks.num_deferred_blocks) == (2, 0)
    assert blocks.extend(waiting, 1, 2) is not None
    blocks.check_invariants([waiting])


def test_giving_back_what_is_not_held_raises() -> None:
    blocks = BlockManager(2, 2)
    request = admitted(blocks, make_request("a", 2), 2)
    tables = deepcopy(request.block_ids)
    blocks.free(request, 0)
    request.block_ids, request.num_dropped_blocks = tables, [0]
    with pytest.raises(InternalError, match="only what is held"):
        blocks.free(request, 0)


def test_invariants_see_what_is_wrong() -> None:
    blocks = BlockManager(4, 2)
    request = admitted(blocks, make_request("a", 4), 4)
    blocks.check_invariants([request])
    with pytest.raises(InternalError, match="reference counts"):
        blocks.check_invariants([])
    request.block_ids[0][0] = NULL_BLOCK
    with pytest.raises(InternalError):
        blocks.check_invariants([request])


def test_shared_blocks_are_copied_before_the_write() -> None:
    blocks = BlockManager(8, 4)
    parent = admitted(blocks, make_request("p", 7), 7)
    child = make_request("c", prompt=parent.prompt_token_ids)
    prefix = blocks.share(parent, 6)
    assert prefix is not None
    assert blocks.missing_for(prefix, 1) == 1 - blocks.num_free_blocks
    blocks.admit(child, prefix)
    assert child.block_ids == parent.block_ids
    room = blocks.extend(child, 1, step_id=5)
    assert room is not None
    new, (copy,) = room
    assert new == ((),)
    assert (copy.request_id, copy.group, copy.index) == ("c", 0, 1)
    assert copy.source == parent.block_ids[0][1]
    assert copy.target == child.block_ids[0][1] != copy.source
    assert child.block_ids[0][0] == parent.block_ids[0][0]
    assert blocks.extend(parent, 1, 5) == (((),), ())  # its own again
    blocks.check_invariants([parent, child])


def test_a_copied_block_outlives_the_step_that_reads_it() -> None:
    blocks = BlockManager(8, 4)
    parent = admitted(blocks, make_request("p", 8), 8)
    blocks.publish(parent, 0)
    child = make_request("c", prompt=parent.prompt_token_ids)
    prefix = blocks.share(parent, 7)
    assert prefix is not None
    blocks.admit(child, prefix)
    blocks.free(parent, in_flight=0)  # the half-filled block is the child's alone, but published
    room = blocks.extend(child, 1, step_id=1)
    assert room is not None
    assert len(room[1]) == 1
    assert blocks.num_deferred_blocks == 1
    blocks.complete(1)
    assert blocks.num_deferred_blocks == 0
    blocks.check_invariants([child])


def test_blocks_behind_the_window_go_back() -> None:
    blocks = BlockManager(20, 2, (None, 3))
    request = make_request("r", 16)
    blocks.admit(request, Prefix(0, ((), ())))
    compute(blocks, request, 12, 1)
    request.num_computed_tokens = 12
    assert blocks.num_leaving(request) == 5  # of 6: the query at 12 looks back on 10
    blocks.publish(request, in_flight=1)
    assert request.block_ids[1][:5] == [NULL_BLOCK] * 5
    assert request.block_ids[1][5] != NULL_BLOCK
    assert NULL_BLOCK not in request.block_ids[0]
    assert blocks.num_deferred_blocks == 5
    assert blocks.num_held(request) == [6, 1]
    assert blocks.num_leaving(request) == 0
    blocks.check_invariants([request])
    blocks.free(request, 1)
    blocks.complete(1)
    assert blocks.num_free_blocks == 20


def test_uncached_blocks_are_taken_before_cached_ones_and_old_before_new() -> None:
    blocks = BlockManager(6, 2)
    first = admitted(blocks, make_request("a", 4), 4)
    second = admitted(blocks, make_request("b", 4), 4)
    for request in (first, second):
        blocks.publish(request, 0)
        blocks.free(request, 0)
    assert blocks.num_cached_blocks == 4
    third = admitted(blocks, make_request("c", 6), 6)  # two never used, then one of the oldest
    assert blocks.num_cached_blocks == 3
    assert (
        blocks.match(make_request("a", 5, prompt=(*first.prompt_token_ids, 0)), 5).num_tokens == 2
    )
    assert (
        blocks.match(make_request("b", 5, prompt=(*second.prompt_token_ids, 0)), 5).num_tokens == 4
    )
    blocks.check_invariants([third])


def test_what_went_wrong_is_found_by_nobody() -> None:
    blocks = BlockManager(6, 2)
    request = admitted(blocks, make_request("a", 5), 5)
    blocks.publish(request, 0)
    assert blocks.match(request, 5).num_tokens == 4
    blocks.forget(request)
    assert blocks.match(request, 5).num_tokens == 0
    assert blocks.num_cached_blocks == 0
