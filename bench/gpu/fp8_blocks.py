"""Which tiles are best for products with blocks of e4m3, beside bfloat16 by the library?

    PYTHONPATH=. python3 bench/gpu/fp8_blocks.py --out DIR [--rows 1,8,32,128,256,512]
        [--budget-s 60]

The four products of a layer of an 8B model, timed by replays of a graph over copies of the weights
that together exceed the L2 cache. DIR gets fp8_blocks.jsonl, one line a measurement; the table
shows the best tile, the one that is chosen, and the library, in us.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

from ridgeline.kernels.fp8_block_linear import BlockTile, Fp8Blocks, block_tile, num_blocks
from ridgeline.kernels.fp8_block_linear_triton import fp8_block_linear_triton
from ridgeline.kernels.quantize_rows import E4M3

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
COLD_BYTES = 200 << 20  # of copies: four times the L2 cache
REPLAYS = 10


def tiles(rows: int, outputs: int, inputs: int) -> Iterator[BlockTile]:
    """The one that is chosen and a few others: each is compiled for both widths of x."""
    yield block_tile(rows, outputs, inputs)
    if rows <= 16:
        cuts = itertools.product((16,), (32, 64, 128), (4,), (3, 5), (1, 2, 4, 8))
    elif rows <= 32:
        cuts = itertools.product((32,), (32, 64), (4,), (3, 5), (1, 2, 4, 8))
    elif rows <= 64:
        cuts = itertools.product((64,), (64,), (4,), (3, 4), (1, 2, 4))
    else:
        cuts = itertools.product((128,), (64,), (4, 8), (3, 4), (1, 2, 4))
    yield from itertools.starmap(BlockTile, cuts)


def seconds(products: Sequence[Callable[[], object]]) -> float:
    """Of one product: the best of some replays of all of them."""
    for product in products[:2]:
        product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product()
    best = float("inf")
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / len(products))
    return best


def copies(num_bytes: int) -> int:
    return max(2, -(-COLD_BYTES // num_bytes))


def measure(name: str, rows: int) -> Iterator[dict[str, object]]:
    outputs, inputs = SHAPES[name]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    plain = [
        torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
        for _ in range(copies(2 * outputs * inputs))
    ]
    line = {"shape": name, "rows": rows}
    taken = seconds([partial(functional.linear, x, w) for w in plain])
    yield line | {"tile": "library", "us": 1e6 * taken}
    del plain
    scale = torch.rand(num_blocks(outputs), num_blocks(inputs), device="cuda")
    codes = [
        torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16).to(E4M3)
        for _ in range(copies(outputs * inputs))
    ]
    weights = [Fp8Blocks(one, scale) for one in codes]
    for tile in dict.fromkeys(tiles(rows, outputs, inputs)):
        try:
            taken = seconds([partial(fp8_block_linear_triton, x, w, tile=tile) for w in weights])
        except Exception as error:
            yield line | {"tile": str(tile), "failed": str(error)[:200]}
            continue
        chosen = tile == block_tile(rows, outputs, inputs)
        yield line | {"tile": str(tile), "us": 1e6 * taken, "chosen": chosen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8,32,128,256,512")
    parser.add_argument("--budget-s", type=float, default=60.0)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + asked.budget_s
    with (asked.out / "fp8_blocks.jsonl").open("w", encoding="utf-8") as file:
        for rows, name in itertools.product(map(int, asked.rows.split(",")), SHAPES):
            found: list[dict[str, object]] = []
            for line in measure(name, rows):
                found.append(line)
                file.write(json.dumps(line) + "\n")
                if time.monotonic() > end:
                    break
            file.flush()
            timed = sorted((float(str(f["us"])), str(f["tile"])) for f in found if "us" in f)
            chosen = [f"chosen {f['us']:.1f}" for f in found if f.get("chosen")]
            library = [f"library {f['us']:.1f}" for f in found if f["tile"] == "library"]
            best = [f"{us:.1f} {tile}" for us, tile in timed if tile != "library"][:2]
            failed = f"{sum('failed' in f for f in found)} failed"
            print(f"{rows:4d} {name:8s}", *library, *chosen, *best, failed, sep=" | ", flush=True)
            if time.monotonic() > end:
                return


if __name__ == "__main__":
    main()
