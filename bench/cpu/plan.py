"""How good and how fast is the planner on a dozen cases, beside the best of all candidates?

Run from the checkout: python -m bench.cpu.plan --output bench/cpu/results/DATE-plan.json
Every candidate of the grid is simulated; what counts is the goodput per dollar of the planner's
choice over that of the best, in runs that neither search has seen. Takes about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from ridgeline.benchmark.environment import environment
from ridgeline.clock import WallClock
from ridgeline.planner.plan import plan
from ridgeline.planner.search import Deployment
from tests.planner.exhaustive import CASES, Case, compare, table

COMMAND = shlex.join(["python", "-m", "bench.cpu.plan", *sys.argv[1:]])


def row(case: Case) -> dict[str, object]:
    clock = WallClock()
    began = clock.now()
    full = plan(case.question, lambda: random.Random(0))  # all limits, as the command does
    took_s = clock.now() - began
    found = compare(case)
    print(table([found]), f"{took_s:.1f} s", file=sys.stderr)
    return {
        "case": case.name,
        "rate_per_s": case.rate,
        "input": case.num_input,
        "output": case.num_output,
        "ttft_ms": case.ttft,
        "tpot_ms": case.tpot,
        "devices": case.devices,
        "chosen": _words(found.chosen),
        "best": _words(found.best),
        "goodput_per_dollar_ratio": found.ratio,
        "seconds_on_the_full_grid": took_s,
        "simulations_on_the_full_grid": full.num_validations,
        "candidates_on_the_full_grid": len(full.estimates),
    }


def _words(found: Deployment) -> dict[str, object]:
    candidate = found.estimate.candidate
    return {
        "what": f"{found.replicas} x {found.estimate.hardware.text}",
        "usd_per_hour": found.cost,
        "max_num_seqs": candidate.max_num_seqs,
        "max_num_batched_tokens": candidate.max_num_batched_tokens,
        "share_kept": found.validation.share,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    rows = [row(case) for case in CASES]
    where = asdict(environment(torch.device("cpu"))) | {"command": COMMAND}
    record = {"environment": where, "cases": rows}
    text = json.dumps(record, indent=2)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
