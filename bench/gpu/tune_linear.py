"""Which way of cutting each linear layer of a decode step is the fastest here, and by how much?

    PYTHONPATH=. python3 bench/gpu/tune_linear.py --out DIR [--model 8B] [--rows 1,32]
        [--budget-s 200] [--jobs 14] [--no-norm] [--no-pdl] [--dry] [--fp8] [--int8] [--streams]

Child processes first compile every candidate and check it against float32 on fresh random numbers;
then one of them times those that are right, alone, by replays of a graph that goes over copies of
the weights which together exceed the L2 cache. A child that a bad candidate kills is replaced.
DIR gets rows.jsonl (every measurement and failure), tiles.json (the table of the package with what
was found here) and the children's logs. Compiled kernels are shared through Triton's cache. The
library is timed with the kernels that it needs beside its product; "cuBLAS" is its product alone.
TB/s counts the weights only.
`--int8`: weights in int8. The library is its bfloat16 product of as many rows, with what it needs
beside it; "int_mm" its product of int8, in whole numbers and with nothing beside.
`--fp8`: weights in e4m3, of up to 256 rows. The library is `_scaled_mm` with a scale for each row,
its rounding of x not counted; what it does with other options is shown behind the line.
`--streams`: only the CUDA kernels, beside the library and what the table has.
Of many rows the norm is a kernel of its own, which adds the product before it too: the library's
addition then counts as what that costs it more.
`--dry`: tiny layers in Triton's interpreter on the CPU, with a wrong candidate planted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ridgeline.kernels import int8_linear as of_int8
from ridgeline.kernels.fp8_linear import DTYPE, MAX_STREAMED, Fp8Matrix, library_product
from ridgeline.kernels.launching import Workspace, make_workspace
from ridgeline.kernels.quantize_rows import (
    E4M3,
    INT8,
    LARGEST,
    QuantizedRows,
    quantize_rows,
    quantize_rows_reference,
)
from ridgeline.kernels.rms_norm import rms_norm
from ridgeline.kernels.silu_mul import silu_mul
from ridgeline.kernels.small_linear import InputNorm, linear_by_tile
from ridgeline.kernels.stream_linear import MAX_ROWS as STREAM_ROWS
from ridgeline.kernels.stream_linear import ROOM_BYTES, Scales, groups_of, stream_linear
from ridgeline.kernels.tile_linear import (
    columns_of,
    shared_bytes,
    tile_linear,
    tile_workspace,
)
from ridgeline.kernels.tiles import (
    FILE,
    MAX_ROWS,
    Place,
    Tile,
    bucket,
    kind_of,
    read_tiles,
    write_tiles,
)
from tests.kernels.references import fp8_linear_reference, rounded_reference, small_linear_reference

Row = dict[str, Any]  # of rows.jsonl
PACKAGE_TABLE = Path(__file__).resolve().parents[2] / "ridgeline" / "kernels" / FILE
ROWS = (1, 32, 8, 128, 256, 64, 16, 2, 4)
ADDITION_US = 0.7  # of a norm that adds a residual too; a guess from its bytes
NORM_US = 1.8  # of a norm as a kernel of its own; one inside a product must be worth it
NORM_ROWS = 32  # above, the norm is a kernel of its own
BEYOND_L2_BYTES = 256 << 20
REPLAY_BYTES = 2 << 30  # of one replay: half a millisecond
REPLAYS = 7
MARGIN = 0.99  # of the library's time, which ours must be below
LIMIT_NORM, LIMIT_WORST = 5e-3, 2e-2  # relative error in the mean, and in the worst place
TOO_LARGE = "the workspace is large enough", "OutOfResources", "bytes of shared memory"
LIMIT_FP8 = 8e-3  # products of e4m3 are added up with about 14 bits
LOGIT_ROWS = 256  # that need logits at once


@dataclass(frozen=True, slots=True)
class Layer:
    """W is [outputs, inputs]; `norm`: in a model the rows of x are normed just before."""

    model: str
    name: str
    outputs: int
    inputs: int
    gated: bool = False
    residual: bool = False
    norm: bool = False
    fp8: bool = False
    int8: bool = False

    @property
    def is_coded(self) -> bool:
        return self.fp8 or self.int8

    @property
    def kind(self) -> str:
        return kind_of(norm=self.norm, gated=self.gated, residual=self.residual)


@dataclass(frozen=True, slots=True)
class Trial:
    layer: Layer
    rows: int
    tile: Tile
    spoilt: bool = False  # a planted error, to see that it is found


LAYERS = (
    Layer("8B", "qkv", 6144, 4096, norm=True),
    Layer("8B", "o", 4096, 4096, residual=True),
    Layer("8B", "gate_up", 28672, 4096, gated=True, norm=True),
    Layer("8B", "down", 4096, 14336, residual=True),
    Layer("8B", "lm_head", 128256, 4096, norm=True),
    Layer("0.6B", "qkv", 4096, 1024, norm=True),
    Layer("0.6B", "o", 1024, 2048, residual=True),
    Layer("0.6B", "gate_up", 6144, 1024, gated=True, norm=True),
    Layer("0.6B", "down", 1024, 3072, residual=True),
    Layer("0.6B", "lm_head", 151936, 1024, norm=True),
    # Of Qwen3-4B and Llama-3.2-1B: what a rule for all other sizes was made from.
    Layer("4B", "qkv", 6144, 2560, norm=True),
    Layer("4B", "o", 2560, 4096, residual=True),
    Layer("4B", "gate_up", 19456, 2560, gated=True, norm=True),
    Layer("4B", "down", 2560, 9728, residual=True),
    Layer("1B", "qkv", 3072, 2048, norm=True),
    Layer("1B", "o", 2048, 2048, residual=True),
    Layer("1B", "gate_up", 16384, 2048, gated=True, norm=True),
    Layer("1B", "down", 2048, 8192, residual=True),
    # The bundled model for chats, and the one that guesses for it.
    Layer("demo", "qkv", 640, 384, norm=True),
    Layer("demo", "o", 384, 384, residual=True),
    Layer("demo", "gate_up", 2304, 384, gated=True, norm=True),
    Layer("demo", "down", 384, 1152, residual=True),
    Layer("demo", "lm_head", 4096, 384, norm=True),
    Layer("draft", "qkv", 320, 192, norm=True),
    Layer("draft", "o", 192, 192, residual=True),
    Layer("draft", "gate_up", 768, 192, gated=True, norm=True),
    Layer("draft", "down", 192, 384, residual=True),
    Layer("draft", "lm_head", 4096, 192, norm=True),
)
MODELS = tuple(dict.fromkeys(layer.model for layer in LAYERS))
DRY_LAYERS = (Layer("dry", "o", 24, 32, residual=True), Layer("dry", "up", 16, 32, gated=True))


def vector(block_n: int, warps: int, stages: int, **more: Any) -> Tile:
    """A load of 16 bytes of bfloat16 for each thread along K: x then needs no exchange."""
    return Tile(block_n, 256 * warps, warps=warps, stages=stages, dot=False, **more)


VECTORS = (
    vector(8, 4, 1),
    vector(4, 4, 1),
    vector(8, 1, 1),
    vector(4, 2, 1),
    vector(8, 4, 3),
    vector(16, 2, 4),
    vector(8, 4, 1, splits=2),
    vector(8, 4, 1, per_sm=4),
    vector(8, 4, 4, per_sm=3),
    vector(8, 4, 1, ahead=4),
    Tile(64, 128, stages=5, per_sm=2, ahead=4),
    Tile(64, 128, stages=5, per_sm=2, tma=True),
)
FEW = (
    Tile(64, 128, stages=5, per_sm=2),
    Tile(64, 128, stages=5, per_sm=2, ahead=4),
    Tile(64, 128, stages=5, per_sm=2, tma=True),
    Tile(64, 128, stages=5, per_sm=2, least_rows=8),
    Tile(64, 128, stages=3, per_sm=3),
    Tile(64, 128, stages=5),
    Tile(64, 128, stages=5, splits=2),
    Tile(64, 128, stages=5, splits=4),
    Tile(64, 256, stages=4, per_sm=1, tma=True),
    Tile(128, 64, stages=5, per_sm=2, tma=True),
    Tile(32, 256, stages=4, splits=2, least_rows=8),
    Tile(64, 128, stages=5, per_sm=2, early=False),
)
MANY = (
    Tile(64, 128, stages=3, per_sm=2),
    Tile(64, 128, stages=3, per_sm=2, ahead=4),
    Tile(64, 128, stages=3, per_sm=2, tma=True),
    Tile(64, 64, stages=6, per_sm=2, tma=True),
    Tile(64, 128, stages=3),
    Tile(64, 128, stages=3, splits=2),
    Tile(64, 128, stages=3, splits=4),
    Tile(128, 64, stages=4),
    Tile(128, 64, stages=4, splits=4),
    Tile(128, 64, stages=4, splits=8, tma=True),
    Tile(128, 128, stages=4, per_sm=1, tma=True, warps=8),
    Tile(128, 64, stages=4, per_sm=2),
)


def stream(block_n: int, stages: int, splits: int = 1, **more: Any) -> Tile:
    return Tile(block_n, 64, splits=splits, stages=stages, **{"warps": 8, "stream": True} | more)


STREAMS = (
    stream(16, 4),
    stream(16, 4, 2),
    stream(32, 2),
    stream(32, 3),
    stream(32, 3, 2),
    stream(48, 2),
    stream(48, 3),
    stream(64, 2),
    stream(64, 3),
    stream(64, 2, 2),
    stream(16, 3, per_sm=2),
    stream(16, 2, warps=16),
    stream(32, 2, warps=16),
    stream(32, 3, warps=16),
    stream(32, 2, 2, warps=16),
    stream(64, 2, warps=4, per_sm=2),
    stream(96, 2),
    stream(128, 2, warps=4),
)
HALF_BYTES = ROOM_BYTES // 2 - (2 << 10)  # the next kernel finds room beside this one
MULTIPROCESSORS = 132  # of an H200
LEAST_BLOCKS, MOST_BLOCKS = 30, 264  # of a launch where a tile has its own
FEW_OUTPUTS = 1024  # so few tiles that four blocks share one


def tiled(layer: Layer, rows: int) -> Iterator[Tile]:
    """Of the kernel for some rows; as many stages as fit, in all of the memory or half of it."""
    item, is_few = (1 if layer.is_coded else 2), rows <= 64

    def of(block_n: int, *, half: bool = False, wide: int = 1, **more: Any) -> Iterator[Tile]:
        base = Tile(block_n, wide * 128 // item, warps=block_n // 16, wgmma=True, **more)
        columns = columns_of(rows, base.block_m)
        tiles = -(-layer.outputs // block_n) * -(-rows // columns)
        blocks = 0 if base.per_sm else tiles * base.splits
        room = HALF_BYTES if half or blocks > MULTIPROCESSORS else ROOM_BYTES
        fits = columns % (8 * base.splits) == layer.inputs % base.block_k == 0
        if fits and (base.per_sm or LEAST_BLOCKS <= blocks <= MOST_BLOCKS):
            yield from deepest(base, columns, wide, layer.gated, room)

    yield from of(128, per_sm=1)
    if is_few:
        yield from of(128, wide=2, per_sm=1)
        yield from of(64, half=True, per_sm=2)
    else:
        yield from of(128, per_sm=1, cluster=2)
    for splits in (1, 2, 4) if layer.outputs <= FEW_OUTPUTS else (1, 2):
        yield from of(64, splits=splits)
        yield from of(64, half=True, splits=splits)
        yield from of(128, splits=splits)
        if rows > 128:
            yield from of(64, block_m=128, splits=splits)
            yield from of(128, block_m=128, splits=splits)
        if rows > 64 and layer.outputs <= FEW_OUTPUTS:
            yield from of(64, block_m=64, splits=splits)


def deepest(tile: Tile, columns: int, blocks: int, gated: bool, room: int) -> Iterator[Tile]:
    """With as many stages as fit, unless these are too few."""
    for stages in range(16, 2, -1):
        made = dataclasses.replace(tile, stages=stages)
        if shared_bytes(made, columns, blocks, gated=gated) <= room:
            yield made
            return


FP8_ROWS_TOLD = "1,32,256,128,64,8,16,2,4"


def row16(block_n: int, warps: int, stages: int, **more: Any) -> Tile:
    """The same for e4m3, which has 16 numbers in 16 bytes."""
    return Tile(block_n, 512 * warps, warps=warps, stages=stages, dot=False, **more)


FP8_VECTORS = (
    row16(4, 1, 1),
    row16(4, 2, 1),
    row16(4, 4, 1),
    row16(2, 4, 1),
    row16(8, 1, 3),
    row16(8, 2, 3),
    row16(8, 4, 3),
    row16(8, 1, 4),
    row16(8, 2, 4),
    row16(16, 1, 3),
    row16(4, 1, 4),
    row16(4, 4, 3),
    row16(4, 4, 1, splits=2),
    row16(4, 1, 1, per_sm=12),
    row16(4, 1, 1, ahead=4),
    row16(8, 1, 3, per_sm=12),
    Tile(8, 512, warps=2, stages=1, dot=False),
    Tile(16, 512, warps=4, stages=1, dot=False),
)
FP8_FEW = (
    Tile(64, 256),
    Tile(64, 256, splits=2),
    Tile(64, 256, splits=4),
    Tile(64, 256, stages=4, splits=2, tma=True),
    Tile(64, 256, stages=3, per_sm=2),
    Tile(64, 256, stages=4, per_sm=2),
    Tile(64, 256, stages=4, per_sm=2, ahead=2),
    Tile(64, 256, stages=3, per_sm=3),
    Tile(64, 256, stages=4, per_sm=2, tma=True),
    Tile(64, 512, stages=3, per_sm=1, tma=True),
    Tile(64, 128, stages=6, per_sm=2, tma=True),
    Tile(64, 128, stages=6, per_sm=3),
    Tile(128, 128, stages=5, per_sm=2, tma=True),
    Tile(128, 256, stages=4, per_sm=1, tma=True, warps=8),
    Tile(128, 256, stages=4, tma=True, warps=8),
    Tile(128, 128, stages=5, splits=4, tma=True),
)
FP8_64 = (
    Tile(64, 256),
    Tile(64, 256, splits=2),
    Tile(64, 256, splits=4),
    Tile(64, 256, stages=3, splits=2, tma=True),
    Tile(64, 256, stages=3, per_sm=2),
    Tile(64, 256, stages=3, per_sm=2, tma=True),
    Tile(64, 128, stages=4, per_sm=3),
    Tile(128, 128, stages=4, per_sm=2, tma=True),
    Tile(128, 128, stages=4, splits=2, tma=True),
    Tile(128, 128, stages=4, splits=4, tma=True),
    Tile(128, 256, stages=4, per_sm=1, tma=True, warps=8),
    Tile(128, 128, stages=4, splits=4, tma=True, warps=8),
    Tile(128, 128, stages=4, tma=True, warps=8),
    Tile(128, 128, stages=4, tma=True),
)


def wide(block_n: int, block_m: int, stages: int, splits: int = 1, **more: Any) -> Tile:
    """Wide enough that rows are not read too often from the L2 cache, which is the limit there."""
    more = {"block_k": 128, "warps": 8, "tma": True} | more
    return Tile(block_n, splits=splits, stages=stages, block_m=block_m, **more)


FP8_MANY = (
    wide(128, 128, 4),
    wide(128, 128, 4, 2),
    wide(128, 128, 4, 4),
    wide(128, 128, 6, 2),
    wide(128, 128, 3, 2, block_k=256),
    wide(128, 128, 4, 2, tma=False),
    wide(128, 256, 4),
    wide(128, 256, 4, 2),
    wide(128, 256, 4, 4),
    wide(256, 128, 4),
    wide(256, 128, 4, 4),
    wide(128, 64, 5, warps=4),
    wide(128, 64, 5, 2, warps=4),
    wide(64, 128, 5, warps=4),
    wide(64, 128, 5, 2, warps=4),
    wide(64, 128, 5, warps=4, per_sm=1),
    wide(64, 256, 4, 2),
    wide(64, 256, 4),
)
FP8_DRY = (
    Tile(8, 32, dot=False, stages=1),
    Tile(4, 32, dot=False),
    Tile(16, 32, per_sm=2),
    Tile(16, 16, splits=2, tma=True, block_m=16),
)
DRY = (
    Tile(8, 32, dot=False, stages=1),
    Tile(16, 32, per_sm=2),
    Tile(16, 16, splits=2, tma=True),
)


def candidates(layer: Layer, rows: int) -> Iterator[Tile]:
    if layer.model == "dry" and not layer.fp8:
        yield from (t for t in DRY if t.dot or rows == 1)
        return
    tiles: tuple[Tile, ...] = VECTORS if rows == 1 else FEW if rows <= 16 else MANY
    if layer.fp8:
        tiles = fp8_candidates(layer, rows)
    if rows > MAX_ROWS and not layer.fp8:
        tiles = ()
    if rows > 8 and not layer.norm:
        tiles += tuple(dict.fromkeys(tiled(layer, rows)))
    if rows <= STREAM_ROWS:
        streams = (*STREAMS, *WIDE_STREAMS) if layer.fp8 else STREAMS
        tiles += tuple(t for t in streams if not layer.gated or t.block_n % 32 == 0)
    for tile in tiles:
        if layer.inputs % tile.block_k == 0 and layer.inputs // tile.block_k >= tile.splits:
            yield tile


def fp8_candidates(layer: Layer, rows: int) -> tuple[Tile, ...]:
    if layer.model == "dry":
        return tuple(tile for tile in FP8_DRY if tile.dot == (rows > 1))
    if rows > 64:
        # A tile of all rows is one of 128 if there are no more.
        return tuple(t for t in FP8_MANY if t.block_m <= rows)
    return FP8_VECTORS if rows == 1 else FP8_64 if rows > 32 else FP8_FEW


# ---------------------------------------------------------------------- the parent


def plan(args: argparse.Namespace) -> list[Trial]:
    """The most wanted first: all layers without the norm, then with it."""
    if args.int8:
        return int8_plan(args)
    if args.fp8:
        return fp8_plan(args)
    told = args.rows.split(",") if args.rows else ROWS
    rows = [1, 3] if args.dry else [int(r) for r in told]
    layers = [x for x in (DRY_LAYERS if args.dry else LAYERS) if args.model in (None, x.model)]
    trials = [
        Trial(plain, r, tile)
        for r in rows
        for layer in layers
        for plain in [dataclasses.replace(layer, norm=False)]
        for tile in candidates(plain, r)
    ]
    if args.dry:
        return [*trials, dataclasses.replace(trials[0], spoilt=True)]
    if not args.no_norm:
        normed = [layer for layer in layers if layer.norm]
        trials += [
            Trial(x, r, t) for r in rows if r <= NORM_ROWS for x in normed for t in candidates(x, r)
        ]
    return streams_beside_known(trials) if args.streams else trials


def streams_beside_known(trials: list[Trial]) -> list[Trial]:
    """The CUDA kernel's, and of each case what the table has already."""
    known: dict[tuple[object, ...], Tile] = {}
    for place, tile in read_tiles(PACKAGE_TABLE.read_text(encoding="utf-8")).items():
        if tile is not None:
            known[place.outputs, place.inputs, place.rows, place.kind, place.dtype == DTYPE] = tile
    kept = [trial for trial in trials if trial.tile.stream or trial.tile.wgmma]
    for layer, rows in dict.fromkeys((trial.layer, trial.rows) for trial in kept):
        key = layer.outputs, layer.inputs, bucket(rows), layer.kind, layer.fp8
        if key in known and not (known[key].stream or known[key].wgmma):
            kept.append(Trial(layer, rows, known[key]))
    return kept


