"""How fast is native attention on this CPU? GB/s of decodes out of memory, GFLOP/s of prompts.

    python bench/cpu/attention.py [--threads 2] [--kv int8]

Decodes go through several caches in turn, so that keys and values come from memory as they do
between the layers of a model. JSON lines; the 10th percentile and the median of all calls.
"""

from __future__ import annotations

import argparse
import json
from time import perf_counter

import torch

from ridgeline.kernels.cpu import native
from ridgeline.kernels.cpu.attention import AttentionBatch, cpu_attention
from ridgeline.kernels.qk_norm_rope_write import PagedKV
from ridgeline.kvcache import KVFormat
from ridgeline.kvcache.formats import Int8KV, PlainKV

# (heads, KV heads, head size): models A and B of the peers' measurements.
MODELS = {"A": (32, 8, 64), "B": (6, 6, 48)}
DECODES = ((1, 256), (8, 256), (1, 8192), (8, 1024))  # requests, keys
PROMPTS = (512, 2048)
BLOCK = 16
CACHES = 8

FORMATS: dict[str, type[KVFormat]] = {"auto": PlainKV, "int8": Int8KV}

Case = tuple[torch.Tensor, PagedKV, AttentionBatch]


def make_case(
    model: str, requests: int, keys: int, new: int, dtype: torch.dtype, kv: KVFormat
) -> Case:
    heads, kv_heads, size = MODELS[model]
    blocks = -(-keys // BLOCK)
    count = requests * blocks + 1
    store = kv.allocate(count, BLOCK, kv_heads, size, dtype, torch.device("cpu"))
    for block in range(count):
        slots = torch.arange(block * BLOCK, (block + 1) * BLOCK)
        kv.write(store, slots, torch.randn(BLOCK, 2 * kv_heads * size).to(dtype))
    views = kv.views(store, kv_heads, size)
    if views is None:
        raise SystemExit(f"{kv.name} is not read in place")
    tables = torch.randperm(requests * blocks).add_(1).int().view(requests, blocks)
    lens = torch.full((requests,), keys, dtype=torch.int32)
    starts = torch.arange(0, requests * new + 1, new, dtype=torch.int32)
    q_THD = torch.randn(requests * new, heads, size).to(dtype)
    return q_THD, views, AttentionBatch(tables, lens, starts)


def seconds(cases: list[Case], rounds: int) -> tuple[float, float]:
    """10th percentile and median of a call."""
    found: list[float] = []
    for _ in range(rounds):
        for q_THD, kv, batch in cases:
            begun = perf_counter()
            cpu_attention(q_THD, kv, batch, q_THD.shape[2] ** -0.5)
            found.append(perf_counter() - begun)
    found.sort()
    return found[len(found) // 10], found[len(found) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--kv", choices=FORMATS, default="auto")
    asked = parser.parse_args()
    dtype = getattr(torch, asked.dtype)
    if native.library() is None:
        raise SystemExit("no native CPU kernels here")
    native.set_threads(asked.threads)
    kv = FORMATS[asked.kv]()
    setting = {"level": native.level(), "threads": asked.threads, "dtype": asked.dtype}
    print(json.dumps(setting | {"kv": kv.name}))
    for model, (heads, kv_heads, size) in MODELS.items():
        for requests, keys in DECODES:
            cases = [make_case(model, requests, keys, 1, dtype, kv) for _ in range(CACHES)]
            fast, median = seconds(cases, 12)
            num_bytes = requests * keys * kv.bytes_per_token(kv_heads, size, dtype.itemsize)
            line = {"model": model, "decodes": requests, "keys": keys, "us": round(fast * 1e6, 1)}
            line |= {"median_us": round(median * 1e6, 1), "GB/s": round(num_bytes / fast / 1e9, 1)}
            print(json.dumps(line))
        for tokens in PROMPTS:
            fast, median = seconds([make_case(model, 1, tokens, tokens, dtype, kv)], 6)
            work = 2 * heads * size * tokens * tokens  # what is seen: half of all scores
            line = {"model": model, "prompt": tokens, "ms": round(fast * 1e3, 2)}
            line |= {"median_ms": round(median * 1e3, 2), "GFLOP/s": round(work / fast / 1e9, 1)}
            print(json.dumps(line))


if __name__ == "__main__":
    main()
