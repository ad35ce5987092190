"""Which blocks do requests hold whose answers grow together? The engine's own block manager, led
through all prompts and then, in rounds, through the answers.

Where the pool is full, the newest request gives its blocks back and waits, as in the scheduler.
"""

from __future__ import annotations

import msgspec

from ridgeline.request import Request, SamplingParams
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.step import NULL_BLOCK

ROUNDS = 16  # in which answers grow; finer ones look the same and take longer
CHUNK = 2048  # tokens of a step
MAX_CELLS = 480
FREE, SHARED = 0, 1  # of a cell; request i is i + 2


class Shape(msgspec.Struct, frozen=True):
    """So many requests with a prompt each, whose first `prefix` tokens (whole blocks) are the same,
    after so many generated tokens."""

    users: int
    prompt: int
    prefix: int
    generated: int


class Held(msgspec.Struct, frozen=True):
    """The table of one request, in blocks of one KV group. `spare`: slots of its last block that
    hold no token yet. A request that waits holds nothing."""

    request: int
    shared: int
    own: int
    spare: int


class Pool(msgspec.Struct, frozen=True):
    """Each cell is `blocks_per_cell` blocks: FREE, SHARED, or the request that has most of them."""

    num_blocks: int
    blocks_per_cell: int
    block_size: int
    cells: list[int]
    num_free: int
    num_shared: int
    spare_slots: int
    tables: list[Held]


def led_pool(
    num_blocks: int, block_size: int, windows: tuple[int | None, ...], shape: Shape
) -> Pool:
    """What is shared is a fork of one request that has computed the common beginning."""
    manager = BlockManager(num_blocks, block_size, windows, prefix_caching=False)
    root, running = _request(-1, shape), list[Request]()
    shared = manager.match(root, 0)  # nothing
    manager.admit(root, shared)
    if shape.prefix and _grow(manager, root, shape.prefix):
        shared = manager.share(root, shape.prefix) or shared
    for number in range(shape.users):
        request = _request(number, shape)
        manager.admit(request, shared)
        if not _grow(manager, request, shape.prompt - shared.num_tokens):
            manager.free(request, 0)
            break
        running.append(request)
    for more in _rounds(shape.generated, block_size):
        for request in list(running):
            while request in running and not _grow(manager, request, more):
                manager.free(running.pop(), 0)
    manager.free(root, 0)
    return _seen(manager, running, shape.users)


def _request(number: int, shape: Shape) -> Request:
    request = Request(str(number), (0,), SamplingParams(max_tokens=1), 0.0)
    request.num_computable_tokens = shape.prompt + shape.generated
    return request


def _grow(manager: BlockManager, request: Request, num_tokens: int) -> bool:
    """Room for so many more tokens, in steps of at most CHUNK; False where there is none."""
    while num_tokens > 0:
        new = min(num_tokens, CHUNK)
        if manager.extend(request, new, 0) is None:
            return False
        num_tokens -= new
        request.num_computed_tokens += new
        request.num_done_tokens = request.num_computed_tokens
        manager.publish(request, 0)
    return True


def _rounds(generated: int, block_size: int) -> list[int]:
    size = max(block_size, -(-generated // ROUNDS))
    return [min(size, generated - start) for start in range(0, generated, size)]


def _seen(manager: BlockManager, running: list[Request], users: int) -> Pool:
    owner = [FREE] * (manager.num_blocks + 1)
    for number, request in enumerate(running):
        for table in request.block_ids:
            for block in table:
                owner[block] = number + 2 if owner[block] in (FREE, number + 2) else SHARED
    owner[NULL_BLOCK] = FREE
    per_cell = -(-manager.num_blocks // MAX_CELLS)
    cells = [_most(owner[first : first + per_cell]) for first in range(1, len(owner), per_cell)]
    tables = [
        _held(request, number, owner, manager.block_size) for number, request in enumerate(running)
    ]
    waiting = range(len(running), users)
    tables += [Held(number, 0, 0, 0) for number in waiting]
    return Pool(
        manager.num_blocks,
        per_cell,
        manager.block_size,
        cells,
        manager.num_free_blocks,
        owner.count(SHARED),
        sum(table.spare for table in tables) * len(manager.windows),
        tables,
    )


def _held(request: Request, number: int, owner: list[int], block_size: int) -> Held:
    whole = request.block_ids[0]
    table = [block for block in whole if block != NULL_BLOCK]
    shared = sum(owner[block] == SHARED for block in table)
    spare = len(whole) * block_size - request.num_computed_tokens
    return Held(number, shared, len(table) - shared, spare)


def _most(owners: list[int]) -> int:
    return max(set(owners), key=owners.count)