def fp8_plan(args: argparse.Namespace) -> list[Trial]:
    """With several rows norm and gate are in the kernel that rounds them."""
    all_rows = [1, 40] if args.dry else [int(r) for r in (args.rows or FP8_ROWS_TOLD).split(",")]
    layers = [x for x in (DRY_LAYERS if args.dry else LAYERS) if args.model in (None, x.model)]
    trials = []
    for rows, layer in ((r, x) for r in all_rows for x in layers if x.name != "lm_head"):
        kinds = [dataclasses.replace(layer, norm=False, gated=layer.gated and rows == 1, fp8=True)]
        if layer.norm and rows == 1 and not args.no_norm:
            kinds.append(dataclasses.replace(layer, fp8=True))
        trials += [Trial(kind, rows, tile) for kind in kinds for tile in candidates(kind, rows)]
        if 1 < rows <= MAX_STREAMED and (layer.gated or layer.norm):
            # Rows that are not rounded: what stands beside the product can be in its kernel.
            whole = [dataclasses.replace(layer, fp8=True, norm=n) for n in (False, layer.norm)]
            trials += [
                Trial(kind, rows, tile)
                for kind in dict.fromkeys(whole)
                for tile in candidates(kind, rows)
                if tile.stream
            ]
    if args.streams:
        trials = streams_beside_known(list(dict.fromkeys(trials)))
    spoilt = [dataclasses.replace(trials[0], spoilt=True)] if args.dry else []
    return trials + spoilt


