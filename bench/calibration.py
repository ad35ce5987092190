"""Calibrate a machine, then hold predictions against steps that the calibration has not seen.

    python bench/calibration.py --out table.json --device cuda --dtype bfloat16 DIR_8B DIR_0.6B

Each DIR needs only a config.json: weights are random. `--record FILE` uses a calibration made
before instead of making one; `--save FILE` keeps the one that is made.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ridgeline.build import Built, build
from ridgeline.config import EngineConfig
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Precision, Setup
from ridgeline.costing import engine_host
from ridgeline.devices import open_device
from ridgeline.errors import RidgelineError
from ridgeline.measure.calibrate import Question, calibrate
from ridgeline.measure.points import Progress, described
from ridgeline.measure.steps import StepBench, StepTimes, step_bench
from ridgeline.measure.stopwatch import typical
from ridgeline.records import Record, read_record, write_record
from ridgeline.step import StepShape

ROUNDS = 2
BUDGET_S = 0.4  # of one point, per round
MOST_STEPS = 20


@dataclass(frozen=True, slots=True)
class Unseen:
    """Steps to look at: (requests, context) that decode, prompts that are read."""

    decodes: tuple[tuple[int, int], ...]
    prefills: tuple[int, ...]

    def fitting(self, max_tokens: int) -> Unseen:
        """Without what does not fit in a cache of `max_tokens`."""
        return Unseen(
            tuple((b, s) for b, s in self.decodes if b * (s + 128) <= max_tokens),
            tuple(n for n in self.prefills if n <= max_tokens),
        )


UNSEEN = {
    "cpu": Unseen(
        tuple((b, s) for b in (1, 2, 6, 12, 32) for s in (64, 200, 700, 2048)),
        (16, 50, 200, 800, 2048),
    ),
    "cuda": Unseen(
        tuple((b, s) for b in (1, 4, 16, 48, 96, 200) for s in (150, 600, 1800, 7000)),
        (16, 50, 200, 600, 1500, 4000, 7500),
    ),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One step: what was predicted, what was measured, and how far off that is (signed)."""

    model: str
    dtype: str
    what: str
    step: str
    measured_s: float
    predicted_s: float
    origin: str

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def look(
    model: str,
    dtype: str,
    record: Record,
    unseen: Unseen,
    progress: Progress,
    *,
    device: str = "auto",
    threads: int | None = None,
) -> list[Row]:
    """Predict and measure the steps of `model` (a folder with config.json; random weights)."""
    config = EngineConfig(
        model=model,
        load_format="random",
        dtype=dtype,
        device=device,
        threads=threads,
        max_num_seqs=max(rows for rows, _ in unseen.decodes),
        max_num_batched_tokens=max(unseen.prefills),
    )
    rows = _look(build(config), record, unseen, progress)
    forget()
    return rows


def forget() -> None:
    """Give the memory of an engine that is no longer used back to the next one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _look(built: Built, record: Record, unseen: Unseen, progress: Progress) -> list[Row]:
    tokens = (built.resolved.num_blocks - 2) * built.resolved.block_size
    fitting = unseen.fitting(tokens)
    constants = record.calibration
    pricer = Pricer(
        Setup(
            built.spec,
            record.device,
            precision=Precision(built.resolved.dtype),
            calibration=replace(constants, host=engine_host(constants.host, built.resolved)),
        )
    )
    return _rows(built, pricer, fitting, progress)


def _rows(built: Built, pricer: Pricer, unseen: Unseen, progress: Progress) -> list[Row]:
    bench = step_bench(built)
    length = built.resolved.max_model_len - 128
    wanted: list[tuple[str, tuple[int, ...]]] = [
        *(("decode", one) for one in unseen.decodes if one[1] <= length),
        *(("prefill", (n,)) for n in unseen.prefills if n <= length),
    ]
    found: list[list[StepTimes]] = [[] for _ in wanted]
    for turn in range(ROUNDS):
        for number, (what, sizes) in enumerate(wanted):
            stage = f"unseen steps of {built.resolved.model_name}, {built.resolved.dtype}"
            progress(stage, turn * len(wanted) + number, ROUNDS * len(wanted))
            found[number].append(_measure(bench, what, sizes, found[number]))
    return [
        _row(built, pricer, what, times) for (what, _), times in zip(wanted, found, strict=True)
    ]


def _measure(
    bench: StepBench, what: str, sizes: tuple[int, ...], earlier: Sequence[StepTimes]
) -> StepTimes:
    steps = 4 if not earlier else int(BUDGET_S / typical(earlier[0].seconds))
    steps = max(1, min(MOST_STEPS, steps))
    if what == "prefill":
        return bench.prefill(sizes[0], steps)
    return bench.decode(sizes[0], sizes[1], steps)


def _row(built: Built, pricer: Pricer, what: str, times: Sequence[StepTimes]) -> Row:
    shape: StepShape = times[-1].shape
    measured = typical([seconds for each in times for seconds in each.seconds])
    return Row(
        built.resolved.model_name,
        built.resolved.dtype,
        what,
        described(shape),
        measured,
        pricer.seconds(shape),
        pricer.cost(shape).origin,
    )


def median_error(rows: Iterable[Row]) -> float:
    """Median of the sizes of the errors."""
    return statistics.median(abs(row.error) for row in rows)


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
