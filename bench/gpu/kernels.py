"""Time paged decode attention by graph replays, and print how much of the memory's rate it has.

    python bench/gpu/kernels.py [--sweep] [--block-size 16] [--out results.jsonl]

Each replay goes once over several layers' K and V that together exceed the L2 cache. The bytes are
those of K and V. `--sweep` tries other tunings and prints the best of each shape.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from ridgeline.kernels.paged_decode import DecodeBatch, paged_decode
from ridgeline.kernels.paged_decode_triton import Config, make_schedule, refresh
from ridgeline.kernels.paged_kv import PagedKV

MODELS = {"8B": (32, 8, 128), "0.6B": (16, 8, 128)}
BATCHES = (1, 8, 32, 128, 256)
CONTEXTS = (512, 2048, 8192)
BEYOND_L2_BYTES = 256 << 20
MAX_LAYERS = 64
REPLAYS = 20


def tunings(sweep: bool) -> Iterator[Config]:
    if not sweep:
        yield Config()
        return
    for block_n, warps, stages, per_sm, least in itertools.product(
        (32, 64, 128), (2, 4, 8), (2, 3), (1, 2, 4), (1, 2, 4)
    ):
        yield Config(block_n, warps, stages, per_sm, least)


def seconds(layers: int, work: list[torch.Tensor], batch: DecodeBatch, config: Config) -> float:
    """Of one layer. `work`: q, then K and V of each layer in one tensor [N, S, 2, K, D]."""
    q, *caches = work
    num_kv_heads, head_dim = caches[0].shape[3:]
    schedule = make_schedule(
        q.device,
        num_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_requests=q.shape[0],
        max_new=1,
        config=config,
    )
    refresh(schedule, batch)
    out = torch.empty_like(q)

    def once() -> None:
        for kv in caches:
            views = PagedKV(*kv.unbind(2))
            paged_decode(q, views, batch, head_dim**-0.5, schedule=schedule, out_THD=out)

    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    graph.replay()
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / REPLAYS / layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--context", type=int, action="append")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, lines = torch.device("cuda"), []
    for model, batch_size, context in itertools.product(
        args.model or MODELS, args.batch or BATCHES, args.context or CONTEXTS
    ):
        heads, kv_heads, dim = MODELS[model]
        blocks = batch_size * -(-context // args.block_size)
        num_bytes = batch_size * context * 2 * kv_heads * dim * 2
        layers = min(MAX_LAYERS, max(2, -(-BEYOND_L2_BYTES // num_bytes)))
        shape = (blocks + 1, args.block_size, 2, kv_heads, dim)
        work = [torch.randn(batch_size, heads, dim, device=device, dtype=torch.bfloat16)]
        work += [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(layers)]
        tables = (torch.randperm(blocks, device=device) + 1).int().view(batch_size, -1)
        lengths = torch.full((batch_size,), context, dtype=torch.int32, device=device)
        starts = torch.arange(batch_size + 1, dtype=torch.int32, device=device)
        batch = DecodeBatch(tables, lengths, starts, 1, None)
        times: list[tuple[float, Config]] = []
        for config in tunings(args.sweep):
            try:
                times.append((seconds(layers, work, batch, config), config))
            except Exception as error:  # too much shared memory, say: the others go on
                print(f"  {config}: {type(error).__name__}: {str(error)[:80]}")
        for place, (taken, config) in enumerate(sorted(times, key=lambda pair: pair[0])):
            rate = num_bytes / taken / 1e12
            row = {"model": model, "batch": batch_size, "context": context, "us": taken * 1e6}
            tuning = {name: getattr(config, name) for name in Config.__slots__}
            lines.append(json.dumps(row | {"tb_per_s": rate} | tuning))
            if place > 2:
                continue
            print(
                f"{model:5} {batch_size:4} x {context:5}  {taken * 1e6:8.1f} us  {rate:5.2f} TB/s"
                f"  n{config.block_n} w{config.num_warps} s{config.num_stages}"
                f" p{config.programs_per_sm} least{config.min_tiles}",
                flush=True,
            )
        del work, batch
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
