"""x @ W.T with W in e4m3 and one scale for each of its rows.

For a few rows of x reading W is the time, and one kernel does all: up to `MAX_STREAMED` rows the
CUDA kernel of `stream_linear`, which rounds x to e4m3 as it goes, in pieces of 128; or for one row
a Triton kernel that leaves x as it is and widens W. Of more, the rows become e4m3 first
(`quantize_rows`), and tensor cores multiply in it, by our kernels or by the library's. A device
that has no e4m3 gets W back in the dtype of x, a tile at a time.
Letters: M rows, K inputs, N outputs; W the width of x: 2 * K where it is gate and up, else K.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Unpack

import torch
from torch.nn import functional

from ridgeline.errors import check
from ridgeline.kernels.launching import Workspace
from ridgeline.kernels.quantize_rows import QuantizedRows, has_e4m3, quantize_rows
from ridgeline.kernels.rms_norm import add_norm, rms_norm
from ridgeline.kernels.silu_mul import silu_mul
from ridgeline.kernels.small_linear import Beside, Ends, InputNorm, multiply_into
from ridgeline.kernels.stream_linear import Scales, can_stream, stream_linear
from ridgeline.kernels.tile_linear import can_tile, tile_linear
from ridgeline.kernels.tiles import MAX_TILED, Place, Tile, bucket, find_tile, is_measured, kind_of

# Measured on an H200 with the weights of an 8B model, each product over weights that are not in
# the L2 cache, in us; streams with norm, gate and residual inside / rows in e4m3 by the Triton
# kernel (and 1.0 to 1.9 us for each rounding of x beside it):
#     rows       qkv          o         gate_up        down
#        1   7.7 /  9.4   5.7 / 6.8   31.1 / 30.9   15.4 / 17.3
#        8   8.3 /  9.5   6.2 / 6.9   31.9 / 32.0   16.0 / 17.5
# Streams that round more rows were not measured. The library, which never shares K between
# programs, takes
#      128      13.9         13.6          35.5          36.9
#      256      14.3         13.8          50.4          37.2
# so a table entry of ours may win there; without one it is left to the library.
MAX_FEW = 1  # rows up to which one kernel does all
MAX_STREAMED = 8  # the same where W is streamed
MAX_UNTUNED_ROWS = 64  # rows up to which our kernel is chosen where nothing was measured
MAX_OWN = 256  # rows that our kernel in Triton takes
ALIGNMENT = 16  # of K and N in products of e4m3
TILE_NUMBERS = {"cpu": 1 << 18}  # of W that are turned back at once where there is no e4m3
MANY_NUMBERS = 1 << 22  # the same on all other devices
MULTIPROCESSORS = 132  # of an H100 or H200, for the default choice of splits
LARGE_M = 16384  # rows of W that keep a device busy with small programs
DTYPE = "float8_e4m3fn"  # in the table of tiles
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
UNTUNED_STREAM = Tile(32, 64, warps=8, stages=3, stream=True)


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """code * scale of its row: e4m3, rows contiguous, and float32."""

    codes_NK: torch.Tensor
    scale_N: torch.Tensor


def fp8_linear(
    x_MW: torch.Tensor,
    weight: Fp8Matrix,
    *,
    silu: bool = False,
    norm: InputNorm | None = None,
    sum_MK: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    pdl: bool | None = None,
    **ends: Unpack[Ends],
) -> torch.Tensor:
    """y @ W.T + bias + residual, [M, O] in the dtype of x, accumulated in float32; if `gated`,
    silu of the first half times the second instead of the product. y is x, or silu(gate) * up
    where x is gate and up; or rms_norm(x), where `sum_MK` is given of its sum with x, which it
    becomes. `out_MO` may be `residual_MO`; without `workspace` the one of the device is used."""
    check(not silu or norm is None, "the input is gated or normed, not both")
    check(sum_MK is None or norm is not None, "a sum is normed")
    rows = x_MW.shape[0]
    if rows == 0 or not takes_e4m3(x_MW, weight):
        y_MN = by_tiles(_plain_input(x_MW, silu, norm, sum_MK), weight, ends.get("bias_N"))
        return _ended(y_MN, **ends)
    if keeps_rows(x_MW, weight):
        x_MK, norm = _few_rows(x_MW, silu, norm, sum_MK, pdl)
        gated, residual = ends.get("gated", False), ends.get("residual_MO") is not None
        tile = _few_tile(x_MK, weight, kind_of(norm=True, gated=gated, residual=residual))
        if norm is None or tile is None:
            x_MK = x_MK if norm is None else rms_norm(x_MK, norm.weight_K, norm.eps)
            norm = None
            tile = _few_tile(x_MK, weight, kind_of(gated=gated, residual=residual))
        tile = tile or untuned_tile(rows, *weight.codes_NK.shape)
        return fp8_by_tile(x_MK, weight, tile, norm=norm, workspace=workspace, pdl=pdl, **ends)
    codes = quantize_rows(x_MW, silu=silu, norm=norm, residual_MK=sum_MK, pdl=pdl)
    return fp8_product(codes, weight, x_MW.dtype, workspace=workspace, pdl=pdl, **ends)


def fp8_by_tile(
    x_MK: torch.Tensor,
    weight: Fp8Matrix,
    tile: Tile,
    *,
    workspace: Workspace | None = None,
    pdl: bool | None = None,
    **beside: Unpack[Beside],
) -> torch.Tensor:
    """The same of rows that nobody has rounded, by one of our kernels, cut by `tile`."""
    if tile.stream:
        scales, early = Scales(weight.scale_N), pdl is not False
        return stream_linear(x_MK, weight.codes_NK, tile=tile, scales=scales, pdl=early, **beside)
    from ridgeline.kernels.fp8_linear_triton import fp8_linear_triton

    return fp8_linear_triton(x_MK, weight, tile=tile, workspace=workspace, pdl=pdl, **beside)


def keeps_rows(x_MW: torch.Tensor, weight: Fp8Matrix) -> bool:
    """So few rows that they are not rounded before the product."""
    rows = x_MW.shape[0]
    return rows <= MAX_FEW or (rows <= MAX_STREAMED and can_stream(x_MW, weight.codes_NK))


def _few_tile(x_MK: torch.Tensor, weight: Fp8Matrix, kind: str) -> Tile | None:
    """Of rows that nobody has rounded. Several are multiplied by streams alone."""
    rows, (outputs, inputs) = x_MK.shape[0], weight.codes_NK.shape
    place = Place(_device_name(x_MK.device), DTYPE, outputs, inputs, bucket(rows), kind)
    tile = find_tile(place)
    if tile is not None and tile.stream and not can_stream(x_MK, weight.codes_NK):
        tile = None
    if rows == 1 or (tile is not None and tile.stream):
        return tile
    return None if "norm" in kind else UNTUNED_STREAM


def fp8_product(
    rows: QuantizedRows,
    weight: Fp8Matrix,
    dtype: torch.dtype,
    *,
    workspace: Workspace | None = None,
    pdl: bool | None = None,
    **ends: Unpack[Ends],
) -> torch.Tensor:
    """(rows @ W.T) + bias, gate and residual of the rounded numbers, [M, O] in `dtype`; the
    library's product is rounded to bfloat16 before that. Sizes as `takes_e4m3` wants them."""
    gated, early = ends.get("gated", False), pdl is not False
    scales = Scales(weight.scale_N, rows.scale_M)
    kind = kind_of(gated=gated, residual=ends.get("residual_MO") is not None)
    tile = _own_tile(rows.codes_MK.shape[0], weight, kind)
    if tile is not None and tile.stream:
        if can_stream(rows.codes_MK, weight.codes_NK):
            return stream_linear(
                rows.codes_MK, weight.codes_NK, tile=tile, scales=scales, dtype=dtype, pdl=early,
                **ends,
            )  # fmt: skip
        tile = untuned_tile(rows.codes_MK.shape[0], *weight.codes_NK.shape)
    if tile is not None and tile.wgmma:
        if can_tile(rows.codes_MK, weight.codes_NK, gated=gated):
            return tile_linear(
                rows.codes_MK, weight.codes_NK, tile=tile, scales=scales, dtype=dtype, pdl=early,
                **ends,
            )  # fmt: skip
        tile = None
    if tile is not None:
        from ridgeline.kernels.fp8_linear_triton import fp8_linear_triton

        return fp8_linear_triton(
            rows.codes_MK, weight, tile=tile, x_scale_M=rows.scale_M, dtype=dtype,
            workspace=workspace, pdl=pdl, **ends,
        )  # fmt: skip
    y_MN, bias_N = library_product(rows, weight).to(dtype), ends.get("bias_N")
    return _ended(y_MN if bias_N is None else y_MN.add_(bias_N), **ends)


