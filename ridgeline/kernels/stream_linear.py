"""x @ W.T for few rows of x by a CUDA kernel that streams W (`cuda/stream_linear.cu`).

Beside the Triton kernels it keeps loading where they wait: its copies of W are on their way before
the kernel before it has ended, and no lane waits for another's. Where `tiles.json` says `stream`, a
`Tile` means: groups of `block_n` rows of W, a cluster of `splits` programs along K, a ring of
`stages` steps of 128 bytes, `per_sm` programs a multiprocessor (0: one).
Letters: M rows, K inputs, N rows of W, O outputs: N, or N / 2 if gated.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch

from ridgeline.errors import check
from ridgeline.kernels import nvrtc
from ridgeline.kernels.launching import launches_early
from ridgeline.kernels.small_linear import InputNorm
from ridgeline.kernels.tiles import Tile, bucket

SOURCE = "stream_linear.cu"
MAX_ROWS = 32
STEP_BYTES = 128  # of a row of W
TILE_ROWS = 16
COLUMN_ROWS = 8  # of x in a tile of the product
LINES_TOGETHER = 4  # of 128 bytes, that a warp copies at once
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
ELEMENTS = {torch.bfloat16: 0, torch.float16: 1, E4M3: 2, INT8: 4}
OUTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # of y
ROUNDS = {E4M3: 3, INT8: 5}  # bfloat16 beside such weights becomes the same
ROUNDED_TOGETHER = 128  # numbers of a row of x with one scale
SCALE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of rows of W
ROOM_BYTES = 227 << 10  # of a block on an H100 or H200
MOST_STRIDE = 1 << 32  # bytes between rows
MOST_INT8 = 1 << 17  # products of two int8 whose sum has 32 bits


@dataclass(frozen=True, slots=True)
class Scales:
    """Of weights in e4m3 or int8, and of the rows of x (float32) if those are codes too."""

    weight_N: torch.Tensor
    x_M: torch.Tensor | None = None


def can_stream(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> bool:
    """Sizes, dtypes and device are such that the kernel runs."""
    kinds = x_MK.dtype == weight_NK.dtype in ELEMENTS
    kinds |= x_MK.dtype == torch.bfloat16 and weight_NK.dtype in ROUNDS
    step = weight_NK.stride(0) * weight_NK.element_size()
    row = x_MK.stride(0) * x_MK.element_size()
    return (
        kinds
        and 0 < x_MK.shape[0] <= MAX_ROWS
        and weight_NK.shape[1] * weight_NK.element_size() % STEP_BYTES == 0
        and (weight_NK.dtype != INT8 or weight_NK.shape[1] <= MOST_INT8)
        and (weight_NK.data_ptr() | step | x_MK.data_ptr() | row) % 16 == 0
        and max(step, row) < MOST_STRIDE
        and launches_early(x_MK.device)
        and compiles()
    )


@dataclass(frozen=True, slots=True)
class Groups:
    """How `tile` cuts rows of W: `count` groups, `each` of a program. `columns`: eights of rows of
    x, `lines` of them in the ring; `kept`: bytes of rounded rows that a program keeps for its later
    groups, 0 if none."""

    columns: int
    lines: int
    count: int
    each: int
    kept: int
    shared_bytes: int


def groups_of(
    tile: Tile, rows: int, outputs: int, row_bytes: int, *, units: int, gated: bool, rounds: bool
) -> Groups:
    """Of rows of W of `row_bytes`, on `units` multiprocessors."""
    tiles = tile.block_n // TILE_ROWS
    width = outputs // 2 if gated else outputs
    group = tile.block_n // 2 if gated else tile.block_n
    check(tile.block_n % TILE_ROWS == 0, "whole tiles of rows", block_n=tile.block_n)
    check(not gated or tiles % 2 == 0, "tiles of gate and up are pairs", block_n=tile.block_n)
    count = -(-width // group)
    columns, lines = columns_of(rows)
    programs = max(1, units * max(1, tile.per_sm) // tile.splits)
    each = -(-count // programs)
    shared = shared_bytes(tile, rows, pieces=2 if rounds else 1)
    kept = kept_bytes(tile, rows, row_bytes) if rounds and each > 1 else 0
    buffer = sums_bytes(tile, columns) if tile.splits == 1 else 0
    # As many programs as before have to find room on a multiprocessor.
    room = ROOM_BYTES // max(1, tile.per_sm) - 1024
    if not kept or shared + buffer + kept > room:
        return Groups(columns, lines, count, each, 0, shared)
    return Groups(columns, lines, count, each, kept, shared + buffer + kept)


def stream_linear(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    tile: Tile,
    norm: InputNorm | None = None,
    bias_N: torch.Tensor | None = None,
    gated: bool = False,
    residual_MO: torch.Tensor | None = None,
    out_MO: torch.Tensor | None = None,
    scales: Scales | None = None,
    dtype: torch.dtype | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """As `small_linear`, of inputs for which `can_stream` holds. Adds in float32, rounds once.

    Weights, and x, in e4m3 or int8 have `scales`; `dtype` is that of y where x is such codes. Other
    rows beside them are multiplied as `rounded_reference` gives them (with a norm: x times its
    weight, rounded to bfloat16, is what is rounded). Of int8 on both sides the sum is exact, and a
    row of y without a gate is the same by any kernel, see `int8_linear`."""
    (rows, inputs), outputs = x_MK.shape, weight_NK.shape[0]
    is_coded = weight_NK.dtype in ROUNDS
    rounds = is_coded and x_MK.dtype != weight_NK.dtype
    check((scales is not None) == is_coded, "weights that are codes have scales")
    check(norm is None or x_MK.dtype == torch.bfloat16, "only bfloat16 is normed inside")
    kind = x_MK.dtype if x_MK.dtype not in ROUNDS else (dtype or torch.bfloat16)
    width = outputs // 2 if gated else outputs
    y_MO = x_MK.new_empty((rows, width), dtype=kind) if out_MO is None else out_MO
    ends = [t for t in (bias_N, residual_MO) if t is not None]
    check(all(t.dtype == y_MO.dtype for t in ends), "what is added has the dtype of y")
    item, row_bytes = x_MK.element_size(), inputs * weight_NK.element_size()
    units = multiprocessors(x_MK.device)
    groups = groups_of(tile, rows, outputs, row_bytes, units=units, gated=gated, rounds=rounds)
    defines = {
        "ELEMENT": ROUNDS[weight_NK.dtype] if rounds else ELEMENTS[x_MK.dtype],
        "OUT": OUTS[y_MO.dtype],
        "W_SCALE": 0 if scales is None else SCALE_KINDS[scales.weight_N.dtype],
        "COLUMNS": groups.columns,
        "X_ROWS": groups.lines,
        "TILES": tile.block_n // TILE_ROWS,
        "STAGES": tile.stages,
        "SPLITS": tile.splits,
        "WARPS": tile.warps,
        "NORM": int(norm is not None),
        "GATED": int(gated),
        "RESIDUAL": int(residual_MO is not None),
        "BIAS": int(bias_N is not None),
        "DEPENDENT": int(pdl),
        "KEPT": int(groups.kept > 0),
    }
    kernel = nvrtc.kernel(SOURCE, "stream_linear", defines, x_MK.device)
    nvrtc.allow_shared(kernel, groups.shared_bytes)
    kernel.launch(
        (-(-groups.count // groups.each) * tile.splits, 1, 1),
        tile.warps * 32,
        groups.shared_bytes,
        [
            weight_NK, x_MK, y_MO, y_MO if residual_MO is None else residual_MO,
            y_MO if bias_N is None else bias_N, y_MO if norm is None else norm.weight_K,
            y_MO if scales is None or scales.x_M is None else scales.x_M,
            y_MO if scales is None else scales.weight_N, ctypes.c_int32(rows),
            ctypes.c_int32(width), ctypes.c_int32(row_bytes), ctypes.c_int32(groups.count),
            ctypes.c_int32(groups.each),
            ctypes.c_uint32(weight_NK.stride(0) * weight_NK.element_size()),
            ctypes.c_uint32(x_MK.stride(0) * item),
            ctypes.c_uint64(0 if residual_MO is None else residual_MO.stride(0)),
            ctypes.c_uint64(y_MO.stride(0)), ctypes.c_int32(inputs),
            ctypes.c_float(0.0 if norm is None else norm.eps),
        ],
        pdl=pdl,
        cluster=tile.splits,
    )  # fmt: skip
    return y_MO


def columns_of(rows: int) -> tuple[int, int]:
    """Eights of rows of x that are multiplied, and rows of them in the ring."""
    columns = bucket(-(-rows // COLUMN_ROWS))
    return columns, min(bucket(rows), columns * COLUMN_ROWS)


def shared_bytes(tile: Tile, rows: int, pieces: int) -> int:
    """The ring, the sums of the warps and the squares for the norm; `pieces`: how many times as
    large as a number of W one of x is."""
    columns, lines = columns_of(rows)
    step = (tile.block_n + -(-lines * pieces // LINES_TOGETHER) * LINES_TOGETHER) * STEP_BYTES
    ring = tile.warps * tile.stages * step
    return ring + sums_bytes(tile, columns) + tile.warps * columns * COLUMN_ROWS * 4


def sums_bytes(tile: Tile, columns: int) -> int:
    return tile.warps * tile.block_n * (columns * COLUMN_ROWS + 1) * 4


def kept_bytes(tile: Tile, rows: int, row_bytes: int) -> int:
    """Codes of x and a scale for each 128 of them, of the steps that each warp has at most."""
    steps = -(-row_bytes // STEP_BYTES // (tile.warps * tile.splits))
    return tile.warps * steps * rows * (STEP_BYTES + 4)


@lru_cache(maxsize=1)
def compiles() -> bool:
    return nvrtc.available()


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