INT8_ROWS_TOLD = "1,8,32,128,256,2,4,16,64,512,2048"
WIDE_STREAMS = (
    stream(32, 4),
    stream(32, 5),
    stream(32, 4, warps=16),
    stream(48, 4),
    stream(64, 4),
    stream(96, 3),
    stream(16, 8),
    stream(32, 3, warps=4, per_sm=2),
    stream(32, 4, warps=4, per_sm=2),
    stream(64, 3, warps=4, per_sm=2),
)


def int8_plan(args: argparse.Namespace) -> list[Trial]:
    """Up to MAX_FEW rows the product rounds them, and takes a norm in; the vocabulary's never."""
    found: list[Trial] = []
    for rows in [int(r) for r in (args.rows or INT8_ROWS_TOLD).split(",")]:
        for layer in (x for x in LAYERS if args.model in (None, x.model)):
            if layer.name == "lm_head" and rows > LOGIT_ROWS:
                continue
            is_few = rows <= of_int8.MAX_FEW
            kinds = [dataclasses.replace(layer, norm=False, int8=True)]
            if layer.norm and is_few and layer.name != "lm_head" and not args.no_norm:
                kinds.append(dataclasses.replace(layer, int8=True))
            found += [Trial(kind, rows, t) for kind in kinds for t in int8_tiles(kind, rows)]
    return list(dict.fromkeys(found))


