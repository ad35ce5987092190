"""Measure Ridgeline on one GPU with an engine-neutral workload file, and write what came out.

    python bench/gpu/run.py --workloads workloads.py --model DIR --out results.json \
        --decode 1,8,32 --prefill 512,2048 --mixed --repeats 3
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from adapter import RidgelineEngine

import ridgeline


def load_workloads(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("workloads", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"cannot read {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["workloads"] = module
    spec.loader.exec_module(module)
    return module


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def environment() -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "ridgeline": ridgeline.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--decode", type=numbers, default=[])
    parser.add_argument("--prefill", type=numbers, default=[])
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--prefix", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=9216)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    work = load_workloads(args.workloads)
    started = time.monotonic()
    engine = RidgelineEngine(
        args.model,
        load_format="random",
        dtype=args.dtype,
        device=args.device,
        max_model_len=args.max_model_len,
    )
    rows: list[dict[str, Any]] = []
    loaded_s = time.monotonic() - started
    print(f"loaded in {loaded_s:.1f} s", flush=True)
    for batch in args.decode:
        rows.append(work.measure_decode(engine, batch, 128, args.output_len, args.repeats))
        print("decode", batch, rows[-1].get("median"), flush=True)
    for length in args.prefill:
        rows.append(work.measure_prefill(engine, length, args.repeats))
        print("prefill", length, rows[-1]["median"], flush=True)
    if args.mixed:
        rows.append(work.measure_mixed(engine, 1))
        print("mixed256", rows[-1]["median"], flush=True)
    if args.prefix:
        rows.append(work.measure_prefix(engine, "cold", args.repeats))
        print("prefix", rows[-1]["median"], flush=True)
    record = environment() | {"model": Path(args.model).name, "load_s": loaded_s, "rows": rows}
    Path(args.out).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
