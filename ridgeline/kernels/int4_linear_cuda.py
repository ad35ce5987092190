"""x @ W.T with W of 4 bits by CUDA kernels: which launches are there, and what do they need?

Three: `stream` for few rows of x (`cuda/int4_stream.cu`), `multiply_tiles` for some (the kernel of
`tile_linear`, its weights being records), and `unpack` for the library's product of many.
A `Tile` means, where it streams: groups of `block_n` rows of W, a cluster of `splits` programs
along K, rings of `stages` slots of `block_k` columns, `warps` that share K, `per_sm` programs a
multiprocessor (0: one);
else what it means in `tile_linear`, with steps of 128 numbers.
Letters: M rows, K inputs, N rows of W, O outputs: N, or N / 2 if gated.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from typing import Unpack

import torch

from ridgeline.errors import check
from ridgeline.kernels import nvrtc
from ridgeline.kernels.int4_linear_records import COLUMNS, ROWS, Form, Records
from ridgeline.kernels.launching import Workspace
from ridgeline.kernels.small_linear import Beside
from ridgeline.kernels.stream_linear import ELEMENTS, multiprocessors
from ridgeline.kernels.tile_linear import (
    BLOCK_BYTES,
    MOST_SHARED_BYTES,
    Cut,
    cut_of,
    defines_of,
    launch_tiles,
    shared_bytes,
)
from ridgeline.kernels.tiles import Tile, bucket

STREAM, UNPACK = "int4_stream.cu", "int4_unpack.cu"
MAX_STREAMED = 16  # rows
X_BYTES = 2 * COLUMNS  # of a row of x beside a record
PAD_BYTES = 16  # between rows of x in shared memory, so that eight of them have banks of their own
RING_ALIGNMENT = 1024
SUMS_BYTES = 24 << 10  # that a program holds before its warps meet, as far as that is possible
CHAINS = {32: 4, 64: 2, 128: 2}  # of products in a record, by the size of a group
SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
RECORDS_A_BLOCK = 8  # that are unpacked
MOST_THREADS = 1024  # of two programs, so that a thread has 64 registers


@dataclass(frozen=True, slots=True)
class StreamCut:
    """One launch: `groups` of rows of W, `each` a program of `Tile.splits` blocks, which meet when
    they have the sums of `held`; `columns` eights of rows of x, `kept` rows whose sums are kept."""

    width: int
    groups: int
    each: int
    held: int
    columns: int
    kept: int
    x_pitch: int
    shared_bytes: int
    resident: int


def stream(
    x_MK: torch.Tensor, records: Records, *, tile: Tile, pdl: bool = True, **beside: Unpack[Beside]
) -> torch.Tensor:
    """As `small_linear`, of x in the sixteen bits of its dtype, rows at multiples of 16 bytes.
    Weights are not rounded; adds in float32, rounds once. A norm is one of bfloat16."""
    rows, gated = x_MK.shape[0], beside.get("gated", False)
    norm, bias_N = beside.get("norm"), beside.get("bias_N")
    cut = stream_cut(
        tile,
        rows,
        records.form,
        units=multiprocessors(x_MK.device),
        gated=gated,
        norm=norm is not None,
    )
    check(norm is None or x_MK.dtype == torch.bfloat16, "only bfloat16 is normed inside")
    y_MO, residual_MO = _ends(x_MK, cut.width, beside)
    defines = stream_defines(
        tile, cut, records.form, x_MK.dtype, gated=gated, norm=norm is not None,
        residual=residual_MO is not None, bias=bias_N is not None, pdl=pdl,
    )  # fmt: skip
    kernel = nvrtc.kernel(STREAM, "int4_stream", defines, x_MK.device)
    nvrtc.allow_shared(kernel, cut.shared_bytes)
    kernel.launch(
        (-(-cut.groups // cut.each) * tile.splits, 1, 1),
        tile.warps * 32,
        cut.shared_bytes,
        [
            records.bytes_RCB, x_MK, y_MO, y_MO if residual_MO is None else residual_MO,
            y_MO if bias_N is None else bias_N, y_MO if norm is None else norm.weight_K,
            ctypes.c_int32(rows), ctypes.c_int32(cut.width // ROWS),
            ctypes.c_int32(records.form.along_k), ctypes.c_int32(cut.groups),
            ctypes.c_int32(cut.each), ctypes.c_int32(cut.held), ctypes.c_int32(cut.x_pitch),
            ctypes.c_uint64(x_MK.stride(0) * 2),
            ctypes.c_uint64(0 if residual_MO is None else residual_MO.stride(0)),
            ctypes.c_uint64(y_MO.stride(0)), ctypes.c_float(0.0 if norm is None else norm.eps),
        ],
        pdl=pdl,
        cluster=tile.splits,
    )  # fmt: skip
    return y_MO


def stream_cut(
    tile: Tile, rows: int, form: Form, *, units: int, gated: bool = False, norm: bool = False
) -> StreamCut:
    """How `tile` cuts a product on `units` multiprocessors; a fault if it cannot."""
    tiles, rest = divmod(tile.block_n, ROWS)
    check(rest == 0 and tiles > 0, "whole tiles of rows", block_n=tile.block_n)
    check(not gated or tiles % 2 == 0, "tiles of gate and up are pairs", block_n=tile.block_n)
    check(0 < rows <= MAX_STREAMED, "few rows of x", rows=rows)
    check(tile.splits in (1, 2, 4, 8), "a cluster along K", splits=tile.splits)
    width = form.outputs // 2 if gated else form.outputs
    check(width % ROWS == 0, "whole records of outputs", outputs=width)
    groups = -(-width // (tile.block_n // 2 if gated else tile.block_n))
    programs = max(1, units * max(1, tile.per_sm) // tile.splits)
    deep = deep_of(tile, form)
    x_pitch = -(-form.along_k // deep // tile.splits) * deep * X_BYTES + PAD_BYTES
    kept = bucket(rows)
    sums = tile.block_n * (kept + 1 if kept > 1 else 1) * 4  # of a group
    of_all = (tile.warps + int(tile.splits > 1)) * sums
    each = -(-groups // programs)
    held = each if each * of_all <= SUMS_BYTES else max(1, SUMS_BYTES // 2 // of_all)
    shared = tile.warps * tile.stages * (tiles * deep * form.record_bytes + 8)
    shared += (held if held == each else 2 * held) * of_all + tile.warps * kept * 4 + PAD_BYTES
    shared += (rows + int(norm)) * x_pitch
    columns = -(-rows // 8)
    sums_of_x = CHAINS[form.group] * columns * 8 * 4
    shared += -(-form.along_k // deep // tile.splits) * deep * sums_of_x
    check(shared <= MOST_SHARED_BYTES, "a ring and x fit into shared memory", bytes=shared)
    fits_twice = 2 * shared <= MOST_SHARED_BYTES and 2 * tile.warps * 32 <= MOST_THREADS
    fits_twice &= tiles * columns * tile.warps <= 32  # or there are too few registers
    return StreamCut(
        width=width, groups=groups, each=each, held=held, columns=columns, kept=kept,
        x_pitch=x_pitch, shared_bytes=shared, resident=2 if fits_twice else 1,
    )  # fmt: skip


def deep_of(tile: Tile, form: Form) -> int:
    """Records in a slot, one after the other along K: as `block_k` says, where that divides K."""
    return math.gcd(tile.block_k // COLUMNS, form.along_k)


def stream_defines(
    tile: Tile, cut: StreamCut, form: Form, dtype: torch.dtype, *, gated: bool = False,
    norm: bool = False, residual: bool = False, bias: bool = False, pdl: bool = True,
) -> dict[str, int | str]:  # fmt: skip
    """What the source is compiled with; `dtype` of x."""
    return {
        **record_defines(form, dtype),
        "COLUMNS": cut.columns,
        "KEPT": cut.kept,
        "TILES": tile.block_n // ROWS,
        "DEEP": deep_of(tile, form),
        "SLOTS": tile.stages,
        "SPLITS": tile.splits,
        "WARPS": tile.warps,
        "RESIDENT": cut.resident,
        "NORM": int(norm),
        "GATED": int(gated),
        "RESIDUAL": int(residual),
        "BIAS": int(bias),
        "DEPENDENT": int(pdl),
    }


def multiply_tiles(
    x_MK: torch.Tensor,
    records: Records,
    *,
    tile: Tile,
    workspace: Workspace | None = None,
    pdl: bool = True,
    **beside: Unpack[Beside],
) -> torch.Tensor:
    """As `tile_linear`, without a norm. Weights are (code - zero) * scale, rounded to the dtype of
    x, which is exact or rounded once; adds in float32, rounds once."""
    rows, gated = x_MK.shape[0], beside.get("gated", False)
    check(beside.get("norm") is None, "there is no norm in this kernel")
    bias_N = beside.get("bias_N")
    cut = tiles_cut(tile, rows, records.form, units=multiprocessors(x_MK.device), gated=gated)
    y_MO, residual_MO = _ends(x_MK, cut.width, beside)
    defines = tiles_defines(
        tile, cut, records.form, x_MK.dtype, gated=gated, residual=residual_MO is not None,
        bias=bias_N is not None, pdl=pdl,
    )  # fmt: skip
    return launch_tiles(
        records_map(records, tile, gated=gated), x_MK, y_MO, tile=tile, cut=cut, defines=defines,
        bias_N=bias_N, residual_MO=residual_MO, workspace=workspace, pdl=pdl,
    )  # fmt: skip


def records_map(records: Records, tile: Tile, *, gated: bool) -> nvrtc.TensorMap:
    """Boxes of `block_n` rows and one step, in numbers of 8 bytes; gated: half of the rows are of
    gate, and then come those of up."""
    form, halves = records.form, 1 + int(gated)
    size, sixteens = form.record_bytes, form.sixteens // halves
    return nvrtc.tensor_map(
        records.bytes_RCB.data_ptr(),
        torch.int64,
        (size // 8, form.along_k, sixteens, 2)[: 3 + int(gated)],
        (size, form.along_k * size, sixteens * form.along_k * size)[: 2 + int(gated)],
        (size // 8, 1, tile.block_n // ROWS // halves, 2)[: 3 + int(gated)],
        nvrtc.AS_THEY_ARE,
    )


def tiles_cut(tile: Tile, rows: int, form: Form, *, units: int, gated: bool = False) -> Cut:
    """As `cut_of` of `tile_linear`: a fault where the kernel cannot cut so."""
    check(tile.block_k == COLUMNS, "steps of a record", block_k=tile.block_k)
    outputs = form.outputs
    cut = cut_of(tile, rows, outputs, form.inputs, item=2, units=units, gated=gated)
    width = outputs // 2 if gated else outputs
    check(width % ROWS == 0, "whole records of outputs", outputs=width)
    weights = tile.block_n // ROWS * form.record_bytes
    weights = -(-weights // RING_ALIGNMENT) * RING_ALIGNMENT
    whole = shared_bytes(tile, cut.columns, cut.blocks, gated=gated)
    spared = tile.stages * (cut.blocks * tile.block_n * BLOCK_BYTES - weights)
    ring = tile.stages * (weights + cut.blocks * cut.columns * BLOCK_BYTES)
    fits = tile.splits == 1 or ring >= tile.block_n * cut.columns * 4
    check(fits, "sums of a tile fit into the ring", ring=ring)
    check(whole - spared <= MOST_SHARED_BYTES, "stages fit into shared memory", bytes=whole)
    return replace(cut, shared_bytes=whole - spared)


def tiles_defines(
    tile: Tile, cut: Cut, form: Form, dtype: torch.dtype, *, gated: bool = False,
    residual: bool = False, bias: bool = False, pdl: bool = True,
) -> dict[str, int | str]:  # fmt: skip
    """What `tile_linear.cu` is compiled with; `dtype` of x."""
    known = defines_of(
        tile, cut, dtype, dtype, gated=gated, residual=residual, bias=bias, pdl=pdl
    )  # fmt: skip
    return {**known, **record_defines(form, dtype), "PACKED": 1}


def unpack(records: Records, dtype: torch.dtype, begin: int, end: int) -> torch.Tensor:
    """Rows `begin` to before `end` of W in `dtype`, both multiples of 16: [end - begin, K], bit for
    bit those of `QuantizedMatrix.dequantize`, rounded."""
    form, device = records.form, records.bytes_RCB.device
    check(begin % ROWS == end % ROWS == 0, "whole records of rows", begin=begin, end=end)
    out_NK = torch.empty(end - begin, form.inputs, dtype=dtype, device=device)
    kernel = nvrtc.kernel(UNPACK, "int4_unpack", record_defines(form, dtype), device)
    total = (end - begin) // ROWS * form.along_k
    kernel.launch(
        (-(-total // RECORDS_A_BLOCK), 1, 1),
        RECORDS_A_BLOCK * 32,
        0,
        [
            records.bytes_RCB[begin // ROWS :],
            out_NK,
            ctypes.c_int32(form.along_k),
            ctypes.c_int32(total),
            ctypes.c_uint64(form.inputs),
        ],
    )
    return out_NK


def record_defines(form: Form, dtype: torch.dtype) -> dict[str, int | str]:
    return {
        "ELEMENT": ELEMENTS[dtype],
        "SCALE": SCALES[form.scale_dtype],
        "GROUP": form.group,
        "ZERO": int(form.has_zero),
    }


def _ends(
    x_MK: torch.Tensor, width: int, beside: Beside
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y and the residual."""
    out_MO, residual_MO = beside.get("out_MO"), beside.get("residual_MO")
    y_MO = x_MK.new_empty((x_MK.shape[0], width)) if out_MO is None else out_MO
    ends = [t for t in (beside.get("bias_N"), residual_MO, y_MO) if t is not None]
    check(all(t.dtype == x_MK.dtype for t in ends), "y and what is added have the dtype of x")
    return y_MO, residual_MO