def int8_tiles(layer: Layer, rows: int) -> Iterator[Tile]:
    rounds = rows <= of_int8.MAX_FEW
    if rows <= STREAM_ROWS:
        for tile in (*STREAMS, *WIDE_STREAMS):
            if layer.gated and tile.block_n % 32:
                continue
            cut = groups_of(
                tile,
                rows,
                layer.outputs,
                layer.inputs,
                units=MULTIPROCESSORS,
                gated=layer.gated,
                rounds=rounds,
            )
            if cut.shared_bytes <= ROOM_BYTES // max(1, tile.per_sm) - 1024:
                yield tile
    if rounds:
        return
    yield from tiled(layer, rows)
    untuned_tile = of_int8.untuned_tile
    yield untuned_tile(rows, layer.outputs, layer.inputs, MULTIPROCESSORS, gated=layer.gated)
    if rows > 64:
        for more in ({}, {"block_n": 64, "warps": 4}, {"block_n": 64, "warps": 4, "block_m": 64}):
            pairs = Tile(**{"block_n": 128, "block_k": 128, "warps": 8, "block_m": 128, **more})  # type: ignore[arg-type]
            pairs = dataclasses.replace(pairs, cluster=2, wgmma=True)
            yield of_int8.deepest(pairs, rows, gated=layer.gated)
            if pairs.warps == 4:
                yield of_int8.deepest(pairs, rows, gated=layer.gated, room=HALF_BYTES)
    if rows > 256:
        large = Tile(128, 128, warps=8, wgmma=True)
        for more in ({}, {"cluster": 2}, {"block_m": 128}, {"block_m": 128, "block_n": 256}):
            for per_sm in (0, 1):
                made = dataclasses.replace(large, per_sm=per_sm, **more)  # type: ignore[arg-type]
                yield of_int8.deepest(made, rows, gated=layer.gated)


def kernel_key(trial: Trial) -> tuple[Any, ...]:
    """Trials with the same key share a compiled kernel (or two)."""
    tile, layer = trial.tile, trial.layer
    padded = max(bucket(trial.rows), tile.least_rows) if tile.dot else 1
    free = dataclasses.replace(tile, splits=min(tile.splits, 2), per_sm=min(tile.per_sm, 1))
    return free, padded, layer.kind, trial.spoilt, layer.is_coded and (trial.rows == 1), layer.int8


