"""Does the engine's own read-out agree with a clock beside it?

    python bench/gpu/readout.py [--calibration record.json] [--batch 1,8,32,128,256] \
        [--weight-format fp8] [--out readout.json] DIR [DIR ...]

DIR needs a config.json only: weights are random. Requests of 128 random tokens and 256 more run at
once, a second time. In the middle 200 of their common decode steps the read-out gives seconds,
bytes, the share of the read rate and measured over expected time; the clock is that of whoever
calls `step`. Where no step waits for Python, steps of a read-out and of the clock are equally long.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

from bench.adapter import RidgelineEngine, RunResult
from ridgeline.observe.run import Totals
from ridgeline.observe.run_summary import run_summary, snapshot
from ridgeline.step import Listener, StepRecord

PROMPT, ANSWER = 128, 256
FIRST, LAST = 30, 230  # of the decode steps that all requests share
MARGIN = 5  # token ids at either end of the vocabulary that are left out


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0


class Watch(Listener):
    """Snapshots of the engine's sums, before and after the steps that count."""

    def __init__(self, engine: RidgelineEngine, batch: int) -> None:
        self.engine, self.batch = engine, batch
        self.num_seen = 0
        self.totals: list[Totals] = []

    def on_step(self, record: StepRecord) -> None:
        if record.num_new_tokens == self.batch and len(record.plan.scheduled) == self.batch:
            self.num_seen += 1
            if self.num_seen in (FIRST, LAST):
                self.totals.append(snapshot(self.engine.llm.run_record.totals))


def clock_ms(result: RunResult, batch: int) -> float:
    ends = [end for end, tokens in result.steps if tokens == batch][FIRST:LAST]
    return (ends[-1] - ends[0]) / (len(ends) - 1) * 1e3


def measure(engine: RidgelineEngine, batch: int) -> dict[str, float | str]:
    llm, rng = engine.llm, random.Random(batch)

    def requests() -> list[Asked]:
        ids = range(MARGIN, llm.spec.vocab_size - MARGIN)
        return [Asked(rng.choices(ids, k=PROMPT), ANSWER) for _ in range(batch)]

    engine.run(requests())
    watch = Watch(engine, batch)
    llm.engine.listeners.append(watch)
    result = engine.run(requests())
    llm.engine.listeners.remove(watch)
    before, after = watch.totals
    read = run_summary("steps", llm.run_record.pricer, after, before)
    seen_ms = clock_ms(result, batch)
    return {
        "batch": batch,
        "clock_ms": seen_ms,
        "tok_s": batch / seen_ms * 1e3,
        "read_out_ms": (read.measured_s + read.host_s) / read.num_steps * 1e3,
        "share_of_bandwidth": read.share_of_bandwidth,
        "over_expected": read.expected_ratio,
        "line": read.text(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="DIR")
    parser.add_argument("--calibration")
    parser.add_argument("--batch", default="1,8,32,128,256")
    parser.add_argument("--weight-format", default="plain")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for model in args.models:
        engine = RidgelineEngine(
            model,
            load_format="random",
            device=args.device,
            dtype=args.dtype,
            weight_format=args.weight_format,
            calibration=args.calibration,
        )
        for batch in map(int, args.batch.split(",")):
            row = {"model": Path(model).name, "weight_format": args.weight_format}
            rows.append(row | measure(engine, batch))
            told = {k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}
            print(json.dumps(told), flush=True)
        engine.close()
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
