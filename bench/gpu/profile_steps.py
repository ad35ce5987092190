"""Where does a decode step on this GPU go? Microseconds by kind of kernel, and between kernels.

    PYTHONPATH=. python3 bench/gpu/profile_steps.py --out profile.json --batch 1,32,256 \
        DIR [DIR ...] [--context 256] [--steps 20] [--weight-format fp8]

Each DIR needs a config.json only: weights are random. The steps are those of the engine as it
serves, captured and with the next one planned meanwhile, `--context` tokens behind each request.

Kernels may begin before the one before has ended, and then wait for it. So a kernel is given the
time from the last end before its own, and what lies between that end and its start is a gap: own
times and gaps together are the span of the steps. A profiler makes steps a little longer; "alone"
is a step by the clock without one. The first product of a layer is qkv, and so on: they are told
apart by their order, and only where a step has as many as the model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from bench.adapter import RidgelineEngine

PROMPT, WARM_STEPS = 128, 8
OF_LAYER, HEAD, PRODUCT, OTHER = ("qkv", "o", "gate and up", "down"), "LM head", "product", "other"
SECOND_HALF = "splitkreduce"  # of a library's product: a kernel that adds up what others have left
KINDS = {
    PRODUCT: (
        "stream_linear",
        "tile_linear",
        "small_linear",
        "invariant_linear",
        "fp8_linear",
        "large_m_linear",
        "nvjet",
        "gemm",
        "gemv",
        "cutlass",
        "xmma",
        SECOND_HALF,
    ),
    "experts": ("_expert_product", "_gate_up_row", "_down_row"),
    "order and sum of experts": ("_sort_pairs", "_gather_pairs", "_sum_pairs"),
    "choice of experts": ("_route_rows", "_choose_rows"),
    "absorbed queries and merged values": ("_absorb_kernel", "_merge_kernel"),
    "attention": ("paged_decode", "_decode_kernel", "_prefill_kernel", "fmha", "flash", "cudnn"),
    "plan of attention": ("schedule_kernel",),
    "RoPE and cache write": ("qk_norm_rope_write", "_write_kernel"),
    "norm": ("_add_norm", "rms_norm"),
    "SiLU": ("_silu_mul",),
    "rounding to fp8": ("_quantize_rows",),
    "draw": ("_draw_rows", "_adjust_rows", "_bracket_rows", "_gather_rows", "_select_rows"),
    "inputs of a step": ("_step_inputs", "_remember", "memcpy", "memset", "embedding", "index"),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One run of a kernel, as the profiler saw it."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class KindTime:
    """One kind of kernel in a step: how many, and the microseconds of all and of the middle one."""

    kind: str
    kernels: float
    us: float
    median_us: float
    names: tuple[str, ...]  # most frequent first


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Microseconds of a mean step. `span_us` is that of the kinds and `gaps_us`."""

    span_us: float
    gaps_us: float
    kernels: float
    kinds: tuple[KindTime, ...]


def kind_of(name: str) -> str:
    plain = name.lower()
    return next((kind for kind, marks in KINDS.items() if any(m in plain for m in marks)), OTHER)


def profile_of(launches: Iterable[Launch], num_steps: int, num_layers: int) -> StepProfile:
    """What `num_steps` steps of a model with `num_layers` layers come to."""
    ordered = sorted(launches, key=lambda launch: (launch.start_us, launch.end_us))
    if not ordered:
        raise SystemExit("the profiler saw no kernel: this needs a GPU")
    kinds = _kinds(ordered, num_steps, num_layers)
    times: dict[str, list[float]] = defaultdict(list)
    names: dict[str, Counter[str]] = defaultdict(Counter)
    last, gaps = ordered[0].start_us, 0.0
    for launch, kind in zip(ordered, kinds, strict=True):
        gaps += max(0.0, launch.start_us - last)
        times[kind].append(max(0.0, launch.end_us - max(last, launch.start_us)))
        names[kind][launch.name] += 1
        last = max(last, launch.end_us)
    found = [
        KindTime(
            kind,
            len(own) / num_steps,
            sum(own) / num_steps,
            statistics.median(own),
            tuple(name for name, _ in names[kind].most_common()),
        )
        for kind, own in times.items()
    ]
    span = (last - ordered[0].start_us) / num_steps
    ranked = tuple(sorted(found, key=lambda row: -row.us))
    return StepProfile(span, gaps / num_steps, len(ordered) / num_steps, ranked)


