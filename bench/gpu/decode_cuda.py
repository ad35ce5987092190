"""Time the CUDA decode kernel against the two Triton kernels that it stands for.

    python bench/gpu/decode_cuda.py [--sweep] [--kv int8] [--block-size 16] [--out results.jsonl]

A CUDA graph of launches, each with its own cache of a layer, together more than the L2 cache holds.
All of a step's preparation (norms, rotation, the write) is in both. The bytes are those of K and V
as the format keeps them, scales included.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ridgeline.formats import KV_FORMATS, served
from ridgeline.kernels import paged_decode_cuda as cuda
from ridgeline.kernels import paged_decode_triton as in_triton
from ridgeline.kernels.paged_decode import DecodeBatch, paged_decode
from ridgeline.kernels.paged_kv import PagedKV
from ridgeline.kernels.qk_norm_rope_write import HeadNorms, qk_norm_rope_write
from ridgeline.kvcache.formats import KVFormat, Store
from ridgeline.registry import load

MODELS = {"8B": (32, 8, 128), "0.6B": (16, 8, 128)}
BATCHES = (1, 8, 32, 128, 256)
CONTEXTS = (192, 384, 2048, 8192)
BEYOND_L2_BYTES = 160 << 20
LEAST_LAUNCHES, MOST_LAUNCHES = 32, 256
MEASURED_S = 0.02
BYTES_PER_S = 4e12  # a guess, from which the number of replays is made
CONFIGS = [cuda.Config(stages, 1, least) for stages in (2, 3) for least in (1, 2, 4)]
MORE_CONFIGS = [cuda.Config(3, 1, least) for least in (3, 6, 8, 12)]
# Of fewer bits more steps are on their way, or more CTAs.
FEWER_BITS = [cuda.Config(4, 1, 2), cuda.Config(6, 1, 2), cuda.Config(3, 2, 2)]


@dataclass(frozen=True, slots=True)
class Work:
    """One step: a packed product, and the caches of the layers that are gone through."""

    heads: tuple[int, int, int]
    qkv: torch.Tensor
    kind: KVFormat
    stores: list[Store]
    table_L2D: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    norms: HeadNorms
    batch: DecodeBatch
    launches: int
    kv_bytes: int

    @property
    def scale(self) -> float:
        return float(self.heads[2] ** -0.5)

    def views(self, store: Store) -> PagedKV:
        found = self.kind.views(store, *self.heads[1:])
        if found is None:
            raise SystemExit(f"{self.kind.name} is not read in place")
        return found


def random_store(store: Store) -> Store:
    for tensor in store:
        if tensor.dtype == torch.float8_e4m3fn:
            for block in torch.split(tensor, 1 << 12):
                block.copy_(torch.randn(block.shape, device=block.device))
        elif tensor.element_size() == 1:
            tensor.random_(-127, 128) if tensor.dtype == torch.int8 else tensor.random_(0, 256)
        elif len(store) > 1:  # scales
            tensor.uniform_(0.005, 0.01)
        else:
            tensor.normal_()
    return store


def make_work(
    heads: tuple[int, int, int],
    num_requests: int,
    context: int,
    block_size: int,
    least_caches: int = 2,
    kv: str = "auto",
) -> Work:
    device, dtype = torch.device("cuda"), torch.bfloat16
    num_heads, kv_heads, size = heads
    blocks = -(-context // block_size)
    kind: KVFormat = load(served(KV_FORMATS), kv, "KV format")()
    kv_bytes = num_requests * context * kind.bytes_per_token(kv_heads, size, 2)
    launches = min(MOST_LAUNCHES, max(LEAST_LAUNCHES, -(-BEYOND_L2_BYTES // kv_bytes)))
    caches = min(launches, max(least_caches, -(-4 * BEYOND_L2_BYTES // kv_bytes)))
    shape = num_requests * blocks + 1, block_size, kv_heads, size
    order = torch.randperm(num_requests * blocks, device=device) + 1
    tables = order.int().view(num_requests, blocks)
    last = context - 1
    ones = torch.ones(size, device=device, dtype=dtype)
    return Work(
        heads=heads,
        qkv=torch.randn(num_requests, (num_heads + 2 * kv_heads) * size, device=device).to(dtype),
        kind=kind,
        stores=[random_store(kind.allocate(*shape, dtype, device)) for _ in range(caches)],
        table_L2D=torch.rand(context, 2, size, device=device),
        positions=torch.full((num_requests,), last, device=device),
        slots=tables[:, last // block_size].long() * block_size + last % block_size,
        norms=HeadNorms(ones, ones, 1e-6),
        batch=DecodeBatch(
            tables,
            torch.full((num_requests,), context, dtype=torch.int32, device=device),
            torch.arange(num_requests + 1, dtype=torch.int32, device=device),
            1,
            None,
            torch.arange(num_requests, device=device),
        ),
        launches=launches,
        kv_bytes=kv_bytes,
    )


def seconds(work: Work, once: Callable[[Store], None]) -> float:
    """Of one launch of `once`, which takes a layer's cache."""
    for store in work.stores[:2]:
        once(store)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(work.launches):
            once(work.stores[i % len(work.stores)])
    graph.replay()
    taken = work.launches * max(work.kv_bytes / BYTES_PER_S, 5e-6)
    replays = max(2, int(MEASURED_S / taken))
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / replays / work.launches


