"""How does `ridgeline plan` show its answer, to people and to programs?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ridgeline.cli.session import paper
from ridgeline.cost.money import per_million_tokens
from ridgeline.figures import number, percent, seconds
from ridgeline.planner.estimate import Rejection
from ridgeline.planner.flips import Flip
from ridgeline.planner.plan import Plan
from ridgeline.planner.question import ATTAINMENT, Question
from ridgeline.planner.search import Deployment
from ridgeline.planner.words import (
    Reason,
    commands,
    count_words,
    dollars,
    promise_flags,
    promise_words,
    reasons,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NOT_SERVED = "NOT SERVED BY THIS VERSION"
MANY_COMMANDS = 8


# ---------------------------------------------------------------------- programs


def as_json(plan: Plan) -> dict[str, Any]:
    """Times in milliseconds, rates per second, dollars per hour."""
    question = plan.question
    return {
        "model": question.model,
        "rate_per_s": question.rate,
        "input": question.num_input,
        "output": question.num_output,
        "promise": {
            "ttft_ms": question.ttft_s * 1e3,
            "tpot_ms": question.tpot_s * 1e3,
            "share": ATTAINMENT,
        },
        "feasible": plan.winner is not None,
        "because": plan.why_none,
        "answer": deployment_json(plan.winner, question),
        "runner_up": deployment_json(plan.runner_up, question),
        "not_served_yet": deployment_json(plan.unserved, question),
        "reasons": [_reason_json(reason) for reason in reasons(plan)],
        "flips": [_flip_json(flip) for flip in plan.flips],
        "rejected": [_rejection_json(one) for one in plan.out],
        "num_candidates": len(plan.estimates),
        "num_simulations": plan.num_trials,
    }


def deployment_json(found: Deployment | None, question: Question) -> dict[str, Any] | None:
    """`commands` is empty for what this version does not serve, which `why_not_served` says."""
    if found is None:
        return None
    estimate, trial = found.estimate, found.trial
    hardware, price = estimate.hardware, estimate.hardware.offer.price
    weights, kv = hardware.precision.names
    band = found.dollars
    return {
        "device": hardware.device.name,
        "num_devices": found.num_devices,
        "replicas": found.replicas,
        "tp": hardware.layout.tp,
        "pp": hardware.layout.pp,
        "ep": hardware.layout.ep,
        "weights": weights,
        "kv": kv,
        "num_drafts": hardware.num_drafts,
        "max_num_seqs": estimate.candidate.max_num_seqs,
        "max_num_batched_tokens": estimate.candidate.max_num_batched_tokens,
        "max_model_len": question.max_model_len,
        "usd_per_hour": band and dict(zip(("low", "mid", "high"), band, strict=True)),
        "price": price and {"type": price.source_type, "source": price.source, "date": price.date},
        "usd_per_million_output": _per_million(found, question),
        "share_of_saturation": found.load,
        "saturation_per_s": estimate.saturation * found.replicas,
        "goodput_per_s": found.rate * trial.share,
        "share_kept": trial.share,
        "ttft_p95_ms": trial.ttft_s * 1e3,
        "tpot_p95_ms": trial.tpot_s * 1e3,
        "in_flight_per_replica": trial.in_flight,
        "origin": estimate.priced.setup.constants.origin,
        "served": not hardware.why_not_served,
        "why_not_served": hardware.why_not_served,
        "commands": [] if hardware.why_not_served else list(commands(question, found)),
    }


def _per_million(found: Deployment, question: Question) -> float | None:
    if found.dollars is None:
        return None
    return per_million_tokens(found.dollars[1], found.rate * question.num_output)


def _reason_json(reason: Reason) -> dict[str, str]:
    return {"what": reason.what, "choice": reason.choice, "because": reason.because}


def _flip_json(flip: Flip) -> dict[str, Any]:
    return {
        "what": flip.what,
        "now": flip.now,
        "at": flip.at,
        "unit": flip.unit,
        "answer": flip.answer,
    }


def _rejection_json(one: Rejection) -> dict[str, str]:
    return {
        "device": one.hardware.device.name,
        "hardware": one.hardware.words,
        "kind": one.kind,
        "because": one.because,
    }


# ---------------------------------------------------------------------- people


def show(plan: Plan) -> None:
    question, out = plan.question, paper()
    out.print(
        f"{question.model}: {number(question.rate)} requests/s of {question.num_input} + "
        f"{question.num_output} tokens; {promise_words(question)}"
    )
    if plan.winner is None:
        out.print(plan.why_none, style="bold")
    else:
        _show_winner(plan, plan.winner, out)
    if plan.unserved is not None:
        unserved = plan.unserved
        out.print(
            f"{NOT_SERVED}: {count_words(unserved)}, {dollars(unserved)} "
            f"({unserved.estimate.hardware.why_not_served})"
        )
        if plan.winner is None:
            out.print(_figures(plan))
    if plan.out:
        out.print(_rejections(plan.out))
    out.print(_footnote(plan))


def _show_winner(plan: Plan, winner: Deployment, out: Console) -> None:
    typed = commands(plan.question, winner)
    for command in typed[:MANY_COMMANDS]:
        out.print(f"  {command}", style="bold", soft_wrap=True)
    if len(typed) > MANY_COMMANDS:
        out.print(f"  ... and {len(typed) - MANY_COMMANDS} more like these, on further devices")
    if len(typed) > 1:
        out.print("  (one process a device; spread the requests over their ports)")
    out.print(_figures(plan))
    out.print(_why(reasons(plan)))
    if plan.flips:
        out.print("what would change the answer:")
        for flip in plan.flips:
            out.print(f"  {flip.words}")
    flags = promise_flags(plan.question)
    out.print(f"to keep the promise in overload too, by refusing what would break it, add: {flags}")


def _figures(plan: Plan) -> Table:
    from rich.table import Table

    rows = [("answer", plan.winner), ("runner-up", plan.runner_up), (NOT_SERVED, plan.unserved)]
    table = Table(
        *("", "what", "price", "load", "promise kept", "TTFT p95", "TPOT p95", "in flight each"),
        title="in simulation",
    )
    for name, found in rows:
        if found is not None:
            trial = found.trial
            table.add_row(
                *(name, count_words(found), dollars(found), percent(found.load, 0)),
                *(percent(trial.share), seconds(trial.ttft_s)),
                *(seconds(trial.tpot_s), number(trial.in_flight)),
            )
    return table


def _why(found: Iterable[Reason]) -> Table:
    from rich.table import Table

    table = Table("what", "choice", "why")
    for reason in found:
        table.add_row(reason.what, reason.choice, reason.because)
    return table


def _rejections(out: Iterable[Rejection]) -> Table:
    """The first reason for each device."""
    from rich.table import Table

    table = Table("not", "", "because", title="out of the question")
    seen: set[str] = set()
    for one in out:
        if one.hardware.device.name not in seen:
            seen.add(one.hardware.device.name)
            table.add_row(one.hardware.device.name, one.kind, one.because)
    return table


def _footnote(plan: Plan) -> str:
    shown = [found for found in (plan.winner, plan.runner_up, plan.unserved) if found is not None]
    said = f"{len(plan.estimates)} candidates, {plan.num_trials} simulations"
    prices = {
        f"{found.estimate.hardware.device.name}: {price.source_type} {price.date}".strip()
        for found in shown
        if (price := found.estimate.hardware.offer.price) is not None
    }
    if prices:
        said += f"; prices are of {', '.join(sorted(prices))}"
    assumed = {
        found.estimate.hardware.device.name
        for found in shown
        if found.estimate.hardware.offer.calibration is None
    }
    if assumed:
        said += f"; efficiencies of {', '.join(sorted(assumed))} are assumed, not calibrated"
    return said
