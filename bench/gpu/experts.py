"""Which tiles are best for grouped products of experts, and how near are they to the byte limit?

    PYTHONPATH=. python3 bench/gpu/experts.py --out DIR [--shapes mixtral,qwen3] [--tokens 1,8,32]
        [--workers 14] [--budget-s 150] [--rehearse]

Checks the layer against float32, then times products by replays of a graph whose calls route
differently. Kernels are compiled beforehand by many processes at once. DIR gets experts.jsonl, one
line a measurement; the table shows the best tiles, the whole layer with these and with the tiles
that are chosen, and which share of the card's rate of reading that is, counting each touched expert
once. `--rehearse`: all of it with tiny sizes, on a CPU through Triton's interpreter.
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
TINY = {"tiny": Shape(6, 2, 64, 64)}


def row_tiles(product: str) -> list[ExpertTile]:
    sizes = [(4, 512, 4), (4, 256, 2), (8, 256, 4), (2, 512, 2), (4, 512, 2), (8, 512, 4)]
    return [ExpertTile(n, k, w, s) for n, k, w in sizes for s in (2, 4)]


def tiles_of(block_m: int, product: str) -> list[ExpertTile]:
    gate_up = product == "gate_up"
    if block_m == 1:
        return row_tiles(product)
    if block_m <= 32:
        sizes = [(32, 64), (32, 128), (64, 64), (64, 128), (128, 64), (16, 128)]
        stages = {64: (4, 6), 128: (3, 4)}
        made = [ExpertTile(n, k, 4, s) for n, k in sizes for s in stages[k]]
        more = [ExpertTile(64, 64, 4, 5, tma=True), ExpertTile(64, 128, 4, 3, tma=True)]
        return made + more
    if block_m == 64:
        made = [ExpertTile(n, 64, w, s) for n, w, s in ((64, 4, 3), (64, 4, 4), (128, 4, 3))]
        made += [ExpertTile(n, 64, w, s, tma=True) for n, w, s in ((64, 4, 4), (128, 8, 4))]
        return made if gate_up else [*made, ExpertTile(256, 64, 8, 4), ExpertTile(64, 128, 4, 3)]
    made = [ExpertTile(64, 64, 4, 3), ExpertTile(64, 64, 8, 4), ExpertTile(128, 64, 8, 3)]
    made += [ExpertTile(128, 64, 8, 4), ExpertTile(128, 64, 8, 4, tma=True)]
    wide = [ExpertTile(256, 64, 8, 3), ExpertTile(256, 64, 8, 4), ExpertTile(128, 64, 4, 4)]
    return made if gate_up else made + wide


def blocks_m(shape: Shape, tokens: int) -> list[int]:
    if tokens == 1:
        return [1, 16]
    rows = tokens * shape.active / shape.experts
    return (
        [16]
        if rows <= 8
        else [16, 32, 64]
        if rows <= 48
        else [32, 64, 128]
        if rows <= 96
        else [64, 128]
    )


def cut_with(block_m: int, product: str, tile: ExpertTile) -> ExpertsCut:
    """This tile, and the other product by the smallest."""
    other = ExpertTile(4, 256) if block_m == 1 else ExpertTile(64, 64)
    return (
        ExpertsCut(block_m, tile, other)
        if product == "gate_up"
        else ExpertsCut(block_m, other, tile)
    )


def weights_of(shape: Shape, device: str, experts: int | None = None) -> tuple[StackedMatrix, ...]:
    number = experts or shape.experts
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = ((2 * shape.inner, shape.width), (shape.width, shape.inner))
    made = []
    for rows, columns in sizes:
        weight = torch.empty(number, rows, columns, dtype=dtype, device=device)
        made.append(StackedMatrix(weight.normal_(0.0, columns**-0.5)))
    return tuple(made)


def routed(shape: Shape, tokens: int, device: str) -> tuple[torch.Tensor, ...]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = torch.randn(tokens, shape.width, device=device).to(dtype)
    scores = torch.randn(tokens, shape.experts, device=device)
    weights, chosen = scores.softmax(-1).topk(shape.active)
    return x, weights, chosen.to(torch.int32)


def touched_bytes(shape: Shape, cases: Sequence[tuple[torch.Tensor, ...]], rows: int) -> float:
    """Of `rows` numbers of the width of the model, of each expert that a call needs; on average."""
    touched = sum(len(case[2].unique()) for case in cases) / len(cases)
    return touched * rows * shape.width * cases[0][0].element_size()


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
    for block_m in blocks_m(shape, tokens):
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
    bytes_read = touched_bytes(shape, cases, 3 * shape.inner)
    for block_m in blocks_m(shape, tokens):
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
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--budget-s", type=float, default=150)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args(argv)
    device = "cpu" if args.rehearse else "cuda"
    shapes = TINY if args.rehearse else {name: SHAPES[name] for name in args.shapes.split(",")}
    tokens = [int(number) for number in args.tokens.split(",")]
    end = time.monotonic() + args.budget_s
    broken: set[object] = set()
    if device == "cuda":
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
        for name, shape in shapes.items():
            weights = weights_of(shape, device)
            check(name, shape, weights, device)
            for number in tokens:
                for line in sweep(shape, weights, number, device, broken, end):
                    cut = line.pop("cut", None)
                    if isinstance(cut, ExpertsCut):
                        line["cut"] = f"m{cut.block_m} {short(cut.gate_up)} {short(cut.down)}"
                        share = float(line["tb_s"]) / rate  # type: ignore[arg-type]
                        figures = f"{line['us']:9.1f} us {line['tb_s']:5.2f} TB/s {share:5.2f}"
                        table.append(
                            f"{name:8} {number:5} {line['layer']:7} {figures}  {line['cut']}"
                        )
                    file.write(json.dumps({"shape": name, "tokens": number, **line}) + "\n")
            del weights
    print("\n".join(table))


if __name__ == "__main__":
    main()