def by_triton(work: Work) -> float:
    num_heads, kv_heads, size = work.heads
    schedule = in_triton.make_schedule(
        work.qkv.device,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        max_requests=len(work.qkv),
        max_new=1,
    )
    in_triton.refresh(schedule, work.batch)

    def once(store: Store) -> None:
        kv = work.views(store)
        q = qk_norm_rope_write(
            work.qkv, work.table_L2D, work.positions, work.slots, kv, norms=work.norms
        )
        paged_decode(q, kv, work.batch, work.scale, schedule=schedule)

    return seconds(work, once)


def by_cuda(work: Work, config: cuda.Config) -> float:
    num_heads, kv_heads, size = work.heads
    schedule = cuda.make_schedule(
        work.qkv.device,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        block_size=work.views(work.stores[0]).k_NSKD.shape[1],
        max_requests=len(work.qkv),
        numbers=cuda.numbers_of(work.views(work.stores[0])),
        config=config,
    )
    cuda.refresh(schedule, work.batch)
    prologue = cuda.Prologue(work.table_L2D, work.slots, work.norms)
    out = torch.empty((len(work.qkv), num_heads, size), dtype=work.qkv.dtype, device="cuda")

    def once(store: Store) -> None:
        kv = work.views(store)
        cuda.decode_with_prologue(work.qkv, prologue, kv, work.batch, work.scale, schedule, out)

    return seconds(work, once)


def measure(model: str, work: Work, context: int, configs: list[cuda.Config]) -> Iterator[str]:
    """One line of JSON for each way, the best CUDA one printed beside Triton's."""
    shape = {"model": model, "kv": work.kind.name, "batch": len(work.qkv), "context": context}

    def line(way: str, taken: float, tuning: dict[str, int]) -> str:
        rate = {"us": taken * 1e6, "tb_per_s": work.kv_bytes / taken / 1e12}
        return json.dumps(shape | {"way": way} | rate | tuning)

    theirs = by_triton(work)
    yield line("triton pair", theirs, {})
    times = [(by_cuda(work, config), config) for config in configs]
    for taken, config in times:
        yield line("cuda", taken, asdict(config))
    best, config = min(times, key=lambda pair: pair[0])
    print(
        f"{model:5} {work.kind.name:5} {len(work.qkv):4} x {context:5}"
        f"  triton {theirs * 1e6:8.1f} us"
        f"  cuda {best * 1e6:8.1f} us  {work.kv_bytes / best / 1e12:5.2f} TB/s"
        f"  x{theirs / best:.2f}  s{config.stages} p{config.programs_per_sm}"
        f" least{config.min_steps}{' split' if config.split else ''}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="more tunings")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv", choices=served(KV_FORMATS), action="append")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--context", type=int, action="append")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines: list[str] = []
    for model, kv, num_requests, context in itertools.product(
        args.model or MODELS, args.kv or ["auto"], args.batch or BATCHES, args.context or CONTEXTS
    ):
        work = make_work(MODELS[model], num_requests, context, args.block_size, kv=kv)
        numbers = cuda.numbers_of(work.views(work.stores[0]))
        usual = cuda.choose_config(work.heads[2], work.heads[1], num_requests, numbers)
        more = MORE_CONFIGS if args.sweep else []
        configs = [usual, *(CONFIGS if kv == "auto" or args.sweep else FEWER_BITS), *more]
        lines += measure(model, work, context, configs)
        if args.out:
            args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
