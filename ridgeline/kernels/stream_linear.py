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
from ridgeline.kernels.tiles import Tile

SOURCE = "stream_linear.cu"
MAX_ROWS = 32
STEP_BYTES = 128  # of a row of W
TILE_ROWS = 16
COLUMN_ROWS = 8  # of x in a tile of the product
E4M3 = torch.float8_e4m3fn
ELEMENTS = {torch.bfloat16: 0, torch.float16: 1, E4M3: 2}
ROUNDS = 3  # bfloat16 beside e4m3 weights becomes e4m3
ROUNDED_TOGETHER = 128  # numbers of a row of x with one scale
LARGEST = 448.0  # of e4m3


@dataclass(frozen=True, slots=True)
class Scales:
    """Of e4m3 weights, and of the rows of x if those are e4m3 too."""

    weight_N: torch.Tensor
    x_M: torch.Tensor | None = None


def can_stream(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> bool:
    """Sizes, dtypes and device are such that the kernel runs."""
    kinds = x_MK.dtype == weight_NK.dtype in ELEMENTS
    kinds |= x_MK.dtype == torch.bfloat16 and weight_NK.dtype == E4M3
    step = weight_NK.stride(0) * weight_NK.element_size()
    row = x_MK.stride(0) * x_MK.element_size()
    return (
        kinds
        and 0 < x_MK.shape[0] <= MAX_ROWS
        and weight_NK.shape[1] * weight_NK.element_size() % STEP_BYTES == 0
        and (weight_NK.data_ptr() | step | x_MK.data_ptr() | row) % 16 == 0
        and launches_early(x_MK.device)
        and compiles()
    )


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

    Weights, and x, in e4m3 have `scales`; `dtype` is that of y where x is e4m3. Other rows beside
    e4m3 weights are multiplied as `rounded_reference` gives them (with a norm: x times its weight,
    rounded to bfloat16, is what is rounded)."""
    (rows, inputs), outputs = x_MK.shape, weight_NK.shape[0]
    width = outputs // 2 if gated else outputs
    rounds = weight_NK.dtype == E4M3 and x_MK.dtype != E4M3
    check((scales is not None) == (weight_NK.dtype == E4M3), "e4m3 weights have scales")
    check(norm is None or x_MK.dtype == torch.bfloat16, "only bfloat16 is normed inside")
    kind = x_MK.dtype if x_MK.dtype != E4M3 else (dtype or torch.bfloat16)
    y_MO = x_MK.new_empty((rows, width), dtype=kind) if out_MO is None else out_MO
    ends = [t for t in (bias_N, residual_MO) if t is not None]
    check(all(t.dtype == y_MO.dtype for t in ends), "what is added has the dtype of y")
    tiles = tile.block_n // TILE_ROWS
    group = tile.block_n // 2 if gated else tile.block_n
    check(tile.block_n % TILE_ROWS == 0, "whole tiles of rows", block_n=tile.block_n)
    check(not gated or tiles % 2 == 0, "tiles of gate and up are pairs", block_n=tile.block_n)
    groups = -(-width // group)
    columns = -(-rows // COLUMN_ROWS)
    columns = 4 if columns == 3 else columns
    programs = max(1, multiprocessors(x_MK.device) * max(1, tile.per_sm) // tile.splits)
    each = -(-groups // programs)
    defines = {
        "ELEMENT": ROUNDS if rounds else ELEMENTS[x_MK.dtype],
        "OUT": ELEMENTS[y_MO.dtype],
        "COLUMNS": columns,
        "TILES": tiles,
        "STAGES": tile.stages,
        "SPLITS": tile.splits,
        "WARPS": tile.warps,
        "NORM": int(norm is not None),
        "GATED": int(gated),
        "RESIDUAL": int(residual_MO is not None),
        "BIAS": int(bias_N is not None),
        "DEPENDENT": int(pdl),
    }
    kernel = nvrtc.kernel(SOURCE, "stream_linear", defines, x_MK.device)
    shared = shared_bytes(tile, columns, pieces=2 if rounds else 1)
    nvrtc.allow_shared(kernel, shared)
    item = x_MK.element_size()
    kernel.launch(
        (-(-groups // each) * tile.splits, 1, 1),
        tile.warps * 32,
        shared,
        [
            weight_NK,
            x_MK,
            y_MO,
            y_MO if residual_MO is None else residual_MO,
            y_MO if bias_N is None else bias_N,
            y_MO if norm is None else norm.weight_K,
            y_MO if scales is None or scales.x_M is None else scales.x_M,
            y_MO if scales is None else scales.weight_N,
            ctypes.c_int32(rows),
            ctypes.c_int32(width),
            ctypes.c_int32(inputs * weight_NK.element_size()),
            ctypes.c_int32(groups),
            ctypes.c_int32(each),
            ctypes.c_uint64(weight_NK.stride(0) * weight_NK.element_size()),
            ctypes.c_uint64(x_MK.stride(0) * item),
            ctypes.c_uint64(0 if residual_MO is None else residual_MO.stride(0)),
            ctypes.c_uint64(y_MO.stride(0)),
            ctypes.c_int32(inputs),
            ctypes.c_float(0.0 if norm is None else norm.eps),
        ],
        pdl=pdl,
        cluster=tile.splits,
    )
    return y_MO


def rounded_reference(x_MK: torch.Tensor) -> torch.Tensor:
    """[M, K] float32: each 128 numbers of a row as e4m3 times a scale, the largest being 448."""
    blocks_MBk = x_MK.float().view(x_MK.shape[0], -1, ROUNDED_TOGETHER)
    scale_MB1 = (blocks_MBk.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=1e-30)
    return ((blocks_MBk / scale_MB1).to(E4M3).float() * scale_MB1).flatten(1)


def shared_bytes(tile: Tile, columns: int, pieces: int) -> int:
    """The ring, the sums of the warps and the squares for the norm; `pieces`: how many times as
    large as a number of W one of x is."""
    step = (tile.block_n + columns * COLUMN_ROWS * pieces) * STEP_BYTES
    ring = tile.warps * tile.stages * step
    sums = tile.warps * tile.block_n * (columns * COLUMN_ROWS + 1) * 4
    return ring + sums + tile.warps * columns * COLUMN_ROWS * 4


@lru_cache(maxsize=1)
def compiles() -> bool:
    return nvrtc.available()


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
