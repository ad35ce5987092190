"""x @ W.T for some rows of x by a CUDA kernel of warpgroup products (`cuda/tile_linear.cu`).

Rows of W are the tall side of a product, rows of x the wide one, so that a few rows of x waste
nothing, and 256 of them read W once. Where `tiles.json` says `wgmma`, a `Tile` means: tiles of
`block_n` rows of W and `block_m` rows of x (0: as many as there are, 256 at the most), `block_k`
numbers of a row a step, a ring of `stages` steps, `warps` that multiply, 4 or 8. With `per_sm` the
steps of all tiles are shared evenly by so many programs of each multiprocessor, wherever the cuts
fall; else each tile has a program, or `splits` of them, a cluster along K. `cluster` programs of
different rows of W read each row of x once for all of them.
Letters: M rows, K inputs, N rows of W, O outputs: N, or N / 2 if gated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from ridgeline.errors import check
from ridgeline.kernels import nvrtc
from ridgeline.kernels.launching import Workspace, launches_early, make_workspace
from ridgeline.kernels.stream_linear import (
    ELEMENTS,
    INT8,
    MOST_INT8,
    OUTS,
    ROOM_BYTES,
    ROUNDS,
    SCALE_KINDS,
    Scales,
    compiles,
    multiprocessors,
)
from ridgeline.kernels.tiles import MAX_TILED, Tile

SOURCE = "tile_linear.cu"
COLUMNS = (16, 32, 64, 96, 128, 192, 256)  # rows of x in a tile
BLOCK_BYTES = 128  # of a row: what the swizzle of the copy engine goes over
BAND = 64  # rows of W in a product of a warpgroup
CHUNKS = (32, 16, 8)  # rows of x whose outputs are staged together
PAD = 4  # float32 between their rows
MOST_SHARED_BYTES = ROOM_BYTES  # of a block
ALIGNMENT = 16  # bytes of rows
OUTPUTS = 8  # that are stored together
PARTIALS = 9 << 19  # a tile of 128 times 256 of each of 132 multiprocessors, and some more
COUNTERS = 1 << 14
MOST_ROWS = 1 << 13  # of x in int8: more of them are several launches


@dataclass(frozen=True, slots=True)
class Cut:
    """One launch: `tiles` of `steps` steps, shared by `programs`, each of `Tile.cluster` times
    `Tile.splits` blocks. `width`: outputs; `columns`: rows of x in a tile; `blocks`: of 128 bytes
    of a row, in a step."""

    columns: int
    blocks: int
    width: int
    x_tiles: int
    tiles: int
    steps: int
    programs: int
    shared_bytes: int


def can_tile(x_MK: torch.Tensor, weight_NK: torch.Tensor, *, gated: bool = False) -> bool:
    """Sizes, dtypes and device are such that the kernel runs."""
    item = x_MK.element_size()
    width = weight_NK.shape[0] // (2 if gated else 1)
    places = weight_NK.data_ptr() | x_MK.data_ptr()
    strides = (weight_NK.stride(0) | x_MK.stride(0) | x_MK.shape[1]) * item
    is_int8 = weight_NK.dtype == INT8
    return (
        x_MK.dtype == weight_NK.dtype in ELEMENTS
        and 0 < x_MK.shape[0] <= (MOST_ROWS if is_int8 else MAX_TILED)
        and (not is_int8 or x_MK.shape[1] <= MOST_INT8)
        and x_MK.stride(1) == weight_NK.stride(1) == 1
        and width % OUTPUTS == 0
        and (places | strides) % ALIGNMENT == 0
        and launches_early(x_MK.device)
        and compiles()
    )


def tile_linear(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    tile: Tile,
    bias_N: torch.Tensor | None = None,
    gated: bool = False,
    residual_MO: torch.Tensor | None = None,
    out_MO: torch.Tensor | None = None,
    scales: Scales | None = None,
    dtype: torch.dtype | None = None,
    workspace: Workspace | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """As `small_linear` without a norm, of inputs for which `can_tile` holds: adds in float32,
    rounds once. x and W in e4m3 or int8 have `scales` of both; `dtype` is that of y then. Sums of
    int8 are exact, so that a row of y without a gate is the same by any tile. `workspace` has to be
    large enough for `cut_of`; unless given it is one for all launches of the device, which must not
    overlap."""
    (rows, inputs), outputs = x_MK.shape, weight_NK.shape[0]
    item, units = x_MK.element_size(), multiprocessors(x_MK.device)
    cut = cut_of(tile, rows, outputs, inputs, item=item, units=units, gated=gated)
    is_coded = weight_NK.dtype in ROUNDS
    check((scales is not None) == is_coded, "weights that are codes have scales")
    check(scales is None or scales.x_M is not None, "rows that are codes have scales too")
    kind = x_MK.dtype if scales is None else (dtype or torch.bfloat16)
    y_MO = x_MK.new_empty((rows, cut.width), dtype=kind) if out_MO is None else out_MO
    ends = [t for t in (bias_N, residual_MO) if t is not None]
    check(all(t.dtype == y_MO.dtype for t in ends), "what is added has the dtype of y")
    check(y_MO.dtype != torch.float32 or not ends, "nothing is added to float32")
    defines = defines_of(
        tile, cut, x_MK.dtype, y_MO.dtype, scale=None if scales is None else scales.weight_N.dtype,
        gated=gated, residual=residual_MO is not None, bias=bias_N is not None, pdl=pdl,
    )  # fmt: skip
    return launch_tiles(
        weight_map(weight_NK, tile, gated=gated), x_MK, y_MO, tile=tile, cut=cut, defines=defines,
        bias_N=bias_N, residual_MO=residual_MO, scales=scales, workspace=workspace, pdl=pdl,
    )  # fmt: skip


def launch_tiles(
    weights: nvrtc.TensorMap,
    x_MK: torch.Tensor,
    y_MO: torch.Tensor,
    *,
    tile: Tile,
    cut: Cut,
    defines: Mapping[str, int | str],
    bias_N: torch.Tensor | None = None,
    residual_MO: torch.Tensor | None = None,
    scales: Scales | None = None,
    workspace: Workspace | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """Writes y, which it returns, by the kernel that is compiled with `defines`, of weights that
    lie as their map says. What is not given is not read: y stands in its place."""
    beside = [t for t in (residual_MO, y_MO) if t is not None]
    aligned = all((t.data_ptr() | t.stride(0) * t.element_size()) % ALIGNMENT == 0 for t in beside)
    check(aligned, "rows of y and of what is added to it begin at multiples of 16 bytes")
    room = workspace or tile_workspace(x_MK.device)
    if cut.programs != cut.tiles:
        needed = cut.programs * tile.cluster * tile.block_n * cut.columns
        room.check_room(needed, cut.tiles * tile.cluster * tile.warps // 4)
    kernel = nvrtc.kernel(SOURCE, "tile_linear", defines, x_MK.device)
    nvrtc.allow_shared(kernel, cut.shared_bytes)
    kernel.launch(
        (cut.programs * tile.cluster * tile.splits, 1, 1),
        threads(tile, cut.columns),
        cut.shared_bytes,
        [
            weights, rows_map(x_MK, cut.columns // tile.cluster), y_MO,
            y_MO if residual_MO is None else residual_MO, y_MO if bias_N is None else bias_N,
            y_MO if scales is None or scales.x_M is None else scales.x_M,
            y_MO if scales is None else scales.weight_N, room.partial_P, room.arrivals_A,
            ctypes.c_int32(x_MK.shape[0]), ctypes.c_int32(cut.width), ctypes.c_int32(cut.x_tiles),
            ctypes.c_int32(cut.tiles), ctypes.c_int32(cut.steps),
            ctypes.c_uint64(0 if residual_MO is None else residual_MO.stride(0)),
            ctypes.c_uint64(y_MO.stride(0)),
        ],
        pdl=pdl,
        cluster=tile.cluster * tile.splits,
    )  # fmt: skip
    return y_MO


def cut_of(
    tile: Tile,
    rows: int,
    outputs: int,
    inputs: int,
    *,
    item: int,
    units: int,
    gated: bool = False,
) -> Cut:
    """How `tile` cuts a product of numbers of `item` bytes on `units` multiprocessors; a fault if
    it cannot."""
    groups = tile.warps // 4
    check(tile.warps in (4, 8), "one or two warpgroups multiply", warps=tile.warps)
    whole = tile.block_n % (BAND * groups) == 0 and tile.block_n <= 256
    check(whole, "bands of 64 rows for each warpgroup", block_n=tile.block_n)
    blocks, rest = divmod(tile.block_k * item, BLOCK_BYTES)
    check(blocks > 0 and rest == 0, "steps of whole blocks of 128 bytes", block_k=tile.block_k)
    columns = columns_of(rows, tile.block_m)
    check(columns % (8 * tile.cluster) == 0, "eights of rows of x for each block of a cluster")
    x_tiles = -(-rows // columns)
    tiles = -(-outputs // (tile.block_n * tile.cluster)) * x_tiles
    steps = -(-inputs * item // (blocks * BLOCK_BYTES))
    if tile.splits > 1:
        alone = tile.splits in (2, 4, 8) and tile.per_sm == 0 and tile.cluster == 1
        check(alone, "a cluster along K is one of 2, 4 or 8 blocks, for a tile", splits=tile.splits)
        part = part_of(tile, columns)
        parts = columns // part
        whole = columns % part == part % 8 == 0 and parts in (1, 2, 4, 8)
        check(whole, "eights of rows of x for each that finishes some", columns=columns)
        check(steps >= tile.splits, "a step of K for each of them", steps=steps)
        room = tile.stages * blocks * BLOCK_BYTES * (tile.block_n + columns)
        needed = tile.block_n * part * tile.splits * 4
        check(room >= needed, "sums of a tile fit into the ring", ring=room)
    shared = min(units * tile.per_sm // tile.cluster, tiles * steps)
    return Cut(
        columns=columns, blocks=blocks, width=outputs // 2 if gated else outputs, x_tiles=x_tiles,
        tiles=tiles, steps=steps, programs=shared if tile.per_sm else tiles,
        shared_bytes=shared_bytes(tile, columns, blocks, gated=gated),
    )  # fmt: skip


def defines_of(
    tile: Tile,
    cut: Cut,
    dtype: torch.dtype,
    out: torch.dtype,
    scale: torch.dtype | None = None,
    *,
    gated: bool = False,
    residual: bool = False,
    bias: bool = False,
    pdl: bool = True,
) -> dict[str, int | str]:
    """What the source is compiled with; `dtype` of x and W, `scale` that of the scales of W."""
    return {
        "ELEMENT": ELEMENTS[dtype],
        "OUT": OUTS[out],
        "W_SCALE": 0 if scale is None else SCALE_KINDS[scale],
        "ROWS": tile.block_n,
        "COLUMNS": cut.columns,
        "STAGES": tile.stages,
        "BLOCKS": cut.blocks,
        "WARPGROUPS": tile.warps // 4,
        "CLUSTER": tile.cluster,
        "SPLITS": tile.splits,
        "GATED": int(gated),
        "RESIDUAL": int(residual),
        "BIAS": int(bias),
        "DEPENDENT": int(pdl),
    }


def columns_of(rows: int, block_m: int = 0) -> int:
    """Rows of x in a tile: as few as possible, in as few tiles as `block_m` (or 256) allows."""
    most = block_m or COLUMNS[-1]
    each = -(-rows // -(-rows // most))
    return next(columns for columns in COLUMNS if columns >= each)


def part_of(tile: Tile, columns: int) -> int:
    """Rows of x that one block of a cluster along K finishes: eight at least, and some none."""
    return max(columns // tile.splits, 8)


def threads(tile: Tile, columns: int) -> int:
    """Those that multiply, and two warps that load: a warpgroup where registers change hands."""
    sums = tile.block_n // BAND * 4 // tile.warps * columns // 2
    return tile.warps * 32 + (128 if tile.warps == 8 and sums > 96 else 64)


def shared_bytes(tile: Tile, columns: int, blocks: int, *, gated: bool) -> int:
    """The ring, room where outputs are turned, two barriers a stage, and notes."""
    ring = tile.stages * blocks * BLOCK_BYTES * (tile.block_n + columns)
    outputs = BAND // 2 if gated else BAND
    chunk = next(size for size in CHUNKS if part_of(tile, columns) % size == 0)
    staging = tile.warps // 4 * chunk * (outputs + PAD) * 4
    return ring + staging + tile.stages * 16 + 16


def weight_map(weight_NK: torch.Tensor, tile: Tile, *, gated: bool) -> nvrtc.TensorMap:
    """Boxes of `block_n` rows and 128 bytes; gated: eight rows of gate, eight of up, and so on."""
    (outputs, inputs), item = weight_NK.shape, weight_NK.element_size()
    row = weight_NK.stride(0) * item
    numbers = BLOCK_BYTES // item
    if not gated:
        sizes, strides, box = (inputs, outputs), (row,), (numbers, tile.block_n)
        return nvrtc.tensor_map(weight_NK.data_ptr(), weight_NK.dtype, sizes, strides, box)
    return nvrtc.tensor_map(
        weight_NK.data_ptr(),
        weight_NK.dtype,
        (inputs, 8, 2, outputs // 16),
        (row, outputs // 2 * row, 8 * row),
        (numbers, 8, 2, tile.block_n // 16),
    )


def rows_map(x_MK: torch.Tensor, rows: int) -> nvrtc.TensorMap:
    item = x_MK.element_size()
    box = BLOCK_BYTES // item, rows
    strides = (x_MK.stride(0) * item,)
    sizes = x_MK.shape[1], x_MK.shape[0]
    return nvrtc.tensor_map(x_MK.data_ptr(), x_MK.dtype, sizes, strides, box)


@lru_cache(maxsize=16)
def tile_workspace(device: torch.device) -> Workspace:
    """The one of the stream that the engine of this device runs on."""
    return make_workspace(device, PARTIALS, COUNTERS)