def _kinds(ordered: Sequence[Launch], num_steps: int, num_layers: int) -> list[str]:
    """The kind of each launch, products by their place in the step if all were recognised."""
    kinds = [kind_of(launch.name) for launch in ordered]
    firsts = [
        at
        for at, kind in enumerate(kinds)
        if kind == PRODUCT and SECOND_HALF not in ordered[at].name.lower()
    ]
    of_step = len(OF_LAYER) * num_layers + 1
    if len(firsts) != num_steps * of_step:
        return kinds
    for count, at in enumerate(firsts):
        place = count % of_step
        kinds[at] = HEAD if place == of_step - 1 else OF_LAYER[place % len(OF_LAYER)]
    for at, kind in enumerate(kinds):
        if kind == PRODUCT:
            kinds[at] = kinds[at - 1]
    return kinds


def measure(engine: RidgelineEngine, batch: int, context: int, num_steps: int) -> dict[str, Any]:
    """The profile of steps with `batch` requests and about `context` tokens behind each."""
    steps = engine.llm.engine
    rng, vocab = Random(batch), engine.llm.spec.vocab_size
    before = max(1, min(PROMPT, context - num_steps))
    length = context + 3 * num_steps + WARM_STEPS
    for _ in range(batch):
        prompt = [rng.randrange(vocab) for _ in range(before)]
        asked = SimpleNamespace(prompt=prompt, max_tokens=length - before, temperature=0.0)
        steps.add(engine.request(asked, 0.0))
    while min(r.num_computed_tokens for r in steps.scheduler.requests.values()) < before:
        steps.step()
    for _ in range(max(WARM_STEPS, context - num_steps - before)):
        steps.step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(num_steps):
        steps.step()
    torch.cuda.synchronize()
    alone_us = (time.perf_counter() - started) / num_steps * 1e6
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            steps.step()
        torch.cuda.synchronize()
    for request_id in list(steps.scheduler.requests):
        steps.abort(request_id)
    while not steps.is_idle:
        steps.step()
    found = profile_of(launches(profiler), num_steps, engine.llm.spec.num_layers)
    return {"batch": batch, "context": context, "alone_us": alone_us, **asdict(found)}


def launches(profiler: torch.profiler.profile) -> list[Launch]:
    return [
        Launch(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()  # type: ignore[no-untyped-call]
        if event.device_type.name == "CUDA"
    ]


def told(row: dict[str, Any]) -> str:
    """A table for a person."""
    lines = [
        f"{row['model']}, batch {row['batch']}, context {row['context']}: {row['alone_us']:.0f} us"
        f" alone, {row['span_us']:.0f} profiled, {row['kernels']:.0f} kernels"
    ]
    gaps = {"kind": "between kernels", "us": row["gaps_us"], "kernels": 0, "median_us": 0}
    for kind in [*row["kinds"], gaps | {"names": ("",)}]:
        share = kind["us"] / row["span_us"]
        lines.append(
            f"  {kind['us']:8.1f} us {share:6.1%} {kind['kernels']:6.1f} x {kind['median_us']:7.2f}"
            f"  {kind['kind']:21} {kind['names'][0][:60]}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="DIR")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", default="1,32,256", help="numbers, with commas")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20, help="in a profile")
    parser.add_argument("--weight-format")
    args = parser.parse_args()
    options = {"weight_format": args.weight_format} if args.weight_format else {}
    rows: list[dict[str, Any]] = []
    for model in args.models:
        engine = RidgelineEngine(
            model,
            load_format="random",
            dtype="bfloat16",
            max_model_len=9216,
            warm_up="off",
            **options,
        )
        for batch in (int(part) for part in args.batch.split(",")):
            row = measure(engine, batch, args.context, args.steps)
            rows.append({"model": Path(model).name, "weights": args.weight_format} | row)
            print(told(rows[-1]), flush=True)
            record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            args.out.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n", "utf-8")
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
