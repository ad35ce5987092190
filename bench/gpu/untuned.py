"""What does the rule for sizes that nobody tuned gain over the library, in whole decode steps?

    PYTHONPATH=. python3 bench/gpu/untuned.py --out FILE [--rows 1,8,16,32,64] [--context 256]
        CONFIG_DIR [CONFIG_DIR ...]

A CONFIG_DIR needs a config.json only: weights are random. The captured greedy step of so many
requests is replayed with the library's products and with those of `kernels.untuned_tiles`, in
turns; sizes that `tiles.json` knows keep its tiles in both. FILE gets all times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.adapter import RidgelineEngine
from bench.gpu.tune_chain import Step
from ridgeline.benchmark.environment import environment
from ridgeline.kernels import untuned_tiles
from ridgeline.kernels.tiles import Tile

Rule = Callable[..., Tile | None]
ROUNDS = 5


def library(rows: int, outputs: int, inputs: int, **beside: bool) -> Tile | None:
    return None


RULES: dict[str, Rule] = {"library": library, "rule": untuned_tiles.untuned_tile}


def compared(step: Step, rules: Mapping[str, Rule]) -> dict[str, list[float]]:
    """Microseconds of a step by each rule, in turns."""
    times: dict[str, list[float]] = {name: [] for name in rules}
    for _ in range(ROUNDS):
        for name, rule in rules.items():
            with patch.object(untuned_tiles, "untuned_tile", rule):
                times[name].append(step.seconds() * 1e6)
    return times


def measured(config: str, args: argparse.Namespace, rules: Mapping[str, Rule]) -> list[Any]:
    engine = RidgelineEngine(
        config,
        load_format="random",
        dtype="bfloat16",
        max_model_len=2048,
        warm_up="off",
        speculate="off",
    )
    found = []
    for rows in map(int, args.rows.split(",")):
        step = Step(engine, rows, args.context, 0.0)
        times = compared(step, rules)
        step.end()
        found.append({"model": Path(config).name, "rows": rows, "us": times})
        print(told(found[-1]), flush=True)
    engine.close()
    return found


def told(row: Mapping[str, Any]) -> str:
    medians = {name: statistics.median(some) for name, some in row["us"].items()}
    first = next(iter(medians.values()))
    each = (f"{name} {us:8.1f} us ({us / first:.3f})" for name, us in medians.items())
    return f"{row['model']:12} {row['rows']:4} rows  {'  '.join(each)}"


def main(rules: Mapping[str, Rule] = RULES) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", metavar="CONFIG_DIR", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", default="1,8,16,32,64")
    parser.add_argument("--context", type=int, default=256)
    args = parser.parse_args()
    place = environment(torch.device("cuda"))
    rows: list[Any] = []
    for config in args.configs:
        rows += measured(config, args, rules)
        about = {"date": place.date, "device": place.device_name, **place.packages}
        record = {**about, "context": args.context, "rows": rows}
        args.out.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
