"""Does the simulator foresee what the living engine does on this CPU?

Run from the checkout:
    python -m bench.cpu.simulator_vs_engine --calibration record.json --output FILE.json

The engine serves Poisson arrivals and keeps its event log. Then (1) a fresh scheduler is given the
log's events at the recorded clock readings and must decide byte for byte the same, and (2) the
simulator serves the same arrivals under predicted step times, whose throughput and percentiles are
held against the measured ones. Predicted means: by the calibration, corrected by a scale and a
constant that an engine of this configuration has learned on other requests just before.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from msgspec import structs

from bench.simulator_comparison import Comparison, simulate
from bench.simulator_replay import Replay, decision_log, replay
from ridgeline.benchmark.environment import environment
from ridgeline.benchmark.jobs import Job, poisson, random_prompt
from ridgeline.benchmark.run import run_jobs
from ridgeline.build import build
from ridgeline.config import EngineConfig
from ridgeline.demo import DEFAULT
from ridgeline.observe.event_log import read_event_log
from ridgeline.scheduler.policies.step_times import LearnedPricer

WARM_UP = 16
LEARNING = 100  # requests
GOALS = {"output_tokens_per_s": 0.10}  # every other figure: 20 %
OTHER_GOAL = 0.20


def jobs(args: argparse.Namespace, vocab_size: int, count: int) -> list[Job]:
    """Lengths vary by half around their means."""
    rng = random.Random(args.seed)
    drawn = []
    for _ in range(count):
        prompt, answer = (
            rng.randint(mean // 2, mean + mean // 2) for mean in (args.input, args.output_tokens)
        )
        drawn.append(Job(random_prompt(rng, prompt, vocab_size), answer))
    return drawn


def warmed_up(config: EngineConfig, args: argparse.Namespace) -> tuple[float, LearnedPricer]:
    """Another engine of the same configuration serves other requests: first all at once, which
    gives the rate to ask for, then at that rate, from which it learns what it adds to a price."""
    built = build(config)
    size = built.spec.vocab_size
    run_jobs(built.engine, jobs(args, size, WARM_UP))
    run = run_jobs(built.engine, jobs(args, size, 4 * WARM_UP))
    rate = args.rate or args.load * 4 * WARM_UP / run.wall_s
    learned = LearnedPricer(built.pricer)
    built.run_record.listeners.append(learned)
    other = random.Random(args.seed + 1000)
    work = [
        Job(random_prompt(other, len(job.prompt), size), job.num_output_tokens)
        for job in jobs(args, size, LEARNING)
    ]
    run_jobs(built.engine, poisson(other, work, rate))
    built.close()
    return rate, learned


def record(args: argparse.Namespace, log: Path) -> tuple[float, LearnedPricer, str]:
    """Serve the load with the log on; the rate, what was learned before, the model's name."""
    config = EngineConfig(
        model=args.model,
        dtype=args.dtype,
        threads=args.threads,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        calibration=args.calibration,
        event_log=str(log) + ".before",
        device="cpu",
    )
    rate, learned = warmed_up(config, args)
    built = build(structs.replace(config, event_log=str(log)))
    work = poisson(random.Random(args.seed + 1), jobs(args, built.spec.vocab_size, args.num), rate)
    run_jobs(built.engine, work)
    built.close()
    return rate, learned, built.resolved.model_name


def table(
    replayed: Replay,
    found: Comparison,
    plain: Comparison,
    learned: LearnedPricer,
    rate: float,
    model: str,
) -> dict[str, object]:
    measured, predicted = found.summaries()
    errors = found.errors()
    return {
        "what": "simulator against the living engine",
        "model": model,
        "rate": rate,
        "num_requests": len(found.measured.requests),
        "num_steps": len(replayed.recorded),
        "decisions_equal": replayed.is_equal,
        "decision_log_bytes": len(decision_log(replayed.recorded)),
        "errors": errors,
        "errors_with_calibration_alone": plain.errors(),
        "learned": {"scale": learned.scale, "host_s": learned.host_s, "steps": learned.num_steps},
        "within_goal": {n: abs(e) <= GOALS.get(n, OTHER_GOAL) for n, e in errors.items()},
        "measured": asdict(measured),
        "predicted": asdict(predicted),
        "environment": asdict(environment(torch.device("cpu"))),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--num", type=int, default=500)
    parser.add_argument(
        "--rate", type=float, help="requests per second (default: LOAD of capacity)"
    )
    parser.add_argument("--load", type=float, default=0.5, help="share of the capacity")
    parser.add_argument("--input", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calibration", help="record of `ridgeline calibrate` (default: assumed)")
    parser.add_argument("--log", type=Path, help="keep the event log here")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = args.log or Path(folder, "events.jsonl")
        rate, learned, model = record(args, log)
        events = read_event_log(log)
    found, plain = simulate(events, learned), simulate(events)
    result = table(replay(events), found, plain, learned, rate, model)
    text = json.dumps(result, indent=1)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")
    print(
        json.dumps(
            {
                k: result[k]
                for k in (
                    "rate",
                    "num_steps",
                    "decisions_equal",
                    "errors",
                    "errors_with_calibration_alone",
                    "learned",
                )
            },
            indent=1,
        )
    )
    return 0 if result["decisions_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