def library_product(
    rows: QuantizedRows, weight: Fp8Matrix, use_fast_accum: bool = True
) -> torch.Tensor:
    """In bfloat16."""
    return torch._scaled_mm(
        rows.codes_MK,
        weight.codes_NK.T,
        rows.scale_M[:, None],
        weight.scale_N[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=use_fast_accum,
    )


def dequantize_rows(weight: Fp8Matrix) -> torch.Tensor:
    """[N, K] float32."""
    return weight.codes_NK.float().mul_(weight.scale_N[:, None])


def takes_e4m3(x_MW: torch.Tensor, weight: Fp8Matrix) -> bool:
    """Both kernels for e4m3 run here, on these shapes, in this dtype."""
    aligned = all(size % ALIGNMENT == 0 and size > 0 for size in weight.codes_NK.shape)
    return aligned and x_MW.dtype in SIXTEEN_BITS and has_e4m3(x_MW.device)


def _plain_input(
    x_MW: torch.Tensor, silu: bool, norm: InputNorm | None, sum_MK: torch.Tensor | None
) -> torch.Tensor:
    if silu:
        return silu_mul(x_MW)
    x_MK = x_MW if sum_MK is None else sum_MK.add_(x_MW)
    return x_MK if norm is None else rms_norm(x_MK, norm.weight_K, norm.eps)


def _few_rows(
    x_MW: torch.Tensor,
    silu: bool,
    norm: InputNorm | None,
    sum_MK: torch.Tensor | None,
    pdl: bool | None,
) -> tuple[torch.Tensor, InputNorm | None]:
    """What a product of a few rows takes in itself is the norm alone."""
    if silu:
        return silu_mul(x_MW, pdl=pdl), None
    if sum_MK is None or norm is None:
        return x_MW, norm
    return add_norm(x_MW, sum_MK, norm.weight_K, norm.eps), None


def _ended(y_MN: torch.Tensor, **ends: Unpack[Ends]) -> torch.Tensor:
    """A product that has its bias, by kernels of their own."""
    residual_MO, out_MO = ends.get("residual_MO"), ends.get("out_MO")
    y_MO = silu_mul(y_MN) if ends.get("gated", False) else y_MN
    y_MO = y_MO if residual_MO is None else y_MO.add_(residual_MO)
    return y_MO if out_MO is None else out_MO.copy_(y_MO)


def by_tiles(
    x_MK: torch.Tensor,
    weight: Fp8Matrix,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor | None = None,
) -> torch.Tensor:
    """Into `out_MN`, if it is given, of the dtype of x or float32; without a bias then."""
    outputs, inputs = weight.codes_NK.shape
    step = max(1, TILE_NUMBERS.get(x_MK.device.type, MANY_NUMBERS) // max(1, inputs))
    if out_MN is None and outputs <= step:
        return functional.linear(x_MK, dequantize_rows(weight).to(x_MK.dtype), bias_N)
    check(out_MN is None or bias_N is None, "no bias is added to what is given")
    y_MN = x_MK.new_empty((x_MK.shape[0], outputs)) if out_MN is None else out_MN
    for begin in range(0, outputs, step):
        part = slice(begin, begin + step)
        tile = dequantize_rows(Fp8Matrix(weight.codes_NK[part], weight.scale_N[part]))
        if bias_N is None:
            multiply_into(x_MK, tile.to(x_MK.dtype), y_MN[:, part])
        else:
            y_MN[:, part] = functional.linear(x_MK, tile.to(x_MK.dtype), bias_N[part])
    return y_MN


def adds_to_residual(rows: int, weight: Fp8Matrix) -> bool:
    """Our kernel multiplies this many rows, so that a residual costs no kernel of its own."""
    return _own_tile(rows, weight, kind_of(residual=True)) is not None


def _own_tile(rows: int, weight: Fp8Matrix, kind: str) -> Tile | None:
    """None: the library multiplies."""
    device = weight.codes_NK.device
    if rows > MAX_TILED or device.type != "cuda":
        return None
    return _tile(rows, weight, kind)


def _tile(rows: int, weight: Fp8Matrix, kind: str) -> Tile | None:
    outputs, inputs = weight.codes_NK.shape
    return choose_tile(rows, outputs, inputs, _device_name(weight.codes_NK.device), kind)


def choose_tile(rows: int, outputs: int, inputs: int, device: str, kind: str) -> Tile | None:
    """What the table says, be it None; where it says nothing a guess, None for many rows."""
    place = Place(device, DTYPE, outputs, inputs, bucket(rows), kind)
    if is_measured(place):
        return find_tile(place)
    return untuned_tile(rows, outputs, inputs) if rows <= MAX_UNTUNED_ROWS else None


def untuned_tile(rows: int, outputs: int, inputs: int) -> Tile:
    """One row: 16 bytes of W for each thread along K, and small programs if they are many anyway.
    More: two programs a multiprocessor, if each still has two tiles of K to read."""
    if rows == 1:
        warps = 1 if outputs >= LARGE_M else 4
        return Tile(4, 512 * warps, warps=warps, stages=1, dot=False)
    block_n, block_k, splits = 64, 256, 1
    programs = -(-outputs // block_n)
    while 2 * splits * programs <= 2 * MULTIPROCESSORS and inputs >= 4 * splits * block_k:
        splits *= 2
    return Tile(block_n, block_k, splits)


@lru_cache(maxsize=64)
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
