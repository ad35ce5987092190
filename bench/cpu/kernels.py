"""How close to memory's and the processor's limit are the native linear layers? GB/s of weights for
few rows and Gop/s for many, beside torch's best operators on the same shapes.

usage: python -m bench.cpu.kernels [--threads 2] [--out results.jsonl] [--rows 1,8,32,512]
           [--kinds bf16,int8,int4] [--group 128] [--repeats 9] [--levels avx2,amx] [--no-torch]
           [--commit ID]

Each figure is the median of the repeats, with the best in brackets, and then the median's share of
its ceiling; copies of a matrix are taken in turn, so that no cache holds them. Ceilings, of as many
threads, measured before and after: a read of 256 MiB for few rows, and for many rows dot products
of registers alone (int4 is multiplied as int8; none for AVX2). Shapes are those of Llama-3.2-1B.
The kinds groups4 (with zero points) and groups8 (scales of GGUF, float16) are in groups too.
With --commit our own figures become rows of results/latest.json.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional

from bench.cpu.latest import Row, merge, row
from ridgeline.kernels.cpu import native
from ridgeline.kernels.cpu.packed_linear import (
    GROUPED,
    Codes,
    PackedMatrix,
    linear,
    pack,
    pack_codes,
)
from ridgeline.kernels.quantized_matrix import QuantizedMatrix

SHAPES = {
    "qkv": (3072, 2048),
    "output": (2048, 2048),
    "gate_up": (16384, 2048),
    "down": (2048, 8192),
    "LM head": (128256, 2048),
}
COLD_BYTES = 160 << 20  # of copies of a matrix that are used in turn
MANY_ROWS = 128  # from here on arithmetic is the limit, and one copy will do
GROUP = 128


@dataclass(frozen=True, slots=True)
class Figure:
    """`seconds` of one product, median and best; bytes are those of the weights and scales."""

    kind: str
    op: str
    shape: str
    rows: int
    seconds: float
    best_s: float
    weight_bytes: int
    operations: int
    level: str
    threads: int
    ceiling: float | None  # bytes or operations a second

    @property
    def unit(self) -> str:
        return "GB/s" if self.rows < MANY_ROWS else "Gop/s"

    @property
    def rates(self) -> tuple[float, float]:
        """Median and best, in that unit."""
        amount = self.weight_bytes if self.rows < MANY_ROWS else self.operations
        return amount / self.seconds / 1e9, amount / self.best_s / 1e9

    def __str__(self) -> str:
        median, best = self.rates
        share = "" if self.ceiling is None else f" {median * 1e9 / self.ceiling:5.0%}"
        digits = 1 if self.rows < MANY_ROWS else 0
        head = f"{self.kind} M={self.rows:<4d} {self.shape:8s} {self.op:20s}"
        return f"{head} {median:6.{digits}f} ({best:.{digits}f}) {self.unit}{share}"


class _Read(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_void_p),
        ("num_bytes", ctypes.c_int64),
        ("mixed", ctypes.c_uint64),
    )


class _Peak(ctypes.Structure):
    _fields_ = (
        ("steps", ctypes.c_int64),
        ("operations", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("tasks", ctypes.c_int32),
    )


def timed(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and best of the seconds that `work` takes, after one call that is not counted."""
    work()
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken), min(taken)


def read_bandwidth(repeats: int) -> tuple[float, float]:
    """Bytes a second, median and best."""
    library = native.library()
    if library is None:
        raise SystemExit("the native CPU kernels are not here: make native")
    memory = native.advise_huge(torch.empty(256 << 20, dtype=torch.uint8)).fill_(1)
    call = _Read(memory.data_ptr(), memory.numel(), 0)
    median, best = timed(lambda: library.rl_read(ctypes.byref(call)), repeats)
    return memory.numel() / median, memory.numel() / best


def peak(kind: Codes, threads: int, repeats: int) -> float | None:
    """Operations a second of dot products in registers, the best; None at a level without them."""
    library = native.library()
    if library is None:
        raise SystemExit("the native CPU kernels are not here: make native")
    call = _Peak(20_000, 0, Codes.BF16 if kind == Codes.BF16 else Codes.INT8, 16 * threads)
    if library.rl_peak(ctypes.byref(call)):
        return None
    return float(call.operations) / timed(lambda: library.rl_peak(ctypes.byref(call)), repeats)[1]


@dataclass(frozen=True, slots=True)
class Ceilings:
    read: float  # bytes a second
    peaks: dict[Codes, float | None]  # operations a second

    def of(self, kind: Codes, rows: int) -> float | None:
        return self.read if rows < MANY_ROWS else self.peaks[kind]


def ceilings(threads: int, repeats: int) -> Ceilings:
    median = read_bandwidth(repeats)[0]
    return Ceilings(median, {kind: peak(kind, threads, repeats) for kind in Codes})