def in_groups(trials: Sequence[Trial], key: Callable[[Trial], Any]) -> list[list[Trial]]:
    groups: dict[Any, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(key(trial), []).append(trial)
    return list(groups.values())


class Children:
    """Processes that take groups of trials from one list until it is empty or time is over."""

    def __init__(self, what: str, groups: list[list[Trial]], args: argparse.Namespace) -> None:
        self.what, self.total, self.args = what, len(groups), args
        self.folder = args.out / what
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.iterdir():
            old.unlink()
        work = [[asdict(trial) for trial in group] for group in groups]
        (self.folder / "work.json").write_text(json.dumps(work), encoding="utf-8")

    def run(self, jobs: int, deadline: float) -> list[Row]:
        jobs = min(jobs, self.total)
        running = [self._start(n, deadline) for n in range(jobs)]
        started = jobs
        while running and time.monotonic() < deadline + 5:
            time.sleep(0.2)
            for child in [c for c in running if c.poll() is not None]:
                running.remove(child)
                if child.returncode != 0:
                    print(f"  {self.what}: a child ended with {child.returncode}", flush=True)
                if child.returncode != 0 and self._left() and started < jobs + 20:
                    running.append(self._start(started, deadline))
                    started += 1
        for child in running:
            print(f"  {self.what}: a child is out of time, stopped", flush=True)
            child.kill()
            child.wait()
        rows = self._results()
        for path in (*self.folder.glob("claim-*"), *self.folder.glob("rows-*")):
            path.unlink()
        return rows

    def _start(self, number: int, deadline: float) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, "--child", self.what, "--number", str(number)]
        command += ["--out", str(self.args.out), "--deadline", str(deadline)]
        flags = [x for x in ("dry", "no_pdl", "fp8", "int8") if getattr(self.args, x)]
        command += [f"--{flag.replace('_', '-')}" for flag in flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if self.args.dry:
            environment["TRITON_INTERPRET"] = "1"
        with (self.folder / f"log-{number}").open("wb") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def _left(self) -> int:
        return self.total - len(list(self.folder.glob("claim-*")))

    def _results(self) -> list[Row]:
        rows = []
        for path in sorted(self.folder.glob("rows-*")):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    rows.append(json.loads(line))
                except ValueError:
                    print(f"  {path.name}: half a line, ignored", flush=True)
        return rows


def trial_of(row: Row) -> Trial:
    layer, tile = Layer(**row["layer"]), row["tile"]
    return Trial(layer, row["rows"], Tile(**tile) if tile else NO_TILE, row.get("spoilt", False))


NO_TILE = Tile(0, 0)  # of a measurement of the library


def tune(args: argparse.Namespace) -> None:
    begin, trials = time.monotonic(), plan(args)
    groups = in_groups(trials, kernel_key)
    print(f"{len(trials)} trials of {len(groups)} kernels", flush=True)
    checks = Children("check", groups, args).run(args.jobs, begin + 0.55 * args.budget_s)
    right = {trial_of(row) for row in checks if row["what"] == "right"}
    for row in checks:
        if row["what"] not in ("right", "skipped"):
            print(f"  {row['what'].upper()}: {label(trial_of(row))}: {row['why']}", flush=True)
    missing = len(trials) - len(checks)
    print(
        f"{time.monotonic() - begin:.0f} s: {len(right)} right, {missing} not checked", flush=True
    )
    pairs = in_groups([t for t in trials if t in right], lambda t: (t.layer, t.rows))
    rows = Children("time", pairs, args).run(1, begin + args.budget_s)
    lines = [json.dumps(row) for row in [*checks, *rows]]
    (args.out / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    report(rows, args)
    print(f"{time.monotonic() - begin:.0f} s in all")


def report(rows: list[Row], args: argparse.Namespace) -> None:
    """One line a layer and number of rows, and the table."""
    table, told = read_tiles(PACKAGE_TABLE.read_text(encoding="utf-8")), {}
    found: dict[Any, list[Row]] = {}
    fastest: dict[Place, float] = {}
    for row in rows:
        if row["what"] == "failed":
            print(f"  FAILED: {label(trial_of(row))}: {row['why']}", flush=True)
        else:
            found.setdefault((Layer(**row["layer"]), row["rows"]), []).append(row)
    for (layer, number), some in found.items():
        others = [f"{row['name']} {row['us']:.1f}" for row in some if row["what"] == "variant"]
        library = next((row for row in some if row["what"] == "library"), None)
        own = sorted((row for row in some if row["what"] == "ours"), key=lambda row: row["us"])
        if library is None or not own:
            continue
        best, is_ours = own[0], own[0]["us"] < MARGIN * library["us"]
        place = Place(best["device"], best["dtype"], layer.outputs, layer.inputs, number, "")
        place = dataclasses.replace(place, rows=bucket(number), kind=layer.kind)
        table[place] = Tile(**best["tile"]) if is_ours else None
        fastest[place] = best["us"] if is_ours else library["us"]
        kept = {"us": best["us"], "tb_per_s": best["tb_per_s"], "library_us": library["us"]}
        told[place] = json.dumps({name: round(value, 3) for name, value in kept.items()})[1:-1]
        print(
            f"{layer.model:5}{layer.name:8}{layer.kind:12}{number:3}"
            f" ours {best['us']:7.1f} us {best['tb_per_s']:5.2f} TB/s"
            f" | cuBLAS {library['alone_us']:7.1f} us {library['alone_tb_per_s']:5.2f}"
            f" | library {library['us']:7.1f} us | x{library['us'] / best['us']:.2f}"
            f" {'' if is_ours else 'LIBRARY '}{short(Tile(**best['tile']))} {' '.join(others)}",
            flush=True,
        )
    for place, us in fastest.items():
        kind, _, rest = place.kind.partition("+")
        apart = fastest.get(dataclasses.replace(place, kind=rest or "plain"))
        is_choice = kind == "norm" and place.dtype != of_int8.DTYPE  # whose norm is always inside
        if is_choice and apart is not None and us > apart + NORM_US:
            table[place] = None
    (args.out / FILE).write_text(write_tiles(table, told), encoding="utf-8")


def label(trial: Trial) -> str:
    layer = trial.layer
    return f"{layer.model} {layer.name} {layer.kind} {trial.rows} {short(trial.tile)}"


def short(tile: Tile) -> str:
    words = [f"{tile.block_n}x{tile.block_k} w{tile.warps} s{tile.stages}"]
    words += ["stream"] if tile.stream else ["wgmma"] if tile.wgmma else []
    words += [f"cluster{tile.cluster}"] if tile.cluster > 1 else []
    words += ["dot"] if tile.dot else ["fma"]
    words += [f"splits{tile.splits}"] if tile.splits > 1 else []
    words += [f"per_sm{tile.per_sm}"] if tile.per_sm else []
    words += ["tma"] if tile.tma else []
    words += [f"m{tile.block_m}"] if tile.block_m else []
    words += ["late"] if not tile.early else []
    return " ".join([*words, f"least{tile.least_rows}", f"ahead{tile.ahead}"])


# ---------------------------------------------------------------------- a child


def child(args: argparse.Namespace) -> int:
    """Takes one group after the other; 3 if the device is no longer to be trusted."""
    folder = args.out / args.child
    groups = json.loads((folder / "work.json").read_text(encoding="utf-8"))
    bench = make_bench(args)
    act = bench.check_all if args.child == "check" else bench.time_all
    with (folder / f"rows-{args.number}").open("w", encoding="utf-8") as out:
        for number, group in enumerate(groups):
            if time.monotonic() > args.deadline or not claim(folder / f"claim-{number}"):
                continue
            for row in act([trial_of(trial) for trial in group], args.deadline):
                out.write(json.dumps(row) + "\n")
                out.flush()
                if row["what"] == "failed" and not bench.is_alive():
                    return 3
    return 0


def claim(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


# ---------------------------------------------------------------------- the work of a child


NOTHING = torch.empty(0)
NO_ROWS = QuantizedRows(NOTHING, NOTHING)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of a layer; `weights_CNK` are copies of W that differ. Those in e4m3 have
    `scale_N`, and several rows of x are the `rounded`."""

    x_MK: torch.Tensor
    weights_CNK: torch.Tensor
    norm: InputNorm | None
    residual_MO: torch.Tensor | None
    out_MO: torch.Tensor
    rounded: QuantizedRows = NO_ROWS
    scale_N: torch.Tensor = NOTHING

    def matrix(self, copy: int) -> Fp8Matrix:
        return Fp8Matrix(self.weights_CNK[copy], self.scale_N)


@dataclass(frozen=True)
class Bench:
    device: torch.device
    dtype: torch.dtype
    pdl: bool
    workspace: Workspace

    @property
    def is_real(self) -> bool:
        return self.device.type == "cuda"

    def inputs(self, layer: Layer, rows: int, copies: int) -> Inputs:
        make = partial(torch.randn, device=self.device, dtype=self.dtype)
        width = layer.outputs // 2 if layer.gated else layer.outputs
        weights = make(copies, layer.outputs, layer.inputs).mul_(2 * layer.inputs**-0.5)
        return Inputs(
            make(rows, layer.inputs),
            weights,
            InputNorm(make(layer.inputs), 1e-5) if layer.norm else None,
            make(rows, width) if layer.residual else None,
            make(rows, width).fill_(torch.nan),
        )

    def ours(self, trial: Trial, given: Inputs, copy: int) -> torch.Tensor:
        return linear_by_tile(
            given.x_MK,
            given.weights_CNK[copy],
            trial.tile,
            norm=given.norm,
            gated=trial.layer.gated,
            residual_MO=given.residual_MO,
            out_MO=given.out_MO,
            workspace=self.workspace,
            pdl=self.pdl,
        )

    def library(self, layer: Layer, given: Inputs, copy: int) -> torch.Tensor:
        """What `small_linear` does without an entry in the table."""
        x, norm = given.x_MK, given.norm
        x = x if norm is None else rms_norm(x, norm.weight_K, norm.eps)
        y = functional.linear(x, given.weights_CNK[copy])
        y = silu_mul(y, pdl=self.pdl) if layer.gated else y
        residual = given.residual_MO if len(x) <= NORM_ROWS else None
        return y if residual is None else y.add_(residual)

    def alone(self, given: Inputs, copy: int) -> torch.Tensor:
        return functional.linear(given.x_MK, given.weights_CNK[copy])

    def variants(
        self, layer: Layer, given: Inputs, timed: Callable[[Callable[[int], object]], float]
    ) -> Iterator[Row]:
        """Other ways of the library, to be shown."""
        yield from ()

    def exact(self, trial: Trial, given: Inputs) -> torch.Tensor:
        layer = trial.layer
        return small_linear_reference(
            given.x_MK.float(),
            given.weights_CNK[0],
            norm=given.norm,
            gated=layer.gated,
            residual_MO=given.residual_MO,
        )

    # -- checking

    def check_all(self, group: list[Trial], deadline: float) -> Iterator[Row]:
        for trial in group:
            if time.monotonic() > deadline:
                return
            try:
                what, why = self.check(trial)
            except Exception as error:
                what, why = "failed", f"{type(error).__name__}: {str(error)[:300]}"
                if any(words in why for words in TOO_LARGE):
                    what = "skipped"
            yield row_of(trial, what, why=why)

    def check(self, trial: Trial) -> tuple[str, str]:
        layer = trial.layer
        given = self.inputs(layer, trial.rows, 1)
        exact = self.exact(trial, given)
        runs = []
        for _ in range(2):
            for space in self.spaces(trial):
                space.partial_P.fill_(torch.nan)
            given.out_MO.fill_(torch.nan)
            runs.append(self.ours(trial, given, 0).clone())
        first = runs[0] + 1 if trial.spoilt else runs[0]
        off = first.float() - exact
        mean, worst = float(off.norm() / exact.norm()), float(off.abs().max() / exact.abs().max())
        if not (mean <= (LIMIT_FP8 if layer.is_coded else LIMIT_NORM) and worst <= LIMIT_WORST):
            return "wrong", f"error {mean:.2e} in the mean, {worst:.2e} in the worst place"
        if not torch.equal(*runs):
            return "wrong", "the second run differs from the first"
        for space in self.spaces(trial):
            if bool(space.arrivals_A.any()):
                space.arrivals_A.zero_()
                return "wrong", "counters of the workspace are left"
        return "right", f"{mean:.1e}"

    def spaces(self, trial: Trial) -> list[Workspace]:
        return [self.workspace, *([tile_workspace(self.device)] if trial.tile.wgmma else [])]

    # -- timing

    def time_all(self, group: list[Trial], deadline: float) -> Iterator[Row]:
        layer, rows = group[0].layer, group[0].rows
        size = layer.outputs * layer.inputs * (1 if layer.is_coded else self.dtype.itemsize)
        copies = max(2, min(128, -(-BEYOND_L2_BYTES // size))) if self.is_real else 2
        given = self.inputs(layer, rows, copies)
        passes = max(1, REPLAY_BYTES // (size * copies)) if self.is_real else 1
        timed = partial(self.us, copies=copies, passes=passes)
        us = alone = timed(partial(self.alone, given))
        rates = {"alone_us": alone, "alone_tb_per_s": size / alone / 1e6}
        try:
            us = timed(partial(self.library, layer, given))
            us += ADDITION_US if layer.residual and rows > NORM_ROWS else 0.0
        except Exception as error:
            yield row_of(Trial(layer, rows, NO_TILE), "failed", why=f"{error!r:.300}")
        yield row_of(Trial(layer, rows, NO_TILE), "library", us=us, **rates)
        yield from self.variants(layer, given, timed)
        for trial in group:
            if time.monotonic() > deadline:
                return
            try:
                us = timed(partial(self.ours, trial, given))
            except Exception as error:
                why = f"{type(error).__name__}: {str(error)[:300]}"
                yield row_of(trial, "failed", why=why)
                continue
            codes = DTYPE if layer.fp8 else of_int8.DTYPE
            dtype = codes if layer.is_coded else str(self.dtype).removeprefix("torch.")
            said = {"device": self.device_name(), "dtype": dtype}
            yield row_of(trial, "ours", us=us, tb_per_s=size / us / 1e6, pdl=self.pdl, **said)

    def us(self, run: Callable[[int], object], *, copies: int, passes: int) -> float:
        """Microseconds of one call: the median of several replays."""
        if not self.is_real:
            begin = time.perf_counter()
            run(0)
            return (time.perf_counter() - begin) * 1e6
        for copy in range(2):
            run(copy)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in range(copies * passes):
                run(call % copies)
        graph.replay()
        taken = [replay_us(graph) for _ in range(REPLAYS)]
        return statistics.median(taken) / (copies * passes)

    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.is_real else "interpreter"

    def is_alive(self) -> bool:
        """False after an error that the device does not recover from."""
        try:
            torch.zeros(8, device=self.device).sum().item()
        except Exception:
            return False
        return True


class Fp8Bench(Bench):
    """`weights_CNK` are codes; several rows of x are rounded before."""

    def inputs(self, layer: Layer, rows: int, copies: int) -> Inputs:
        make = partial(torch.randn, device=self.device, dtype=self.dtype)
        width = layer.outputs // 2 if layer.gated else layer.outputs
        codes = torch.empty(copies, layer.outputs, layer.inputs, dtype=E4M3, device=self.device)
        for copy in range(copies):
            codes[copy] = make(layer.outputs, layer.inputs).mul_(100).clamp_(-LARGEST, LARGEST)
        return Inputs(
            make(rows, layer.inputs),
            codes,
            InputNorm(make(layer.inputs), 1e-5) if layer.norm else None,
            make(rows, width) if layer.residual else None,
            make(rows, width).fill_(torch.nan),
            quantize_rows_reference(make(rows, layer.inputs)),
            torch.rand(layer.outputs, device=self.device).add_(0.5).mul_(0.02 * layer.inputs**-0.5),
        )

    def ours(self, trial: Trial, given: Inputs, copy: int) -> torch.Tensor:
        from ridgeline.kernels.fp8_linear_triton import fp8_linear_triton

        if trial.tile.stream and given.x_MK.shape[0] > MAX_STREAMED:
            return stream_linear(
                given.rounded.codes_MK,
                given.weights_CNK[copy],
                tile=trial.tile,
                residual_MO=given.residual_MO,
                out_MO=given.out_MO,
                scales=Scales(given.scale_N, given.rounded.scale_M),
                dtype=self.dtype,
                pdl=self.pdl,
            )
        if trial.tile.wgmma:
            return tile_linear(
                given.rounded.codes_MK,
                given.weights_CNK[copy],
                tile=trial.tile,
                gated=trial.layer.gated,
                residual_MO=given.residual_MO,
                out_MO=given.out_MO,
                scales=Scales(given.scale_N, given.rounded.scale_M),
                dtype=self.dtype,
                pdl=self.pdl,
            )
        if trial.tile.stream:
            return stream_linear(
                given.x_MK,
                given.weights_CNK[copy],
                tile=trial.tile,
                norm=given.norm,
                gated=trial.layer.gated,
                residual_MO=given.residual_MO,
                out_MO=given.out_MO,
                scales=Scales(given.scale_N),
                pdl=self.pdl,
            )
        rounded = given.x_MK.shape[0] > 1
        return fp8_linear_triton(
            given.rounded.codes_MK if rounded else given.x_MK,
            given.matrix(copy),
            tile=trial.tile,
            x_scale_M=given.rounded.scale_M if rounded else None,
            norm=given.norm,
            gated=trial.layer.gated,
            residual_MO=given.residual_MO,
            out_MO=given.out_MO,
            workspace=self.workspace,
            pdl=self.pdl,
        )

    def exact(self, trial: Trial, given: Inputs) -> torch.Tensor:
        layer, norm, x_MK = trial.layer, given.norm, given.x_MK.float()
        if trial.tile.stream and len(x_MK) <= MAX_STREAMED:
            # Rounded in the kernel, before the factor of the norm.
            taken_MK = rounded_reference(x_MK if norm is None else given.x_MK * norm.weight_K)
            if norm is not None:
                taken_MK *= torch.rsqrt(x_MK.square().mean(1, keepdim=True) + norm.eps)
            x_MK, norm = taken_MK, None
        elif len(x_MK) > 1:
            x_MK = given.rounded.codes_MK.float() * given.rounded.scale_M[:, None]
        return fp8_linear_reference(
            x_MK,
            given.matrix(0),
            norm=norm,
            gated=layer.gated,
            residual_MO=given.residual_MO,
        )

    def alone(self, given: Inputs, copy: int) -> torch.Tensor:
        return library_product(given.rounded, given.matrix(copy))

    def library(self, layer: Layer, given: Inputs, copy: int) -> torch.Tensor:
        """A residual is added by the kernel that rounds next."""
        if given.x_MK.shape[0] > 1:
            return self.alone(given, copy)
        y = library_product(quantize_rows(given.x_MK, norm=given.norm), given.matrix(copy))
        return silu_mul(y, pdl=self.pdl) if layer.gated else y

    def variants(
        self, layer: Layer, given: Inputs, timed: Callable[[Callable[[int], object]], float]
    ) -> Iterator[Row]:
        rows, one = given.x_MK.shape[0], torch.ones((), device=self.device)
        if rows == 1:
            return
        codes = given.rounded.codes_MK
        runs: dict[str, Callable[[int], object]] = {
            "slow": lambda copy: library_product(given.rounded, given.matrix(copy), False),
            "unscaled": lambda copy: torch._scaled_mm(
                codes, given.weights_CNK[copy].T, one, one, None, None, torch.bfloat16, True
            ),
        }
        for more in (size for size in (64, 128, 256) if size > rows):
            padded = quantize_rows_reference(given.x_MK.new_ones(more, layer.inputs))
            runs[f"pad{more}"] = lambda copy, p=padded: library_product(p, given.matrix(copy))  # type: ignore[misc]
        for name, run in runs.items():
            trial = Trial(layer, rows, NO_TILE)
            try:
                yield row_of(trial, "variant", us=timed(run), name=name)
            except Exception as error:
                yield row_of(trial, "failed", why=f"{name}: {str(error)[:200]}")


class Int8Bench(Fp8Bench):
    """The same of int8."""

    def inputs(self, layer: Layer, rows: int, copies: int) -> Inputs:
        make = partial(torch.randn, device=self.device, dtype=self.dtype)
        width = layer.outputs // 2 if layer.gated else layer.outputs
        shape = copies, layer.outputs, layer.inputs
        return Inputs(
            make(rows, layer.inputs),
            torch.randint(-127, 128, shape, device=self.device, dtype=INT8),
            InputNorm(make(layer.inputs), 1e-5) if layer.norm else None,
            make(rows, width) if layer.residual else None,
            make(rows, width).fill_(torch.nan),
            quantize_rows_reference(make(rows, layer.inputs), dtype=INT8),
            torch.rand(layer.outputs, device=self.device).add_(0.5).mul_(0.02 * layer.inputs**-0.5),
        )

    def ours(self, trial: Trial, given: Inputs, copy: int) -> torch.Tensor:
        rounds = given.x_MK.shape[0] <= of_int8.MAX_FEW
        run: Callable[..., torch.Tensor] = tile_linear
        if trial.tile.stream:
            run = partial(stream_linear, norm=given.norm)
        return run(
            given.x_MK if rounds else given.rounded.codes_MK,
            given.weights_CNK[copy],
            tile=trial.tile,
            gated=trial.layer.gated,
            residual_MO=given.residual_MO,
            out_MO=given.out_MO,
            scales=Scales(given.scale_N, None if rounds else given.rounded.scale_M),
            pdl=self.pdl,
        )

    def exact(self, trial: Trial, given: Inputs) -> torch.Tensor:
        norm, x_MK = given.norm, given.x_MK.float()
        if len(x_MK) <= of_int8.MAX_FEW:
            weighted_MK = x_MK if norm is None else given.x_MK * norm.weight_K
            taken_MK = rounded_reference(weighted_MK, INT8)
            if norm is not None:
                taken_MK *= torch.rsqrt(x_MK.square().mean(1, keepdim=True) + norm.eps)
        else:
            taken_MK = given.rounded.codes_MK.float() * given.rounded.scale_M[:, None]
        return small_linear_reference(
            taken_MK,
            given.weights_CNK[0].float() * given.scale_N[:, None],
            gated=trial.layer.gated,
            residual_MO=given.residual_MO,
        )

    def wide(self, given: Inputs, copy: int) -> torch.Tensor:
        """In bfloat16; made once, at the first call, which is not timed."""
        if not self.known or self.known[0][0] is not given:
            self.known[:] = [(given, given.weights_CNK.to(self.dtype))]
        return self.known[0][1][copy]

    @cached_property
    def known(self) -> list[tuple[Inputs, torch.Tensor]]:
        return []

    def alone(self, given: Inputs, copy: int) -> torch.Tensor:
        return functional.linear(given.x_MK, self.wide(given, copy))

    def library(self, layer: Layer, given: Inputs, copy: int) -> torch.Tensor:
        x, norm = given.x_MK, given.norm
        x = x if norm is None else rms_norm(x, norm.weight_K, norm.eps)
        y = functional.linear(x, self.wide(given, copy))
        y = silu_mul(y, pdl=self.pdl) if layer.gated else y
        residual = given.residual_MO if len(x) <= NORM_ROWS else None
        return y if residual is None else y.add_(residual)

    def variants(
        self, layer: Layer, given: Inputs, timed: Callable[[Callable[[int], object]], float]
    ) -> Iterator[Row]:
        rows, codes = given.x_MK.shape[0], given.rounded.codes_MK
        runs: dict[str, Callable[[int], object]] = {
            "rounding": lambda copy: quantize_rows(given.x_MK, dtype=INT8, pdl=self.pdl)
        }
        if rows > 16:  # which the library wants
            runs["int_mm"] = lambda copy: torch._int_mm(codes, given.weights_CNK[copy].T)
        for name, run in runs.items():
            trial = Trial(layer, rows, NO_TILE)
            try:
                yield row_of(trial, "variant", us=timed(run), name=name)
            except Exception as error:
                yield row_of(trial, "failed", why=f"{name}: {str(error)[:200]}")


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def make_bench(args: argparse.Namespace) -> Bench:
    if args.dry:
        patch_interpreter()
        device, dtype = torch.device("cpu"), torch.float32
    else:
        device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
        torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    kind = Int8Bench if args.int8 else Fp8Bench if args.fp8 else Bench
    return kind(device, dtype, not (args.no_pdl or args.dry), make_workspace(device))


def patch_interpreter() -> None:
    """Triton 3.6 turns loop bounds into integers in a way that numpy 2.4 refuses."""
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def row_of(trial: Trial, what: str, **more: Any) -> Row:
    told = asdict(trial)
    return {**told, "tile": told["tile"] if trial.tile != NO_TILE else None, "what": what, **more}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--rows")
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--no-norm", action="store_true", help="leave out the fused norm")
    parser.add_argument("--no-pdl", action="store_true", help="no programmatic dependent launch")
    parser.add_argument("--fp8", action="store_true", help="weights in e4m3")
    parser.add_argument("--int8", action="store_true", help="weights in int8")
    parser.add_argument("--streams", action="store_true", help="only the CUDA kernels")
    parser.add_argument("--dry", action="store_true", help="try the script without a GPU")
    parser.add_argument("--child", choices=("check", "time"), help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args)
    args.out.mkdir(parents=True, exist_ok=True)
    tune(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
