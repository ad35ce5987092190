"""How close to memory's and the processor's limit are the native linear layers? GB/s of weights for
few rows and Gop/s for many, beside torch's best operators on the same shapes.

usage: python -m bench.cpu.kernels [--threads 2] [--out results.jsonl] [--rows 1,8,32,512]
           [--kinds bf16,int8,int4] [--repeats 9] [--level amx] [--no-torch]

Each figure is the median of the repeats, with the best in brackets; copies of a matrix are taken in
turn, so that no cache holds them. The ceiling is a read of 256 MiB by the same threads, measured
before and after. Shapes are those of Llama-3.2-1B.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional

from ridgeline.kernels.cpu import native
from ridgeline.kernels.cpu.packed_linear import Codes, PackedMatrix, linear, pack

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

    @property
    def rate(self) -> str:
        if self.rows < MANY_ROWS:
            median, best = (self.weight_bytes / s / 1e9 for s in (self.seconds, self.best_s))
            return f"{median:6.1f} ({best:.1f}) GB/s"
        median, best = (self.operations / s / 1e9 for s in (self.seconds, self.best_s))
        return f"{median:6.0f} ({best:.0f}) Gop/s"


class _Read(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_void_p),
        ("num_bytes", ctypes.c_int64),
        ("mixed", ctypes.c_uint64),
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


def ours(kind: Codes, weight: torch.Tensor, rows: int) -> tuple[int, list[Callable[[], object]]]:
    """Bytes of a packed matrix, and a product by each of its copies."""
    copy = native.advise_huge(torch.empty_like(weight)).copy_(weight)
    first = pack(copy, kind, group=GROUP if kind == Codes.INT4 else 0)
    scales = 0 if first.scales is None else first.scales.nbytes
    num_bytes = first.codes.nbytes + scales
    copies = 1 if rows >= MANY_ROWS else max(1, -(-COLD_BYTES // num_bytes))
    matrices = [first]
    for _ in range(copies - 1):
        codes = native.advise_huge(torch.empty_like(first.codes)).copy_(first.codes)
        matrices.append(
            PackedMatrix(codes, first.scales, first.outputs, first.inputs, kind, first.group)
        )
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


def measure(asked: argparse.Namespace, kind: Codes, name: str, rows: int) -> Iterator[Figure]:
    outputs, inputs = SHAPES[name]
    weight = torch.randn(outputs, inputs).bfloat16()
    operators = [("ridgeline", *ours(kind, weight, rows))]
    if not asked.no_torch and (name != "LM head" or kind == Codes.BF16):
        operators += of_torch(kind, weight, rows)
    for op, num_bytes, products in operators:

        def run(products: list[Callable[[], object]] = products) -> None:
            for product in products:
                product()

        repeats = asked.repeats if rows < MANY_ROWS else min(3, asked.repeats)
        median, best = (s / len(products) for s in timed(run, repeats))
        operations = 2 * rows * outputs * inputs
        level, threads = native.level(), asked.threads
        yield Figure(
            kind.name.lower(), op, name, rows, median, best, num_bytes, operations, level, threads
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,8,32,512")
    parser.add_argument("--kinds", default="bf16,int8,int4")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--level", default=native.level(), choices=native.LEVELS[1:])
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    native.set_threads(asked.threads)
    lines: list[dict[str, object]] = []

    def ceiling() -> None:
        median, best = read_bandwidth(asked.repeats)
        print(f"memory read {median / 1e9:.1f} ({best / 1e9:.1f}) GB/s", flush=True)
        lines.append({"read_bytes_s": median, "best_read_bytes_s": best})

    with native.at_level(asked.level):
        print(f"level {native.level()} threads {asked.threads}")
        ceiling()
        for kind in (Codes[name.upper()] for name in asked.kinds.split(",")):
            for rows in map(int, asked.rows.split(",")):
                for name in asked.shapes.split(","):
                    for figure in measure(asked, kind, name, rows):
                        head = f"{figure.kind} M={rows:<4d} {name:8s} {figure.op:20s}"
                        print(f"{head} {figure.rate}", flush=True)
                        lines.append(asdict(figure))
        ceiling()
    if asked.out is not None:
        asked.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
