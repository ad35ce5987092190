"""Time the products with weights of 4 bits by graph replays, beside those in bfloat16.

    python -m bench.gpu.int4 --out DIR [--model 8B] [--rows 1,32] [--sweep] [--budget-s 100]
        [--group 128] [--zeros] [--jobs 14] [--compile-only]

Each replay goes once over copies of a layer's weights that together exceed the L2 cache. TB/s
counts the packed bytes: codes, scales and zero points. Beside it: the product in bfloat16, as the
engine makes it, with the same norm, gate or residual. `--sweep` tries other ways of cutting and
prints the three best of each case; all ways are compared with float32 first, on random numbers.
DIR gets rows.jsonl (every measurement and failure) and tiles.txt (lines of `tiles.json`).
`--compile-only` compiles what the others would, in `--jobs` processes, for capability 9.0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ridgeline.kernels import nvrtc
from ridgeline.kernels.int4_linear import (
    DTYPE,
    MAX_FEW,
    UNITS,
    Asked,
    by_tile,
    runs,
    untuned_tile,
)
from ridgeline.kernels.int4_linear_cuda import (
    STREAM,
    stream_cut,
    stream_defines,
    tiles_cut,
    tiles_defines,
)
from ridgeline.kernels.int4_linear_records import Form, Records, pack_records
from ridgeline.kernels.large_m_linear import fits_large_m, large_m_linear
from ridgeline.kernels.quantized_matrix import QuantizedMatrix
from ridgeline.kernels.rms_norm import rms_norm
from ridgeline.kernels.silu_mul import silu_mul
from ridgeline.kernels.small_linear import Beside, Fusion, InputNorm, fits_small, small_linear
from ridgeline.kernels.tile_linear import SOURCE as TILES
from ridgeline.kernels.tiles import Place, Tile, bucket, kind_of, write_tiles
from tests.kernels.references import small_linear_reference

Row = dict[str, Any]
ROWS = (1, 32, 8, 128, 256, 64, 16, 512, 2, 4, 1024, 2048)
BEYOND_L2_BYTES = 200 << 20
MOST_COPIES = 64
REPLAY_S = 4e-4  # about the length of a replay
REPLAYS = 7
LIMIT = 6e-3  # of the norm of an answer
NORM_ROWS = 8  # above, the norm is a kernel of its own
HALF, FULL = 110 << 10, 227 << 10  # bytes of shared memory: two programs, or one


@dataclass(frozen=True, slots=True)
class Layer:
    model: str
    name: str
    outputs: int
    inputs: int
    gated: bool = False
    residual: bool = False
    norm: bool = False


LAYERS = (
    Layer("8B", "gate_up", 28672, 4096, gated=True, norm=True),
    Layer("8B", "down", 4096, 14336, residual=True),
    Layer("8B", "qkv", 6144, 4096, norm=True),
    Layer("8B", "o", 4096, 4096, residual=True),
    Layer("0.6B", "gate_up", 6144, 1024, gated=True, norm=True),
    Layer("0.6B", "down", 1024, 3072, residual=True),
    Layer("0.6B", "qkv", 4096, 1024, norm=True),
    Layer("0.6B", "o", 1024, 2048, residual=True),
)


@dataclass(frozen=True, slots=True)
class Case:
    layer: Layer
    asked: Asked

    @property
    def packed_bytes(self) -> int:
        form = self.asked.form
        return form.sixteens * form.along_k * form.record_bytes


def cases(args: argparse.Namespace) -> Iterator[Case]:
    told = [int(n) for n in args.rows.split(",")] if args.rows else ROWS
    for rows, layer in itertools.product(told, LAYERS):
        if args.model in (None, layer.model) and args.layer in (None, layer.name):
            form = Form(layer.outputs, layer.inputs, args.group, torch.bfloat16, args.zeros)
            norm = layer.norm and rows <= NORM_ROWS
            yield Case(layer, Asked(rows, form, UNITS, layer.gated, norm, layer.residual))


def deepest(tile: Tile, asked: Asked, room: int) -> Iterator[Tile]:
    """With as many stages as fit."""
    for stages in range(16, 1, -1):
        made = replace(tile, stages=stages)
        if runs(made, asked) and shared_of(made, asked) <= room:
            yield made
            return


def shared_of(tile: Tile, asked: Asked) -> int:
    form, units = asked.form, asked.units
    if tile.stream:
        cut = stream_cut(
            tile, asked.rows, form, units=units, gated=asked.gated, norm=asked.norm
        )  # fmt: skip
        return cut.shared_bytes
    return tiles_cut(tile, asked.rows, form, units=units, gated=asked.gated).shared_bytes


def streams(asked: Asked) -> Iterator[Tile]:
    least, form = (32 if asked.gated else 16), asked.form
    for block_n, warps, splits, deep in itertools.product((16, 32, 64), (8, 16), (1, 2), (1, 2, 4)):
        blocks = -(-form.outputs // block_n) * splits
        if block_n < least or blocks < 60 or form.along_k < deep * splits * warps / 2:
            continue
        if (block_n == 64 and (warps == 16 or blocks < 100)) or form.along_k % deep:
            continue
        tile = Tile(block_n, 128 * deep, splits, warps, stream=True)
        yield from deepest(tile, asked, HALF)
        yield from deepest(tile, asked, 64 << 10)
        if splits == 1:
            yield from deepest(tile, asked, FULL)


def tiled(asked: Asked) -> Iterator[Tile]:
    rows, outputs = asked.rows, asked.form.outputs

    def of(block_n: int, *, half: bool = False, **more: Any) -> Iterator[Tile]:
        tile = Tile(block_n, 128, warps=4 if block_n == 64 else 8, wgmma=True, **more)
        yield from deepest(tile, asked, HALF if half else FULL)

    yield from of(128, per_sm=1)
    yield from of(256, per_sm=1, block_m=128)
    if rows <= 128:
        yield from of(128, half=True, per_sm=1)
        yield from of(64, half=True, per_sm=2)
        yield from of(128, half=True, per_sm=2)
        yield from of(256, half=True, per_sm=1, block_m=128)
    if rows > 64:
        yield from of(128, per_sm=1, cluster=2)
        yield from of(256, per_sm=1, block_m=128, cluster=2)
    if rows > 128:
        yield from of(128, per_sm=1, block_m=128)
        yield from of(128, per_sm=1, block_m=192)
    for block_n, splits, block_m in itertools.product((64, 128, 256), (1, 2, 4), (0, 128, 64)):
        if block_m >= rows or (block_n == 256 and rows > 128 and block_m != 128):
            continue
        x_tiles = -(-rows // (block_m or 256))
        blocks = -(-outputs // block_n) * x_tiles * splits
        if 30 <= blocks <= 264 and (block_m == 0 or rows > 128 or outputs <= 1024):
            yield from of(block_n, half=blocks > 132, splits=splits, block_m=block_m)


def candidates(asked: Asked, sweep: bool) -> list[Tile]:
    best = untuned_tile(asked)
    found = [] if best is None else [best]
    if sweep and asked.rows <= 2 * MAX_FEW:
        found += streams(asked)
    if sweep and asked.rows > MAX_FEW // 2 and not asked.norm:
        found += tiled(asked)
    return [tile for tile in dict.fromkeys(found) if runs(tile, asked)]


def to_compile(case: Case, tile: Tile) -> tuple[str, tuple[tuple[str, int | str], ...]]:
    asked, dtype = case.asked, torch.bfloat16
    form, gated, residual = asked.form, asked.gated, asked.residual
    if tile.stream:
        few = stream_cut(
            tile, asked.rows, form, units=asked.units, gated=gated, norm=asked.norm
        )  # fmt: skip
        defines = stream_defines(
            tile, few, form, dtype, gated=gated, norm=asked.norm, residual=residual
        )
        return STREAM, tuple(sorted(defines.items()))
    some = tiles_cut(tile, asked.rows, form, units=asked.units, gated=gated)
    defines = tiles_defines(tile, some, form, dtype, gated=gated, residual=residual)
    return TILES, tuple(sorted(defines.items()))


def compile_one(what: tuple[str, tuple[tuple[str, int | str], ...]]) -> str:
    try:
        nvrtc.machine_code(what[0], what[1], "sm_90a")
    except Exception as error:
        return f"{what}: {error}"
    return ""


def compile_all(args: argparse.Namespace) -> None:
    begin = time.monotonic()
    wanted = dict.fromkeys(
        to_compile(case, tile)
        for case in cases(args)
        for tile in candidates(case.asked, args.sweep)
    )
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        for said in pool.map(compile_one, wanted, chunksize=2):
            if said:
                print(f"NOT COMPILED {said[:600]}", flush=True)
    print(f"{len(wanted)} kernels in {time.monotonic() - begin:.0f} s", flush=True)


class Bench:
    """Weights of one layer at a time, in both forms."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.layer: Layer | None = None
        self.records: list[Records] = []
        self.plain: list[torch.Tensor] = []
        self.exact = torch.empty(0)

    def load(self, case: Case) -> None:
        if self.layer == case.layer:
            return
        self.layer, form = case.layer, case.asked.form
        self.records, self.plain, self.exact = [], [], torch.empty(0)
        matrix = random_matrix(form, self.device)
        self.exact = matrix.dequantize()
        first = pack_records(matrix)
        copies = min(MOST_COPIES, max(2, -(-BEYOND_L2_BYTES // case.packed_bytes)))
        self.records = [first]
        self.records += [Records(first.bytes_RCB.clone(), form) for _ in range(copies - 1)]
        plain_bytes = form.outputs * form.inputs * 2
        copies = min(MOST_COPIES, max(2, -(-BEYOND_L2_BYTES // plain_bytes)))
        weight = self.exact.bfloat16()
        self.plain = [weight.clone() for _ in range(copies)]

    def seconds(self, run: Callable[[int], Any], copies: int, expected_s: float) -> float:
        """Of one of `run`, for one copy of the weights after the other."""
        run(0)
        torch.cuda.synchronize()
        count = -(-max(copies, int(REPLAY_S / expected_s)) // copies) * copies
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(count):
                run(i % copies)
        graph.replay()
        taken = []
        for _ in range(REPLAYS):
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            taken.append(float(begin.elapsed_time(end)) / 1e3 / count)
        return sorted(taken)[REPLAYS // 2]


def random_matrix(form: Form, device: torch.device) -> QuantizedMatrix:
    shape, groups = (form.outputs, form.inputs // 2), (form.outputs, form.inputs // form.group)
    codes = torch.randint(0, 256, shape, device=device, dtype=torch.uint8)
    scale = (torch.randn(groups, device=device) * 0.2 * form.inputs**-0.5).to(form.scale_dtype)
    zero = torch.randint(0, 16, groups, device=device, dtype=torch.uint8)
    return QuantizedMatrix(
        codes, scale, zero if form.has_zero else None, form.inputs, 4, form.group
    )


def measure(bench: Bench, case: Case, args: argparse.Namespace) -> list[Row]:
    bench.load(case)
    layer, asked = case.layer, case.asked
    rows, width = asked.rows, layer.outputs // 2 if layer.gated else layer.outputs
    x = torch.randn(rows, layer.inputs, device=bench.device).bfloat16()
    gain = torch.randn(layer.inputs, device=bench.device).bfloat16()
    norm = InputNorm(gain, 1e-5) if asked.norm else None
    first = torch.randn(rows, width, device=bench.device).bfloat16()
    residual = first.clone() if layer.residual else None
    want = small_linear_reference(
        x.float(), bench.exact, norm=norm, gated=layer.gated, residual_MO=residual
    )
    out = first.clone()
    expected = case.packed_bytes / 3e12
    plain_s = bench.seconds(
        lambda i: in_bfloat16(x, bench.plain[i], norm, layer.gated, residual, out),
        len(bench.plain),
        4 * expected,
    )
    found: list[Row] = []
    about = {"model": layer.model, "layer": layer.name, "rows": rows, "kind": asked.kind}
    about |= {"outputs": layer.outputs, "inputs": layer.inputs, "bf16_us": plain_s * 1e6}
    for tile in candidates(asked, args.sweep):
        told = {n: getattr(tile, n) for n in Tile.__slots__}
        try:
            out.fill_(torch.nan)
            beside = Beside(norm=norm, gated=layer.gated, residual_MO=residual, out_MO=out)
            by_tile(x, bench.records[0], tile, beside)
            off = float((out.float() - want).norm() / want.norm())
            if not off <= LIMIT:
                found.append(about | {"tile": told, "wrong": off})
                print(f"  WRONG {layer.name} {rows} {short(tile)}: {off:.2e}", flush=True)
                continue
            taken = bench.seconds(
                lambda i, tile=tile, beside=beside: by_tile(  # type: ignore[misc]
                    x, bench.records[i], tile, beside
                ),
                len(bench.records),
                expected,
            )
            found.append(about | {"tile": told, "us": taken * 1e6, "off": off})
        except Exception as error:  # a failed launch, say: the others go on
            found.append(about | {"tile": told, "failed": str(error)[:200]})
            print(f"  FAILED {layer.name} {rows} {short(tile)}: {str(error)[:160]}", flush=True)
            torch.cuda.synchronize()
    if rows >= 256:
        library_s = bench.seconds(
            lambda i: by_library(x, bench.records[i], layer.gated, residual), 2, plain_s
        )
        found.append(about | {"library_us": library_s * 1e6})
    return found


def in_bfloat16(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: InputNorm | None,
    gated: bool,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """As `PlainWeights` and the layers do it."""
    fusion = Fusion(norm=norm, is_gated=gated, residual_TO=residual)
    if fits_small(x, weight, fusion):
        return small_linear(
            x, weight, norm=norm, gated=gated, residual_MO=residual, out_MO=out
        )  # fmt: skip
    normed = x if norm is None else rms_norm(x, norm.weight_K, norm.eps)
    if fits_large_m(normed, weight, Fusion(is_gated=gated)):
        return large_m_linear(normed, weight)
    y = torch.nn.functional.linear(normed, weight)
    y = silu_mul(y) if gated else y
    return y if residual is None else y.add_(residual)


def by_library(
    x: torch.Tensor, records: Records, gated: bool, residual: torch.Tensor | None
) -> torch.Tensor:
    from ridgeline.kernels.int4_linear import _by_library

    y = _by_library(x, records, None)
    y = silu_mul(y) if gated else y
    return y if residual is None else y.add_(residual)


def short(tile: Tile) -> str:
    words = [f"{tile.block_n}x{tile.block_k} w{tile.warps} s{tile.stages}"]
    words += [f"m{tile.block_m}"] if tile.block_m else []
    words += [f"splits{tile.splits}"] if tile.splits > 1 else []
    words += [f"per_sm{tile.per_sm}"] if tile.per_sm else []
    words += [f"cluster{tile.cluster}"] if tile.cluster > 1 else []
    return " ".join(["stream" if tile.stream else "wgmma", *words])


def report(case: Case, found: list[Row]) -> list[str]:
    timed = sorted((row for row in found if "us" in row), key=lambda row: float(row["us"]))
    library = next((row["library_us"] for row in found if "library_us" in row), None)
    layer, asked = case.layer, case.asked
    beside = "" if library is None else f" unpacked {library:7.1f}"
    head = f"{layer.model:5}{layer.name:8}{asked.kind:11}{asked.rows:5}"
    if not timed:
        return [f"{head} nothing runs{beside}"]
    lines = []
    for row in timed[:3]:
        rate = case.packed_bytes / row["us"] / 1e6
        lines.append(
            f"{head} {row['us']:7.2f} us {rate:5.2f} TB/s | bf16 {row['bf16_us']:7.2f}{beside}"
            f" x{row['bf16_us'] / row['us']:.2f} {short(Tile(**row['tile']))}"
        )
    return lines


def table_line(case: Case, found: list[Row], device: str) -> str | None:
    timed = [row for row in found if "us" in row]
    if not timed:
        return None
    best = min(timed, key=lambda row: float(row["us"]))
    form, asked = case.asked.form, case.asked
    kind = kind_of(norm=asked.norm, gated=asked.gated, residual=asked.residual)
    place = Place(device, DTYPE, form.outputs, form.inputs, bucket(asked.rows), kind)
    rate = case.packed_bytes / best["us"] / 1e6
    more = f'"us": {best["us"]:.3f}, "tb_per_s": {rate:.3f}, "library_us": {best["bf16_us"]:.3f}'
    text = write_tiles({place: Tile(**best["tile"])}, {place: more})
    return text.splitlines()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--layer")
    parser.add_argument("--rows")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--zeros", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--budget-s", type=float, default=100.0)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    begin = time.monotonic()
    compile_all(args)
    if args.compile_only:
        return
    bench, device = Bench(), torch.cuda.get_device_name()
    rows: list[Row] = []
    told: list[str] = []
    table: list[str] = []
    # Of one layer all, since its weights are made anew; the most wanted rows first.
    known = list(cases(args))
    for layer in dict.fromkeys(case.layer for case in known):
        for case in (c for c in known if c.layer == layer):
            if time.monotonic() - begin > args.budget_s:
                print("out of time", flush=True)
                break
            found = measure(bench, case, args)
            rows += found
            told += report(case, found)[:1]
            print(*report(case, found), sep="\n", flush=True)
            line = table_line(case, found, device)
            table += [] if line is None else [line]
    print("\nthe best of each, in", f"{time.monotonic() - begin:.0f} s", *told, sep="\n")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        lines = "\n".join(json.dumps(row) for row in rows)
        (args.out / "rows.jsonl").write_text(lines + "\n", encoding="utf-8")
        (args.out / "tiles.txt").write_text(",\n".join(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
