"""How is a plan said? The commands to type, and why each part of them was chosen."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.figures import number, scaled
from ridgeline.planner.candidates import NODE
from ridgeline.planner.estimate import Estimate
from ridgeline.planner.plan import Plan
from ridgeline.planner.question import ATTAINMENT, MAX_LOAD, Question
from ridgeline.planner.search import Deployment

PORT = 8000


@dataclass(frozen=True, slots=True)
class Reason:
    """`what` was chosen to be `choice`, `because`."""

    what: str
    choice: str
    because: str


def commands(question: Question, deployment: Deployment) -> tuple[str, ...]:
    """One `ridgeline serve` for each replica, each on a device and a port of its own; devices are
    counted anew on each node."""
    link = deployment.estimate.hardware.device.link
    node = NODE if link is None else max(1, link.max_devices)
    count = deployment.replicas
    return tuple(
        _command(question, deployment.estimate, i % node, is_alone=count == 1) for i in range(count)
    )


def _command(question: Question, estimate: Estimate, place: int, *, is_alone: bool) -> str:
    hardware, candidate = estimate.hardware, estimate.candidate
    on_cpu = hardware.device.kind == "cpu"
    device = "cpu" if on_cpu else "cuda" if is_alone else f"cuda:{place}"
    words = [
        *("ridgeline", "serve", question.model, "--device", device),
        *("--dtype", hardware.precision.dtype),
        *("--max-model-len", str(question.max_model_len)),
        *("--max-num-seqs", str(candidate.max_num_seqs)),
        *("--max-num-batched-tokens", str(candidate.max_num_batched_tokens)),
    ]
    if not is_alone:
        words += ["--port", str(PORT + place)]
    return shlex.join(words)


def promise_flags(question: Question) -> str:
    """What to add so that the promise holds in overload too, by refusing what would break it."""
    ttft_ms, tpot_ms = question.ttft_s * 1e3, question.tpot_s * 1e3
    return f"--policy slo --ttft-slo-ms {ttft_ms:g} --tpot-slo-ms {tpot_ms:g}"


# ---------------------------------------------------------------------- why


def reasons(plan: Plan) -> tuple[Reason, ...]:
    """Why each part of the winner is as it is. () where there is none."""
    if plan.winner is None:
        return ()
    question, winner = plan.question, plan.winner
    same = [e for e in plan.estimates if e.hardware == winner.estimate.hardware]
    return (
        _device_reason(plan, winner),
        _count_reason(winner),
        _format_reason(plan, winner),
        _batch_reason(question, winner),
        _budget_reason(winner, same),
        _length_reason(question),
    )


def _device_reason(plan: Plan, winner: Deployment) -> Reason:
    hardware, runner_up = winner.estimate.hardware, plan.runner_up
    because = "the only one that keeps the promise"
    if runner_up is not None:
        because = (
            f"the cheapest that keeps the promise: {dollars(winner)} against {dollars(runner_up)} "
            f"for {count_words(runner_up)}"
        )
    elif len({estimate.hardware for estimate in plan.estimates}) > 1:
        because = "the cheapest that keeps the promise"
    return Reason("device", hardware.device.name, because)


def _count_reason(winner: Deployment) -> Reason:
    estimate = winner.estimate
    limit = "the promise" if estimate.kept < MAX_LOAD * estimate.saturation else "saturation"
    each = winner.rate / winner.replicas
    because = (
        f"one replica carries up to {number(estimate.planned)} requests/s, by {limit}; saturated "
        f"it would do {number(estimate.saturation)}. Here each has {number(each)}, "
        f"{winner.load:.0%} of saturation; {MAX_LOAD:.0%} are never exceeded"
    )
    return Reason("replicas", str(winner.replicas), because)


def _format_reason(plan: Plan, winner: Deployment) -> Reason:
    weights, kv = winner.estimate.hardware.precision.names
    weight_bytes = winner.estimate.memory.weight_bytes
    because = f"{scaled(weight_bytes, 'B')} of weights; plans keep the numbers of the checkpoint"
    if plan.unserved is not None and plan.unserved.cost < winner.cost:
        because += f"; {plan.unserved.estimate.hardware.words} would be cheaper"
    return Reason("formats", f"{weights} weights, {kv} KV cache", because)


def _batch_reason(question: Question, winner: Deployment) -> Reason:
    estimate, trial = winner.estimate, winner.trial
    because = (
        f"{trial.in_flight:.0f} requests are in flight on average; up to {estimate.batch} keep "
        f"{question.tpot_s * 1e3:g} ms a token, and the KV cache has room for "
        f"{estimate.memory.num_blocks // estimate.priced.blocks_each}"
    )
    return Reason("max_num_seqs", str(estimate.candidate.max_num_seqs), because)


def _budget_reason(winner: Deployment, same: Sequence[Estimate]) -> Reason:
    chosen = winner.estimate.candidate
    others = {}
    for estimate in same:
        if estimate.candidate.max_num_seqs == chosen.max_num_seqs:
            others[estimate.candidate.max_num_batched_tokens] = estimate.planned
    rates = ", ".join(f"{budget}: {number(rate)}/s" for budget, rate in sorted(others.items()))
    because = f"what a replica carries within the promise by token budget: {rates}"
    return Reason("max_num_batched_tokens", str(chosen.max_num_batched_tokens), because)


def _length_reason(question: Question) -> Reason:
    because = f"lengths are planned to vary by {question.spread:.0%} around their means"
    return Reason("max_model_len", str(question.max_model_len), because)


# ---------------------------------------------------------------------- figures


def count_words(deployment: Deployment) -> str:
    """For example "3 x h100-sxm, bf16 weights"."""
    return f"{deployment.replicas} x {deployment.estimate.hardware.words}"


def dollars(deployment: Deployment) -> str:
    """Per hour, with its band where low and high prices differ."""
    band = deployment.dollars
    if band is None:
        return f"{deployment.num_devices} devices of unknown price"
    low, mid, high = band
    return f"${mid:.2f}/h" + (f" (${low:.2f} to ${high:.2f})" if low < high else "")


def promise_words(question: Question) -> str:
    return (
        f"first token within {question.ttft_s * 1e3:g} ms and {question.tpot_s * 1e3:g} ms a token "
        f"after it, for {ATTAINMENT:.0%} of the requests"
    )