def packed(kind: Codes, weight: torch.Tensor, group: int) -> PackedMatrix:
    if kind == Codes.GROUPS8:
        outputs, inputs = weight.shape
        codes = torch.randint(0, 256, weight.shape, dtype=torch.uint8)
        scale = torch.ones(outputs, inputs // group, dtype=torch.float16)
        return pack_codes(QuantizedMatrix(codes, scale, None, inputs, 8, group), kind)
    copy = native.advise_huge(torch.empty_like(weight)).copy_(weight)
    group = group if kind in GROUPED else 0
    return pack(copy, kind, group=group, has_zero=kind == Codes.GROUPS4)


def ours(
    kind: Codes, weight: torch.Tensor, rows: int, group: int
) -> tuple[int, list[Callable[[], object]]]:
    """Bytes of a packed matrix, and a product by each of its copies."""
    first = packed(kind, weight, group)
    beside = (first.scales, first.zeros)
    num_bytes = first.codes.nbytes + sum(0 if one is None else one.nbytes for one in beside)
    copies = 1 if rows >= MANY_ROWS else max(1, -(-COLD_BYTES // num_bytes))
    matrices = [first]
    for _ in range(copies - 1):
        codes = native.advise_huge(torch.empty_like(first.codes)).copy_(first.codes)
        matrices.append(replace(first, codes=codes))
    x = torch.randn(rows, weight.shape[1]).bfloat16()
    y = torch.empty(rows, weight.shape[0], dtype=torch.bfloat16)
    return num_bytes, [lambda m=m: linear(x, m, out_MO=y) for m in matrices]  # type: ignore[misc]


def of_torch(
    kind: Codes, weight: torch.Tensor, rows: int
) -> Iterator[tuple[str, int, list[Callable[[], object]]]]:
    """Name, bytes and products of torch's operators for this kind of weights."""
    x = torch.randn(rows, weight.shape[1]).bfloat16()
    one = 2 if kind == Codes.BF16 else 1
    num_bytes = weight.numel() * one
    copies = 1 if rows >= MANY_ROWS else max(1, -(-COLD_BYTES // num_bytes))
    if kind == Codes.BF16:
        weights = [weight.clone() for _ in range(copies)]
        yield "linear", num_bytes, [lambda w=w: functional.linear(x, w) for w in weights]  # type: ignore[misc]
    if kind == Codes.INT8:
        codes = [torch.randint(-127, 128, weight.shape, dtype=torch.int8) for _ in range(copies)]
        scale = torch.ones(weight.shape[0], dtype=torch.bfloat16)
        mixed = torch.ops.aten._weight_int8pack_mm
        yield "_weight_int8pack_mm", num_bytes, [lambda c=c: mixed(x, c, scale) for c in codes]  # type: ignore[misc]
        rounded = torch.randint(-127, 128, x.shape, dtype=torch.int8)
        whole = torch.ops.aten._int_mm
        yield "_int_mm", num_bytes, [lambda c=c: whole(rounded, c.T) for c in codes]  # type: ignore[misc]


def measure(
    asked: argparse.Namespace, kind: Codes, name: str, rows: int, ceiling: float | None
) -> Iterator[Figure]:
    outputs, inputs = SHAPES[name]
    weight = torch.randn(outputs, inputs).bfloat16()
    operators = [("ridgeline", *ours(kind, weight, rows, asked.group))]
    if not asked.no_torch and (name != "LM head" or kind == Codes.BF16):
        operators += of_torch(kind, weight, rows)
    for op, num_bytes, products in operators:

        def run(products: list[Callable[[], object]] = products) -> None:
            for product in products:
                product()

        repeats = asked.repeats if rows < MANY_ROWS else min(3, asked.repeats)
        median, best = (s / len(products) for s in timed(run, repeats))
        operations = 2 * rows * outputs * inputs
        is_usual = kind not in GROUPED or asked.group == GROUP
        name_of_kind = kind.name.lower() + ("" if is_usual else f" of {asked.group}")
        level = native.level()
        done = (median, best, num_bytes, operations)
        yield Figure(name_of_kind, op, name, rows, *done, level, asked.threads, ceiling)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,8,32,512")
    parser.add_argument("--kinds", default="bf16,int8,int4")
    parser.add_argument("--group", type=int, default=GROUP)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--levels", default=native.level(), help="avx2, avx512, bf16, amx")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    native.set_threads(asked.threads)
    lines: list[dict[str, object]] = []
    figures: list[Figure] = []
    for level in asked.levels.split(","):
        with native.at_level(level):
            limits = measured_ceilings(asked, lines)
            found = list(all_figures(asked, limits))
            measured_ceilings(asked, lines)
        figures += found
        lines += [asdict(figure) for figure in found]
    if asked.out is not None:
        asked.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if asked.commit is not None:
        merge([row_of(f, asked.commit) for f in figures if f.op == "ridgeline"])


def measured_ceilings(asked: argparse.Namespace, lines: list[dict[str, object]]) -> Ceilings:
    found = ceilings(asked.threads, asked.repeats)
    told = [f"{k.name.lower()} {v / 1e9:.0f} Gop/s" for k, v in found.peaks.items() if v]
    head = f"level {native.level()}, {asked.threads} threads: memory read"
    print(f"{head} {found.read / 1e9:.1f} GB/s", *told, sep=", ", flush=True)
    peaks = {f"peak_{kind.name.lower()}": rate for kind, rate in found.peaks.items()}
    lines.append({"level": native.level(), "read_bytes_s": found.read} | peaks)
    return found


def all_figures(asked: argparse.Namespace, limits: Ceilings) -> Iterator[Figure]:
    for kind in (Codes[name.upper()] for name in asked.kinds.split(",")):
        for rows in map(int, asked.rows.split(",")):
            for name in asked.shapes.split(","):
                for figure in measure(asked, kind, name, rows, limits.of(kind, rows)):
                    print(figure, flush=True)
                    yield figure


def row_of(figure: Figure, commit: str) -> Row:
    median, best = figure.rates
    name = f"{figure.kind} {figure.shape} of {figure.rows} rows, {figure.level}"
    return row(name, figure.unit, [median], commit=commit) | {"high": best}


if __name__ == "__main__":
    main()
