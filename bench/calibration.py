"""Calibrate a machine, then hold predictions against steps that the calibration has not seen.

    python bench/calibration.py --out table.json --device cuda --dtype bfloat16 DIR_8B DIR_0.6B

Each DIR needs only a config.json: weights are random. `--record FILE` uses a calibration made
before instead of making one; `--save FILE` keeps the one that is made.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ridgeline.devices import open_device
from ridgeline.errors import RidgelineError
from ridgeline.measure.calibrate import Question, calibrate
from ridgeline.measure.unseen import UNSEEN, Row, Unseen, look, median_error
from ridgeline.records import Record, read_record, write_record

QUICK = {
    "cpu": Unseen(((1, 64), (2, 200), (6, 120), (20, 80)), (20, 100, 300)),
    "cuda": Unseen(((1, 600), (4, 1800), (48, 600), (96, 150)), (50, 600, 4000)),
}


def say(stage: str, done: int, total: int) -> None:
    if done == 0:
        print(stage, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", help="folders with config.json")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", action="append", default=[], help="may be given several times")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--record", type=Path, help="a calibration made before")
    parser.add_argument("--save", type=Path, help="where to keep the calibration")
    args = parser.parse_args()
    try:
        return run(args)
    except RidgelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    record, about = made(args)
    calibrated_s = time.monotonic() - started
    kind = open_device(args.device).torch_device.type
    unseen = (QUICK if args.quick else UNSEEN)[kind]
    dtypes = args.dtype or (["float32", "bfloat16"] if kind == "cpu" else ["bfloat16"])
    rows: list[Row] = []
    for model in args.models:
        for dtype in dtypes:
            rows += look(
                model, dtype, record, unseen, say, device=args.device, threads=args.threads
            )
    table = {
        **about,
        "device": record.device.name,
        "calibrate_s": calibrated_s,
        "median_error": median_error(rows),
        "by_class": by_class(rows),
        "rows": [asdict(row) | {"error": row.error} for row in rows],
    }
    args.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    show(rows)
    return 0


def made(args: argparse.Namespace) -> tuple[Record, dict[str, Any]]:
    """The calibration of `--record`, or a new one, and what it says of its making."""
    if args.record is not None:
        return read_record(args.record), {"record": args.record.name}
    question = Question(args.device, tuple(args.dtype), args.threads, args.quick)
    answer = calibrate(question, say)
    if args.save is not None:
        write_record(answer.record, args.save)
    about = {key: answer.record[key] for key in ("about", "versions", "date", "errors")}
    return Record(answer.device, answer.fit.calibration), about


def by_class(rows: list[Row]) -> dict[str, float]:
    """Median error of each model, dtype and kind of step."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row.model} {row.dtype} {row.what}", []).append(row)
    return {name: median_error(group) for name, group in groups.items()}


def show(rows: list[Row]) -> None:
    for row in rows:
        print(
            f"{row.model:20} {row.dtype:9} {row.step:24} measured {row.measured_s * 1e3:9.3f} ms"
            f"  predicted {row.predicted_s * 1e3:9.3f} ms  {row.error:+7.1%}  {row.origin}"
        )
    for name, error in by_class(rows).items():
        print(f"median error {name:40} {error:.1%}")
    print(f"median error of all: {median_error(rows):.1%}")


if __name__ == "__main__":
    sys.exit(main())
