"""What does it cost to run a family through Transformers' modules?

    PYTHONPATH=. python3 bench/implementations.py --json out.json
    PYTHONPATH=. python bench/implementations.py --device cpu --dtype float32 --layers 2 \
        --models llama-1b --json out.json

One family, that is ours, by both implementations in turns, with random weights: the median step of
so many requests, and the time of a prompt of 512 tokens. `ratio` is transformers / native.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.adapter import RidgelineEngine
from bench.two_trees import FIRST, SHAPES, Run, environment, one_run, requests

MAX_MODEL_LEN = 1024


def seconds(engine: RidgelineEngine, run: Run, args: argparse.Namespace) -> float:
    what, number, _ = run
    engine.reset_prefix_cache()
    result = engine.run(requests(run, engine.llm.spec.vocab_size, args))
    if what:
        return result.wall
    whole = [when for when, tokens in result.steps if tokens == number][FIRST:]
    return statistics.median(b - a for a, b in pairwise(whole))


def compare(name: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    layers = {"num_hidden_layers": args.layers} if args.layers else {}
    (folder / "config.json").write_text(json.dumps(SHAPES[name] | layers))
    options = {"device": args.device, "dtype": args.dtype, "load_format": "random"}
    options |= {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 64, "num_blocks": 4096}
    options |= {"speculate": "off"}
    engines = {
        way: RidgelineEngine(str(folder), implementation=way, **options)
        for way in ("native", "transformers")
    }
    rows = []
    for run in args.runs:
        taken: dict[str, list[float]] = {way: [] for way in engines}
        for number in range(args.rounds + 1):
            for way, engine in engines.items():
                if (took := seconds(engine, run, args)) and number:
                    taken[way].append(took)
        native, other = (statistics.median(taken[way]) for way in engines)
        row = {"model": name, "work": f"{run[0]}{run[1]}", "layers": engine.llm.spec.num_layers}
        rows.append(row | {"native_s": native, "transformers_s": other, "ratio": other / native})
        print(f"{name:14} {row['work']:5} native {native * 1e3:9.3f} ms, transformers "
              f"{other * 1e3:9.3f} ms, ratio {other / native:.2f}", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", default=["llama-3.1-8b", "qwen3-0.6b"])
    add("--runs", nargs="+", type=one_run, default=[one_run(x) for x in ("1", "8", "64", "p512")])
    add("--device", default="cuda")
    add("--dtype", default="bfloat16")
    add("--layers", type=int, help="fewer of them")
    add("--prompt-len", type=int, default=128)
    add("--steps", type=int, default=48)
    add("--rounds", type=int, default=3)
    add("--json", type=Path)
    args = parser.parse_args()
    record = environment(args.device) | {"dtype": args.dtype, "rows": []}
    for name in args.models:
        with tempfile.TemporaryDirectory() as temp:
            record["rows"] += compare(name, Path(temp), args)
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
