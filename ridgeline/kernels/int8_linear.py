"""x @ W.T with W in int8 and one scale for each of its rows, on GPUs of the Hopper kind.

For a few rows of bfloat16 reading W is the time, and one kernel does all (`stream_linear`), which
rounds x to int8 as it goes, in pieces of 128. Of more rows each becomes int8 with one scale first
(`quantize_rows`), and tensor cores multiply whole numbers (`tile_linear`, or the stream again).
Those sums are exact, and what follows them is the same few operations everywhere, each rounded: so
such a row of y has the same bits whatever the kernel, its tile and the batch (`invariant`).
Letters: M rows, K inputs, N rows of W, O outputs: N, or N / 2 if gated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Unpack

import torch

from ridgeline.errors import check
from ridgeline.kernels.fp8_linear import MAX_UNTUNED_ROWS, Fp8Matrix, by_tiles, fp8_by_tile
from ridgeline.kernels.fp8_linear import untuned_tile as fp8_untuned_tile
from ridgeline.kernels.quantize_rows import QuantizedRows, quantize_rows
from ridgeline.kernels.rms_norm import add_norm
from ridgeline.kernels.small_linear import Ends, InputNorm
from ridgeline.kernels.stream_linear import (
    INT8,
    MOST_INT8,
    ROOM_BYTES,
    STEP_BYTES,
    Scales,
    compiles,
    groups_of,
    multiprocessors,
    stream_linear,
)
from ridgeline.kernels.tile_linear import (
    MOST_ROWS,
    OUTPUTS,
    columns_of,
    shared_bytes,
    tile_linear,
)
from ridgeline.kernels.tiles import Place, Tile, bucket, find_tile, kind_of

HOPPER = (9, 0)
DTYPE = "int8"  # in the table of tiles
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
MAX_FEW = 8  # rows that the product itself rounds
MAX_STREAMED = 16  # rounded rows that are streamed where nothing was measured
ALIGNED_OUTPUTS = 2 * OUTPUTS  # gate and up of so many outputs as are stored together
STAGES = 16  # of a ring, at most
MANY_WAVES = 8  # of tiles: then each has a program of its own
FEW_TILES = 160  # that splits still keep on a device at once


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """code * scale of its row: int8 [N, K] and [N] in float32, bfloat16 or float16."""

    codes_NK: torch.Tensor
    scale_N: torch.Tensor

    def first(self, rows: int) -> Int8Matrix:
        return Int8Matrix(self.codes_NK[:rows], self.scale_N[:rows])


@lru_cache(maxsize=16)
def has_int8(device: torch.device) -> bool:
    """The kernels run on this device."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) == HOPPER and compiles()


def fits_int8(outputs: int, inputs: int) -> bool:
    """They take a matrix of this shape."""
    return (
        outputs > 0
        and outputs % ALIGNED_OUTPUTS == 0
        and 0 < inputs <= MOST_INT8
        and inputs % STEP_BYTES == 0
    )


def int8_linear(
    x_MK: torch.Tensor,
    weight: Int8Matrix,
    *,
    norm: InputNorm | None = None,
    sum_MK: torch.Tensor | None = None,
    pdl: bool = True,
    **ends: Unpack[Ends],
) -> torch.Tensor:
    """y @ W.T + bias + residual, [M, O] in the dtype of x; if `gated`, silu of the first half times
    the second instead of the product. y is x, or rms_norm(x), or that of its sum with `sum_MK`,
    which becomes the sum. `out_MO` may be `residual_MO`."""
    check(sum_MK is None or norm is not None, "a sum is normed")
    x_MK = _in_rows(x_MK)
    gated, out_MO = ends.get("gated", False), ends.get("out_MO")
    if x_MK.shape[0] == 0:
        return _nothing(x_MK, weight, gated) if out_MO is None else out_MO
    if x_MK.shape[0] > MAX_FEW or x_MK.dtype != torch.bfloat16:
        codes = quantize_rows(x_MK, norm=norm, residual_MK=sum_MK, dtype=INT8, pdl=pdl)
        return int8_product(codes, weight, x_MK.dtype, pdl=pdl, **ends)
    if sum_MK is not None and norm is not None:
        x_MK, norm = add_norm(x_MK, sum_MK, norm.weight_K, norm.eps), None
    residual = ends.get("residual_MO") is not None
    kind = kind_of(norm=norm is not None, gated=gated, residual=residual)
    tile, scales = few_tile(x_MK.shape[0], weight, kind), Scales(weight.scale_N)
    return stream_linear(
        x_MK, weight.codes_NK, tile=tile, norm=norm, scales=scales, pdl=pdl, **ends
    )


