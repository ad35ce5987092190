"""How are small products cut that nobody has tuned?

By one tile for steps of a few rows, and by few for some more. Of what decode steps of Qwen3-4B and
of Llama-3.2-1B could gain on an H200 over the library with the best tile of each product, of which
`tiles.json` knows nothing, these gain 0.82 to 0.93 (`bench/gpu/tune_chain.py`, 1 to 64 rows). Much
smaller matrices and more rows have not been measured, nor has a device without warpgroup products:
they stay with the library, as does what the table calls so.
Letters: M rows, K inputs, N rows of W.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.kernels.stream_linear import ROOM_BYTES
from ridgeline.kernels.tile_linear import columns_of, shared_bytes
from ridgeline.kernels.tiles import Tile

STEP = 64  # numbers of 16 bits in the bytes that a step loads of a row of W
LEAST = 1024  # N and K
MOST_OUTPUTS = 1 << 16  # above: the matrix of logits
MOST_STREAMED = 16  # M; the norm before is part of the kernel
MOST_ROWS = 64  # M; the norm is a kernel of its own from 17 on
LOGIT_ROWS = 8  # M, of the matrix of logits
SHORT = 4096  # K of which two programs have enough to do
FEW_OUTPUTS = 1024  # so few tiles that four programs share one
ONE_WAVE = 132  # programs that have a multiprocessor for themselves
TWO_WAVES = 2 * ONE_WAVE
HALF_BYTES = ROOM_BYTES // 2 - (2 << 10)  # two programs on a multiprocessor
LEAST_STAGES, MOST_STAGES = 3, 16
SHARED_STAGES = 6  # deeper ones, beside another program, gain nothing

STREAM = Tile(32, STEP, warps=8, stages=3, stream=True)


def untuned_tile(
    rows: int, outputs: int, inputs: int, *, norm: bool = False, gated: bool = False
) -> Tile | None:
    """Of M = `rows`, which is a bucket; None: the library. `gated`: W has gate and up."""
    if min(outputs, inputs) < LEAST or inputs % STEP or rows > MOST_ROWS:
        return None
    if outputs > MOST_OUTPUTS:
        return None if norm or rows > LOGIT_ROWS else STREAM
    if rows <= MOST_STREAMED:
        return STREAM
    return None if norm else _tiled(rows, outputs, inputs, gated=gated)


def _tiled(rows: int, outputs: int, inputs: int, *, gated: bool) -> Tile | None:
    """Where all tiles, or two or four programs of each, run at once, and none has much to read:
    so. Else all steps are shared evenly by two programs of each multiprocessor."""
    base = Tile(64, STEP, wgmma=True)
    tiles = -(-outputs // base.block_n)
    for splits in (4, 2, 1) if outputs <= FEW_OUTPUTS else (2, 1):
        programs = tiles * splits
        if inputs <= SHORT and programs <= TWO_WAVES:
            room = ROOM_BYTES if programs <= ONE_WAVE else HALF_BYTES
            return _deepest(replace(base, splits=splits), rows, room, MOST_STAGES, gated=gated)
    return _deepest(replace(base, per_sm=2), rows, HALF_BYTES, SHARED_STAGES, gated=gated)


def _deepest(tile: Tile, rows: int, room: int, most: int, *, gated: bool) -> Tile | None:
    """With as many stages as `room` has bytes for."""
    columns = columns_of(rows)
    for stages in range(most, LEAST_STAGES - 1, -1):
        made = replace(tile, stages=stages)
        if shared_bytes(made, columns, 1, gated=gated) <= room:
            return made
    return None
