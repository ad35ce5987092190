"""Which tiles are best for grouped products of experts, and how near are they to the byte limit?

    PYTHONPATH=. python3 bench/gpu/experts.py --out DIR [--shapes mixtral,qwen3] [--tokens 1,8,32]
        [--weights plain,int4] [--workers 14] [--budget-s 150] [--rehearse]

Checks the layer against float32, then times products by replays of a graph whose calls route
differently. Kernels are compiled beforehand by many processes at once. DIR gets experts.jsonl, one
line a measurement; the table shows the best tiles, the whole layer with these and with the tiles
that are chosen, and which share of the card's rate of reading that is, counting each touched expert
once. Weights of 8 and 4 bits are timed with the tiles that are chosen alone. `--rehearse`: all of
it with tiny sizes, on a CPU through Triton's interpreter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

if __name__ == "__main__" and "--rehearse" in os.sys.argv:  # type: ignore[attr-defined]
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from ridgeline.kernels.grouped_experts import (
    ExpertsCut,
    ExpertTile,
    StackedMatrix,
    choose_cut,
    grouped_experts_reference,
)
from ridgeline.kernels.grouped_experts_triton import grouped_experts_triton
from ridgeline.kernels.quantize_rows import E4M3

CALLS = 8  # in a graph, each routed in its own way
REPLAYS = 3
CEILING_BYTES = 4 << 30


@dataclass(frozen=True)
class Shape:
    experts: int
    active: int
    width: int
    inner: int


SHAPES = {
    "mixtral": Shape(8, 2, 4096, 14336),
    "qwen3": Shape(128, 8, 2048, 768),
    "moe64": Shape(64, 6, 2048, 1408),
}
ASKED: set[int] = set()  # pairs of a tile; empty: all
TINY = {"tiny": Shape(6, 2, 64, 64)}


def tiles_of(block_m: int, product: str) -> list[ExpertTile]:
    gate_up = product == "gate_up"
    if block_m == 1:
        sizes = [(4, 512, 2), (2, 512, 2), (8, 512, 4), (2, 1024, 4), (4, 1024, 4), (2, 256, 1)]
        return [ExpertTile(n, k, w, s) for n, k, w in sizes for s in (2, 4)]
    if block_m <= 32:
        sizes = [(32, 128), (64, 64), (64, 128), (128, 64), (16, 128)]
        stages = {64: (4, 6), 128: (3, 4)}
        made = [ExpertTile(n, k, 4, s) for n, k in sizes for s in stages[k]]
        return [*made, ExpertTile(64, 64, 4, 5, tma=True), ExpertTile(64, 128, 4, 3, tma=True)]
    if block_m == 64:
        made = [ExpertTile(n, 64, w, s) for n, w, s in ((64, 4, 4), (128, 4, 3), (128, 8, 4))]
        made += [ExpertTile(n, 64, w, s, tma=True) for n, w, s in ((64, 4, 4), (128, 8, 4))]
        return made if gate_up else [*made, ExpertTile(256, 64, 8, 4, tma=True)]
    made = [ExpertTile(128, 64, 8, 3), ExpertTile(128, 64, 8, 4)]
    made += [ExpertTile(128, 64, 8, s, tma=True) for s in (3, 4)]
    made += [ExpertTile(64, 64, 4, 4, tma=True)]
    wide = [ExpertTile(256, 64, 8, 3)] + [ExpertTile(256, 64, 8, s, tma=True) for s in (3, 4)]
    return made if gate_up else [*made, *wide, ExpertTile(128, 128, 8, 3, tma=True)]


def blocks_m(shape: Shape, tokens: int) -> list[int]:
    """Pairs of a tile that may be best, of those that were asked for."""
    rows = tokens * shape.active / shape.experts
    steps = ((8, [16]), (48, [16, 32, 64]), (96, [32, 64, 128]))
    found = next((sizes for most, sizes in steps if rows <= most), [64, 128])
    found = [1, 16] if tokens == 1 else found
    return [size for size in found if not ASKED or size in ASKED]


def cut_with(block_m: int, product: str, tile: ExpertTile) -> ExpertsCut:
    """This tile, and the other product by the smallest."""
    other = ExpertTile(4, 256) if block_m == 1 else ExpertTile(64, 64)
    return (
        ExpertsCut(block_m, tile, other)
        if product == "gate_up"
        else ExpertsCut(block_m, other, tile)
    )


def weights_of(
    shape: Shape, device: str, experts: int | None = None, kind: str = "plain"
) -> tuple[StackedMatrix, ...]:
    number = experts or shape.experts
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = ((2 * shape.inner, shape.width), (shape.width, shape.inner))
    made = []
    for rows, columns in sizes:
        weight = torch.empty(number, rows, columns, dtype=dtype, device=device)
        made.append(packed(weight.normal_(0.0, columns**-0.5), kind))
    return tuple(made)


def packed(weight: torch.Tensor, kind: str) -> StackedMatrix:
    """Codes of the size of such weights; how well they are rounded is of no interest here."""
    number, rows, columns = weight.shape
    device = weight.device
    if kind == "plain":
        return StackedMatrix(weight)
    if kind == "fp8-block":
        scale = torch.rand(number, -(-rows // 128), -(-columns // 128), device=device) + 0.5
        return StackedMatrix((weight * 64).to(E4M3), scale / 64)
    if kind in ("fp8", "int8"):
        scale = torch.rand(number, rows, device=device) + 0.5
        return StackedMatrix((weight * 64).to(E4M3 if kind == "fp8" else torch.int8), scale / 64)
    shape, group = (number, rows, columns // 2), min(128, columns)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    scale = (torch.rand(number, rows, columns // group, device=device) + 0.5) * columns**-0.5 / 4
    return StackedMatrix(codes, scale.to(torch.bfloat16), group=group)


def routed(shape: Shape, tokens: int, device: str) -> tuple[torch.Tensor, ...]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(tokens, shape.width, device=device).to(dtype)
    scores = torch.randn(tokens, shape.experts, device=device)
    weights, chosen = scores.softmax(-1).topk(shape.active)
    return x, weights, chosen.to(torch.int32)


def touched_bytes(
    weights: Sequence[StackedMatrix], cases: Sequence[tuple[torch.Tensor, ...]]
) -> float:
    """Of the matrices of each expert that a call needs, on average."""
    parts = [t for matrix in weights for t in (matrix.codes, matrix.scale) if t is not None]
    touched = sum(len(case[2].unique()) for case in cases) / len(cases)
    return touched * sum(part[0].nbytes for part in parts)


def timed(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one of them."""
    if not torch.cuda.is_available():
        for call in calls:
            call()
        return 1.0
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    found = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return sorted(found)[len(found) // 2]


def run_layer(
    weights: tuple[StackedMatrix, ...], case: tuple[torch.Tensor, ...], cut: ExpertsCut
) -> torch.Tensor:
    x, router, chosen = case
    return grouped_experts_triton(x, router, chosen, *weights, cut=cut)


def compile_one(job: tuple[Shape, int, str, ExpertTile]) -> str:
    """Launch once with few experts; the error, if any."""
    shape, block_m, product, tile = job
    small = Shape(2 * shape.active, shape.active, shape.width, shape.inner)
    tokens = 1 if block_m == 1 else 4
    try:
        case = routed(small, tokens, "cuda")
        run_layer(weights_of(small, "cuda"), case, cut_with(block_m, product, tile))
        torch.cuda.synchronize()
    except Exception as error:  # a tile that does not fit is left out
        return f"{type(error).__name__}: {str(error)[:120]}"
    return ""


def jobs_of(
    shapes: Sequence[Shape], tokens: Sequence[int]
) -> list[tuple[Shape, int, str, ExpertTile]]:
    found: dict[tuple[Shape, int, str, ExpertTile], None] = {}
    for shape, number in itertools.product(shapes, tokens):
        for block_m in blocks_m(shape, number):
            for product in ("gate_up", "down"):
                found |= dict.fromkeys(
                    (shape, block_m, product, t) for t in tiles_of(block_m, product)
                )
    return list(found)


def check(name: str, shape: Shape, weights: tuple[StackedMatrix, ...], device: str) -> None:
    """Against float32, for each number of tokens that is cut in another way."""
    sizes = (1, 5, 40, 300) if device == "cuda" else (1, 5)
    worst = 0.0
    for tokens in sizes:
        case = routed(shape, tokens, device)
        exact = grouped_experts_reference(case[0].float(), case[1], case[2], *weights)
        got = run_layer(weights, case, choose_cut(tokens, shape.active, *weights))
        error = ((got.float() - exact).norm() / exact.norm()).item()
        worst = max(worst, error) if error == error else float("nan")
    print(
        f"{name}: relative error to float32 at most {worst:.2e}",
        "" if worst < 8e-3 else "WRONG",
        flush=True,
    )


def ceiling(device: str) -> float:
    """TB/s of a large sum."""
    if device != "cuda":
        return 1.0
    many = torch.ones(CEILING_BYTES // 4, dtype=torch.float32, device=device)
    us = timed([many.sum])
    return CEILING_BYTES / us / 1e6


def sweep(
    shape: Shape,
    weights: tuple[StackedMatrix, ...],
    tokens: int,
    device: str,
    broken: set[object],
    end: float,
) -> Iterator[dict[str, object]]:
    cases = [routed(shape, tokens, device) for _ in range(CALLS)]
    best: dict[tuple[int, str], tuple[float, ExpertTile]] = {}
    sizes = blocks_m(shape, tokens) if weights[0].scale is None else []
    for block_m in sizes:
        for product in ("gate_up", "down"):
            for tile in tiles_of(block_m, product):
                if (shape, block_m, product, tile) in broken or time.monotonic() > end:
                    continue
                cut = cut_with(block_m, product, tile)
                us = timed([partial(run_layer, weights, case, cut) for case in cases])
                yield {"product": product, "block_m": block_m, **asdict(tile), "us": us}
                key = (block_m, product)
                if key not in best or us < best[key][0]:
                    best[key] = (us, tile)
    bytes_read = touched_bytes(weights, cases)
    for block_m in sizes:
        if (block_m, "gate_up") in best and (block_m, "down") in best:
            cut = ExpertsCut(block_m, best[block_m, "gate_up"][1], best[block_m, "down"][1])
            us = timed([partial(run_layer, weights, case, cut) for case in cases])
            yield {"layer": "best", "us": us, "tb_s": bytes_read / us / 1e6, "cut": cut}
    cut = choose_cut(tokens, shape.active, *weights)
    us = timed([partial(run_layer, weights, case, cut) for case in cases])
    yield {"layer": "chosen", "us": us, "tb_s": bytes_read / us / 1e6, "cut": cut}


def short(tile: ExpertTile) -> str:
    return f"n{tile.block_n}k{tile.block_k}w{tile.warps}s{tile.stages}{'t' if tile.tma else ''}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default="mixtral,qwen3,moe64")
    parser.add_argument("--tokens", default="1,8,32,128,256,2048")
    parser.add_argument("--weights", default="plain", help="fp8, fp8-block, int8 or int4 too")
    parser.add_argument("--block-m", default="", help="sweep tiles of so many pairs alone")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--budget-s", type=float, default=150)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args(argv)
    ASKED.update(int(size) for size in args.block_m.split(",") if size)
    device = "cpu" if args.rehearse else "cuda"
    shapes = TINY if args.rehearse else {name: SHAPES[name] for name in args.shapes.split(",")}
    tokens = [int(number) for number in args.tokens.split(",")]
    end = time.monotonic() + args.budget_s
    broken: set[object] = set()
    kinds = args.weights.split(",")
    if device == "cuda" and "plain" in kinds:
        jobs = jobs_of(list(shapes.values()), tokens)
        with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
            for job, error in zip(jobs, pool.map(compile_one, jobs), strict=True):
                if error:
                    broken.add(job)
                    print("left out", job[1:3], short(job[3]), error)
        print(
            f"compiled {len(jobs)}, {len(broken)} broken; {end - time.monotonic():.0f} s left",
            flush=True,
        )
    rate = ceiling(device)
    print(
        f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}: sum reads {rate:.2f} TB/s",
        flush=True,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    table = []
    with (args.out / "experts.jsonl").open("w") as file:
        for (name, shape), kind in itertools.product(shapes.items(), kinds):
            weights = weights_of(shape, device, kind=kind)
            check(f"{name} {kind}", shape, weights, device)
            for number in tokens:
                for line in sweep(shape, weights, number, device, broken, end):
                    cut = line.pop("cut", None)
                    if isinstance(cut, ExpertsCut):
                        line["cut"] = f"m{cut.block_m} {short(cut.gate_up)} {short(cut.down)}"
                        share = float(line["tb_s"]) / rate  # type: ignore[arg-type]
                        figures = f"{line['us']:9.1f} us {line['tb_s']:5.2f} TB/s {share:5.2f}"
                        what = f"{name:8} {kind:9} {number:5} {line['layer']:6}"
                        table.append(f"{what} {figures}  {line['cut']}")
                    file.write(
                        json.dumps({"shape": name, "weights": kind, "tokens": number, **line})
                        + "\n"
                    )
            del weights
    print("\n".join(table))


if __name__ == "__main__":
    main()
