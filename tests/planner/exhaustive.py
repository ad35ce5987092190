"""What is the best there is, if every candidate is simulated? The yardstick for the planner."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from ridgeline.architectures import read_spec
from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost.hardware import find_device
from ridgeline.planner.estimate import Estimate, Rejection, estimates_of, open_bench, with_promise
from ridgeline.planner.plan import plan
from ridgeline.planner.question import MAX_LOAD, Grid, Question, hardware_of, offer
from ridgeline.planner.search import Deployment, validate, workload
from ridgeline.simulator.simulation import Machine, Options, Simulation
from ridgeline.simulator.sweep import capacity_seen
from tests.tiny_model import tiny_config

GRID = Grid(
    token_budgets=(512, 2048, 8192),
    batch_limits=(8, 32, 128, 256),
    weights=("plain", "fp8"),
    kv=("auto",),
    tp=(1, 2, 4, 8),
    pp=(1,),
    drafts=(),
)
OPTIMISM = 1.25  # times: nobody is passed over whose closed form is wrong by less
MOST_REPLICAS = 400
SEEDS = (101, 102)  # of the runs that compare; the planner has never seen them


def model(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> ModelSpec:
    return read_spec(
        tiny_config(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=128,
            intermediate_size=ffn,
            vocab_size=128256,
            max_position_embeddings=131072,
            torch_dtype="bfloat16",
            **more,
        )
    )


SMALL = model(1024, 28, 16, 8, 3072)  # about 0.6 billion parameters
MEDIUM = model(4096, 32, 32, 8, 14336)  # 8 billion
LARGE = model(8192, 80, 64, 8, 28672)  # 70 billion
EXPERTS = model(
    4096, 32, 32, 8, 14336, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2
)  # 47 billion, 13 of them active


@dataclass(frozen=True, slots=True)
class Case:
    """Times in milliseconds."""

    name: str
    spec: ModelSpec
    rate: float
    num_input: int
    num_output: int
    ttft: float
    tpot: float
    devices: str
    include_unserved: bool = False

    @property
    def question(self) -> Question:
        return Question(
            model=self.name,
            spec=self.spec,
            rate=self.rate,
            num_input=self.num_input,
            num_output=self.num_output,
            ttft_s=self.ttft / 1e3,
            tpot_s=self.tpot / 1e3,
            offers=tuple(offer(find_device(name)) for name in self.devices.split(",")),
            include_unserved=self.include_unserved,
        )


CASES = (
    Case("8B chat", MEDIUM, 40, 500, 200, 1000, 30, "l40s,a100-80-sxm,h100-sxm,rtx-pro-6000"),
    Case("8B, one device is enough", MEDIUM, 2, 500, 200, 1000, 60, "l4,rtx-4090,rtx-5090,l40s"),
    Case("8B, fast tokens", MEDIUM, 120, 500, 200, 500, 10, "a100-80-sxm,h100-sxm,h200-sxm,b200"),
    Case("8B, long prompts", MEDIUM, 40, 6000, 300, 2000, 40, "a100-80-sxm,h100-sxm,l40s"),
    Case("8B, early first token", MEDIUM, 100, 2000, 100, 250, 50, "a100-80-sxm,h100-sxm,h200-sxm"),
    Case("8B, long answers", MEDIUM, 6, 200, 1200, 1000, 25, "a100-80-sxm,h100-sxm,rtx-5090"),
    Case("0.6B, many", SMALL, 200, 300, 60, 300, 15, "l4,rtx-4090,rtx-3090,l40s"),
    Case("0.6B, no hurry", SMALL, 60, 1000, 200, 5000, 100, "l4,rtx-3090,rtx-4090"),
    Case("70B on one device", LARGE, 30, 1000, 200, 3000, 80, "h200-sxm,b200"),
    Case("70B, spread", LARGE, 60, 1000, 200, 1500, 50, "a100-80-sxm,h100-sxm", True),
    Case("experts", EXPERTS, 80, 800, 200, 1500, 40, "h100-sxm,h200-sxm,b200", True),
    Case("8B, 8-bit too", MEDIUM, 300, 500, 200, 1000, 20, "l40s,h100-sxm", True),
)


# ---------------------------------------------------------------------- every candidate


def everything(question: Question, grid: Grid = GRID) -> Iterator[Estimate]:
    """Every candidate of the grid that has room, also those of which the planner's closed form says
    that they keep only half of the promise: simulation decides."""
    lenient = with_promise(question, ttft=2.0, tpot=2.0)
    for hardware in hardware_of(question, grid):
        bench = open_bench(lenient, hardware, grid)
        if isinstance(bench, Rejection):
            continue
        yield from estimates_of(bench, grid)


def capacity(question: Question, estimate: Estimate) -> float:
    """Requests a second of a replica that has far more work than it can do, simulated."""
    rate = 1.5 * estimate.saturation
    work = workload(question, 300 + 12 * estimate.batch_limit, rate, lambda: random.Random(7))
    candidate, priced = estimate.candidate, estimate.priced
    machine = Machine(priced.target, estimate.memory.num_blocks, priced.windows)
    options = Options(
        num_replicas=1,
        max_num_seqs=candidate.max_num_seqs,
        max_num_batched_tokens=candidate.max_num_batched_tokens,
        max_model_len=question.max_model_len,
    )
    report = Simulation(machine, work, options, rng=random.Random(7)).run()
    found = capacity_seen(report.requests)
    assert found is not None, "a saturated run says what the capacity is"
    return found


def fewest(question: Question, estimate: Estimate, below: float, seed: int) -> Deployment | None:
    """The fewest replicas that carry the rate, if that is cheaper than `below`."""
    count = max(1, ceil(question.rate / (MAX_LOAD * OPTIMISM * estimate.saturation)))
    if estimate.cost(count) >= below:
        return None
    count = max(count, ceil(question.rate / (MAX_LOAD * capacity(question, estimate))))
    while estimate.cost(count) < below and count <= MOST_REPLICAS:
        rate = question.rate / count
        found = validate(question, estimate, rate, lambda: random.Random(seed))
        if found.keeps_promise:
            return Deployment(estimate, count, question.rate, found)
        count = max(count + 1, round(1.05 * count))
    return None


def best_of_all(question: Question, grid: Grid = GRID, seed: int = 0) -> Deployment | None:
    """The cheapest of all candidates that keeps the promise in simulation."""
    best: Deployment | None = None
    for estimate in sorted(everything(question, grid), key=lambda e: e.cost(1) / e.saturation):
        found = fewest(question, estimate, float("inf") if best is None else best.cost, seed)
        best = found or best
    return best


# ---------------------------------------------------------------------- the comparison


def goodput_per_dollar(question: Question, deployment: Deployment) -> float:
    """Requests that got what was promised, per dollar, in fresh runs."""
    rate = question.rate / deployment.replicas
    validations = [
        validate(question, deployment.estimate, rate, lambda seed=seed: random.Random(seed))  # type: ignore[misc]
        for seed in SEEDS
    ]
    share = sum(validation.share for validation in validations) / len(validations)
    return question.rate * share / deployment.cost * 3600


@dataclass(frozen=True, slots=True)
class Comparison:
    """`ratio` of the planner's goodput per dollar to the best's."""

    case: Case
    chosen: Deployment
    best: Deployment
    ratio: float
    num_validations: int


def compare(case: Case, grid: Grid = GRID) -> Comparison:
    """The planner's choice beside the best of all candidates."""
    question = case.question
    found = plan(question, lambda: random.Random(0), grid)
    answers = [one for one in (found.winner, found.unserved) if one is not None]
    best = best_of_all(question, grid)
    if not answers or best is None:
        raise AssertionError(f"{case.name}: {found.why_none or 'the search found nothing'}")
    chosen = min(answers, key=lambda one: one.cost)
    ratio = goodput_per_dollar(question, chosen) / goodput_per_dollar(question, best)
    return Comparison(case, chosen, best, ratio, found.num_validations)


def table(rows: Sequence[Comparison]) -> str:
    lines = []
    for row in rows:
        chosen, best = row.chosen, row.best
        lines.append(
            f"{row.case.name:28} {row.ratio:5.2f}  "
            f"{chosen.replicas} x {chosen.estimate.hardware.text} ${chosen.cost:.2f}/h  |  "
            f"{best.replicas} x {best.estimate.hardware.text} ${best.cost:.2f}/h"
        )
    return "\n".join(lines)