def invariant_int8_linear(
    x_MK: torch.Tensor,
    weight: Int8Matrix,
    *,
    bias_N: torch.Tensor | None = None,
    out_MO: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same without what may stand beside it; each row, be it the only one, has one scale, and
    its bits depend on no other."""
    x_MK = _in_rows(x_MK)
    if x_MK.shape[0] == 0:
        return _nothing(x_MK, weight, False) if out_MO is None else out_MO
    rows = quantize_rows(x_MK, dtype=INT8)
    return int8_product(rows, weight, x_MK.dtype, bias_N=bias_N, out_MO=out_MO)


def int8_product(
    rows: QuantizedRows,
    weight: Int8Matrix,
    dtype: torch.dtype,
    *,
    pdl: bool = True,
    **ends: Unpack[Ends],
) -> torch.Tensor:
    """(rows @ W.T) + bias, gate and residual of the rounded numbers, [M, O] in `dtype`."""
    gated, residual_MO = ends.get("gated", False), ends.get("residual_MO")
    out_MO = ends.get("out_MO")
    count, outputs = rows.codes_MK.shape[0], weight.codes_NK.shape[0]
    width = outputs // 2 if gated else outputs
    if out_MO is None:
        out_MO = rows.scale_M.new_empty((count, width), dtype=dtype)
    kind = kind_of(gated=gated, residual=residual_MO is not None)
    for part in pieces(count):
        codes_MK, scale_M = rows.codes_MK[part], rows.scale_M[part]
        tile = rounded_tile(codes_MK.shape[0], weight, kind)
        ends["residual_MO"] = None if residual_MO is None else residual_MO[part]
        ends["out_MO"] = out_MO[part]
        product = stream_linear if tile.stream else tile_linear
        scales = Scales(weight.scale_N, scale_M)
        product(codes_MK, weight.codes_NK, tile=tile, scales=scales, pdl=pdl, **ends)
    return out_MO


def widened_linear(
    x_MK: torch.Tensor,
    weight: Int8Matrix,
    *,
    bias_N: torch.Tensor | None = None,
    out_MO: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ W.T + bias with x as it is, on any GPU of NVIDIA: few rows by the kernel in Triton that
    `fp8_linear` has for them, more by the library, some rows of W after the other."""
    matrix, rows = Fp8Matrix(weight.codes_NK, weight.scale_N), x_MK.shape[0]
    if not 0 < rows <= MAX_UNTUNED_ROWS:
        return by_tiles(x_MK, matrix, bias_N, out_MO)
    tile = fp8_untuned_tile(rows, *weight.codes_NK.shape)
    return fp8_by_tile(x_MK, matrix, tile, bias_N=bias_N, out_MO=out_MO)


def pieces(rows: int) -> Iterator[slice]:
    """As many rows as one launch takes at once."""
    for begin in range(0, rows, MOST_ROWS):
        yield slice(begin, min(rows, begin + MOST_ROWS))


def few_tile(rows: int, weight: Int8Matrix, kind: str) -> Tile:
    """Of rows that nobody has rounded."""
    tile = _measured(rows, weight, kind)
    return (
        tile if tile is not None and tile.stream else _untuned_tile(rows, weight, kind, stream=True)
    )


def rounded_tile(rows: int, weight: Int8Matrix, kind: str) -> Tile:
    """Of rows in int8; measured for up to 8 of them as well, where deterministic serving asks."""
    tile = _measured(rows, weight, kind)
    return tile or _untuned_tile(rows, weight, kind, stream=rows <= MAX_STREAMED)


def _measured(rows: int, weight: Int8Matrix, kind: str) -> Tile | None:
    (outputs, inputs), name = weight.codes_NK.shape, _device_name(weight.codes_NK.device)
    return find_tile(Place(name, DTYPE, outputs, inputs, bucket(rows), kind))


def _untuned_tile(rows: int, weight: Int8Matrix, kind: str, *, stream: bool) -> Tile:
    outputs, inputs = weight.codes_NK.shape
    units, gated = multiprocessors(weight.codes_NK.device), "gated" in kind
    if stream:
        return untuned_stream(outputs, inputs, units, gated=gated)
    return untuned_tile(rows, outputs, inputs, units, gated=gated)


@lru_cache(maxsize=1024)
def untuned_stream(outputs: int, inputs: int, units: int, *, gated: bool) -> Tile:
    """Groups of which the busiest program has the fewest rows of W."""

    def busiest(tile: Tile) -> int:
        cut = groups_of(tile, 1, outputs, inputs, units=units, gated=gated, rounds=True)
        return cut.each * tile.block_n

    sizes = (32, 64) if gated else (32, 48, 16)
    return min((Tile(n, 64, warps=8, stages=3, stream=True) for n in sizes), key=busiest)


@lru_cache(maxsize=1024)
def untuned_tile(rows: int, outputs: int, inputs: int, units: int, *, gated: bool) -> Tile:
    """Small tiles whose steps a cluster shares, where all of them run at once; else large ones, to
    each its own program if they are many, else shared evenly; pairs of these share rows of x, if
    there are many."""
    block_m = 128 if rows > 128 else 0
    x_tiles = -(-rows // columns_of(rows, block_m))
    few = -(-outputs // 64) * x_tiles
    for splits in (4, 2, 1):
        if few * splits <= FEW_TILES and inputs >= 4 * splits * STEP_BYTES:
            tile = Tile(64, STEP_BYTES, splits, block_m=block_m, wgmma=True)
            if columns_of(rows, block_m) % (8 * splits) == 0:
                return deepest(tile, rows, gated=gated)
    tiles = -(-outputs // 128) * -(-rows // columns_of(rows))
    per_sm = 0 if tiles >= MANY_WAVES * units else 1
    cluster = 2 if rows > 128 else 1
    tile = Tile(128, STEP_BYTES, warps=8, per_sm=per_sm, cluster=cluster, wgmma=True)
    return deepest(tile, rows, gated=gated)


def deepest(tile: Tile, rows: int, *, gated: bool, room: int = ROOM_BYTES) -> Tile:
    """With as many stages as fit into `room` bytes."""
    columns, blocks = columns_of(rows, tile.block_m), tile.block_k // STEP_BYTES
    for stages in range(STAGES, 1, -1):
        made = dataclasses.replace(tile, stages=stages)
        if shared_bytes(made, columns, blocks, gated=gated) <= room:
            return made
    return dataclasses.replace(tile, stages=1)


def _in_rows(x_MK: torch.Tensor) -> torch.Tensor:
    """Rows begin at multiples of 16 bytes and are contiguous, as nearly all are."""
    row = x_MK.stride(0) * x_MK.element_size()
    if x_MK.stride(1) == 1 and (row | x_MK.data_ptr()) % 16 == 0:
        return x_MK
    return x_MK.clone(memory_format=torch.contiguous_format)


def _nothing(x_MK: torch.Tensor, weight: Int8Matrix, gated: bool) -> torch.Tensor:
    outputs = weight.codes_NK.shape[0]
    return x_MK.new_empty((0, outputs // 2 if gated else outputs))


@lru_cache(maxsize=64)
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
