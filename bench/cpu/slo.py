"""Does policy slo get more useful work out of an overloaded engine than first come, first served?

Run from the checkout: python bench/cpu/slo.py --output bench/cpu/results/DATE-slo.json
The engine is the real one with a small model. First it is saturated, which says what it can carry
and how long a token then takes. Then requests arrive at 1.5 times that rate, the same ones for both
policies. Goodput is requests per second that had their first token and the others as promised.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ridgeline.benchmark.environment import environment
from ridgeline.build import Built, build
from ridgeline.clock import WallClock
from ridgeline.config import EngineConfig
from ridgeline.engine import Engine
from ridgeline.errors import RequestFault
from ridgeline.request import Request, RequestOutput, SamplingParams
from ridgeline.simulator.report import spread

COMMAND = shlex.join(["python", "bench/cpu/slo.py", *sys.argv[1:]])
WARM_UP = 12  # requests, one after the other: caches, and what the policy learns of step times
SATURATED_RUNS = 3
TPOT_SLACK = 1.5  # the promise per token, in times of what the saturated engine takes


@dataclass(frozen=True, slots=True)
class Work:
    at_s: float
    prompt: tuple[int, ...]
    num_output: int


@dataclass(slots=True)
class Seen:
    """What one request saw; seconds since the run began."""

    arrived_s: float
    is_refused: bool = False
    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int = 0
    is_done: bool = False

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        if self.first_s is None or self.last_s is None or not self.is_done:
            return None
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1)

    def keeps(self, ttft_s: float, tpot_s: float) -> bool:
        ttft, tpot = self.ttft_s, self.tpot_s
        return ttft is not None and tpot is not None and ttft <= ttft_s and tpot <= tpot_s


def draw(args: argparse.Namespace, vocab_size: int, count: int, rate: float) -> list[Work]:
    """Poisson arrivals (all at once for rate 0); lengths vary by half around their means."""
    rng, at_s, work = random.Random(args.seed), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate) if rate else 0.0
        num_input, num_output = (
            rng.randint(mean // 2, mean + mean // 2) for mean in (args.input, args.output_tokens)
        )
        prompt = tuple(rng.randrange(vocab_size) for _ in range(num_input))
        work.append(Work(at_s, prompt, num_output))
    return work


def drive(engine: Engine, work: Sequence[Work], label: str) -> list[Seen]:
    """Add each request when it is due, whatever the engine does, and step until all are over."""
    clock = WallClock()
    began, seen, coming = clock.now(), [], 0
    while coming < len(work) or not engine.is_idle:
        now = clock.now() - began
        while coming < len(work) and work[coming].at_s <= now:
            seen.append(_add(engine, work[coming], f"{label}-{coming}", clock.now()))
            coming += 1
        if engine.is_idle:
            if coming < len(work):
                time.sleep(max(0.0, work[coming].at_s - (clock.now() - began)))
            continue
        for output in engine.step():
            _note(seen, output, clock.now() - began)
    return seen


def _add(engine: Engine, work: Work, name: str, now: float) -> Seen:
    sampling = SamplingParams(max_tokens=work.num_output, ignore_eos=True, temperature=0.0)
    seen = Seen(work.at_s)
    try:
        engine.add(Request(name, work.prompt, sampling, now))
    except RequestFault as fault:
        if fault.code != "overloaded":
            raise
        seen.is_refused = True
    return seen


def _note(seen: list[Seen], output: RequestOutput, now: float) -> None:
    one = seen[int(output.request_id.rpartition("-")[2])]
    if output.new_token_ids:
        one.first_s = now if one.first_s is None else one.first_s
        one.last_s = now
        one.num_tokens += len(output.new_token_ids)
    one.is_done = one.is_done or output.finish_reason is not None


# ---------------------------------------------------------------------- the comparison


def open_engine(args: argparse.Namespace, **promise: object) -> Built:
    config = EngineConfig(
        model=args.model,
        device="cpu",
        max_num_seqs=args.seats,
        max_num_batched_tokens=args.budget,
        max_model_len=2 * (args.input + args.output_tokens),
        threads=args.threads,
        prefix_caching=False,
        **promise,  # type: ignore[arg-type]
    )
    built = build(config)
    for one in draw(args, built.spec.vocab_size, WARM_UP, 0.0):
        drive(built.engine, [one], "warm")
    return built


def saturate(args: argparse.Namespace) -> tuple[float, float]:
    """(requests a second, seconds a token) of an engine with more work than it can do; the best of
    a few runs, as others may use the machine too."""
    built = open_engine(args)
    work = draw(args, built.spec.vocab_size, 4 * args.seats, 0.0)
    found = []
    for run in range(SATURATED_RUNS):
        seen = drive(built.engine, work, f"full{run}")
        wall_s = max(one.last_s or 0.0 for one in seen)
        found.append((len(work) / wall_s, spread(one.tpot_s for one in seen).mean or 0.0))
    built.close()
    return max(found)


def overload(
    args: argparse.Namespace, rate: float, ttft_s: float, tpot_s: float, policy: str
) -> dict[str, object]:
    promise: dict[str, object] = {"policy": policy}
    if policy == "slo":
        promise |= {"ttft_slo_ms": ttft_s * 1e3, "tpot_slo_ms": tpot_s * 1e3}
    built = open_engine(args, **promise)
    work = draw(args, built.spec.vocab_size, max(1, round(rate * args.seconds)), rate)
    seen = drive(built.engine, work, policy)
    built.close()
    good = sum(one.keeps(ttft_s, tpot_s) for one in seen)
    refused = sum(one.is_refused for one in seen)
    return {
        "policy": policy,
        "requests": len(seen),
        "refused": refused,
        "kept": good,
        "broken": len(seen) - refused - good,
        "goodput_per_s": good / work[-1].at_s,
        "finished_per_s": (len(seen) - refused) / max(one.last_s or 0.0 for one in seen),
        "ttft_s": asdict(spread(one.ttft_s for one in seen)),
        "tpot_s": asdict(spread(one.tpot_s for one in seen)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo:chat")
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--seats", type=int, default=16)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--overload", type=float, default=1.5)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--tpot-ms", type=float, help="default: 1.5 times that of saturation")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()

    capacity, saturated_s = saturate(args)
    ttft_s = args.ttft_ms / 1e3
    tpot_s = TPOT_SLACK * saturated_s if args.tpot_ms is None else args.tpot_ms / 1e3
    rate = args.overload * capacity
    rows = [overload(args, rate, ttft_s, tpot_s, policy) for policy in ("fcfs", "slo")]
    goodputs = [float(str(row["goodput_per_s"])) for row in rows]
    built = open_engine(args)
    record = {
        "environment": asdict(environment(built.device.torch_device)) | {"command": COMMAND},
        "what": {name: str(value) for name, value in vars(args).items() if name != "output"},
        "capacity_per_s": capacity,
        "saturated_tpot_ms": saturated_s * 1e3,
        "offered_per_s": rate,
        "promise": {"ttft_ms": ttft_s * 1e3, "tpot_ms": tpot_s * 1e3},
        "policies": rows,
        "overload_seen": rate / float(str(rows[0]["finished_per_s"])),  # the machine may be shared
        "goodput_ratio": goodputs[1] / goodputs[0] if goodputs[0] else None,
    }
    text = json.dumps(record, indent=2)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
