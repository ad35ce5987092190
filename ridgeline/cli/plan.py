"""`ridgeline plan`: which machine, how many, and with which settings, for this traffic?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.cli.flags import add_model
from ridgeline.cli.machine import THIS
from ridgeline.cli.parser import Parser, add_json_flag
from ridgeline.cli.session import stage
from ridgeline.cli.tables import Column, answer, bold, grid, plain, table, unbroken, whole_percent
from ridgeline.cli.values import above_zero, positive, time_span
from ridgeline.errors import ConfigError
from ridgeline.figures import number, percent, seconds

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from ridgeline.cli.machine import Described
    from ridgeline.cost.constants import Calibration
    from ridgeline.cost.hardware import Device
    from ridgeline.planner.estimate import Rejection
    from ridgeline.planner.plan import Plan
    from ridgeline.planner.question import Offer, Question
    from ridgeline.planner.search import Deployment

EXAMPLES = """Nothing is run and no weights are needed. Every device, format and limit is priced in
closed form, the best are simulated with the real scheduler, and the answer is the `ridgeline serve`
command to type. Prices are bands with dates from the catalogue; --price replaces one.
A time is written as 200ms or 1.5s; a bare number is milliseconds.

examples:
  ridgeline plan llama-3.1-8b --rate 10 --input 500 --output 200 --ttft 1s --tpot 50ms
  ridgeline plan user/model --users 200 --think 20s --input 1000 --output 300 --ttft 1s --tpot 40ms
  ridgeline plan user/model --rate 10 --input 500 --output 200 --ttft 1s --tpot 50ms \\
      --devices l4,l40s,h100-sxm --price h100-sxm=2.1 --budget 12
  ridgeline plan user/model --rate 10 --input 500 --output 200 --ttft 1s --tpot 50ms --all

The exit code is 1 where nothing that this version serves keeps the promise.
"""
EXIT_NOTHING = 1
NOT_SERVED = "NOT SERVED BY THIS VERSION"
MANY_COMMANDS = 8


def add_arguments(parser: Parser) -> None:
    add_model(parser, takes_names=True)
    traffic = parser.flags("traffic")
    traffic("--rate R", "requests a second", above_zero)
    traffic("--users N", "or people, who ask again after each answer", above_zero)
    traffic("--think T", "after so long (default: at once)", time_span)
    traffic("--input I", "prompt tokens", positive, required=True)
    traffic("--output O", "answer tokens", positive, required=True)
    promise = parser.flags("promise")
    promise("--ttft T", "time to the first token", time_span, required=True)
    promise("--tpot T", "time per token after it", time_span, required=True)
    means = parser.flags("means")
    means(
        "--devices A,B",
        "names of the catalogue, device files (.json) or this; default: all of the catalogue",
    )
    means(
        "--price DEVICE=USD",
        "of one device for an hour; may be repeated",
        default=[],
        action="append",
    )
    means("--budget USD", "for all of it, per hour", above_zero)
    means("--all", "also show what this version cannot serve yet")
    parser.flag("--out FILE", "write the answer as settings for ridgeline serve --plan", Path)
    parser.flag("--seed", "of the arrivals (default: 0)", int, default=0)
    add_json_flag(parser.flag)
    parser.flag("-q --quiet", "no progress")


def run(args: argparse.Namespace) -> int:
    from random import Random

    from ridgeline.cli.machine import describe
    from ridgeline.planner.plan import plan

    if args.out is not None:
        _check_out(args.out)
    question = make_question(args, describe(args.model))
    with stage(args, f"comparing {len(question.offers)} devices"):
        found = plan(question, lambda: Random(args.seed))
    answer(args, lambda: as_json(found), lambda: shown(found))
    if args.out is not None and found.winner is not None:
        args.out.write_text(as_settings(question, found.winner), encoding="utf-8")
    return 0 if found.winner is not None else EXIT_NOTHING


def make_question(args: argparse.Namespace, model: Described) -> Question:
    """What the command line asks. Of a model that this version does not serve all is looked at, as
    with --all. Raises ConfigError."""
    from ridgeline.architectures.spec import missing
    from ridgeline.planner.question import Question

    return Question(
        # The command to type needs a name under which there are weights.
        model=args.model if model.entry is None else model.entry.hub_id,
        spec=model.spec,
        rate=_rate(args),
        num_input=args.input,
        num_output=args.output,
        ttft_s=args.ttft,
        tpot_s=args.tpot,
        offers=_offers(args),
        budget=args.budget,
        include_unserved=args.all or bool(missing(model.spec)),
    )


def _rate(args: argparse.Namespace) -> float:
    from ridgeline.cost.throughput import request_seconds
    from ridgeline.planner.question import rate_of_users

    if (args.rate is None) == (args.users is None):
        raise ConfigError("give either --rate or --users")
    if args.rate is not None:
        if args.think is not None:
            raise ConfigError("--think is for --users; leave it out, or give --users for --rate")
        return float(args.rate)
    promised_s = request_seconds(args.ttft, args.tpot, args.output)
    return rate_of_users(args.users, args.think or 0.0, promised_s)


def _offers(args: argparse.Namespace) -> tuple[Offer, ...]:
    """The devices to choose from, each at its price."""
    from ridgeline.cost.hardware import catalogue
    from ridgeline.planner.question import offer

    names = list(catalogue()) if args.devices is None else _names(args.devices)
    prices = dict(_price(text) for text in args.price)
    offers = []
    for name in names:
        device, record = _device(name)
        typed = prices.pop(name, None) if name in prices else prices.get(device.name)
        offers.append(offer(device, typed, record))
    known = {one.device.name for one in offers}
    if unknown := sorted(prices.keys() - known):
        raise ConfigError(f"--price {unknown[0]}: this device is not among those to choose from")
    return tuple(offers)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--devices names no device")
    return list(dict.fromkeys(names))


def _price(text: str) -> tuple[str, float]:
    """(device, dollars) of "h100-sxm=2.5"."""
    name, _, dollars = text.partition("=")
    try:
        return name.strip(), float(dollars)
    except ValueError:
        raise ConfigError(f"--price {text!r}: write DEVICE=DOLLARS such as h100-sxm=2.5") from None


def _device(name: str) -> tuple[Device, Calibration | None]:
    """With the calibration that was made on such a device here, if any."""
    from ridgeline.cli.machine import open_device
    from ridgeline.records import find_calibration

    device, record = open_device(name)
    is_known = record is not None or name == THIS or name.endswith(".json")
    return device, record if is_known else find_calibration(device.name)


# ---------------------------------------------------------------------- for `serve --plan`


def _check_out(path: Path) -> None:
    from ridgeline.asked import check_writable

    if path.suffix != ".toml":
        raise ConfigError(f"--out {path}: name a file that ends in .toml")
    check_writable("--out", path)


def as_settings(question: Question, found: Deployment) -> str:
    """The flags of the first machine's server as TOML, and what they are for."""
    from ridgeline.planner.plan import count_text, settings

    machines, device = settings(question, found), found.estimate.hardware.device
    about = {
        "device": device.name,
        "kind": device.kind,
        "num_devices": found.num_devices,
        "num_machines": len(machines),
        **({} if device.threads is None else {"threads": device.threads}),
        "rate": float(question.rate),
        "num_input": question.num_input,
        "num_output": question.num_output,
        "ttft_ms": question.ttft_s * 1e3,
        "tpot_ms": question.tpot_s * 1e3,
    }
    lines = [f"# {count_text(found)}: ridgeline serve --plan FILE"]
    if len(machines) > 1:
        lines.append(f"# One of {len(machines)} machines; ridgeline route spreads requests.")
    # JSON's texts and numbers are TOML's.
    lines += [f"{k} = {json.dumps(v)}" for k, v in {"model": question.model, **machines[0]}.items()]
    lines += ["", "[plan]", *(f"{k} = {json.dumps(v)}" for k, v in about.items())]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------- for programs


PLAN = """
model=question.model rate_per_s=question.rate input=question.num_input output=question.num_output
because=why_none sensitivity num_simulations=num_validations
"""
REJECTED = "device=hardware.device.name hardware=hardware.text kind because"
DEPLOYMENT = """
device=estimate.hardware.device.name num_devices replicas tp=estimate.hardware.layout.tp
pp=estimate.hardware.layout.pp dp=estimate.hardware.layout.dp ep=estimate.hardware.layout.ep
num_drafts=estimate.hardware.num_drafts max_num_seqs=estimate.candidate.max_num_seqs
max_num_batched_tokens=estimate.candidate.max_num_batched_tokens share_of_saturation=load
share_kept=validation.share ttft_p95_ms=validation.ttft_s tpot_p95_ms=validation.tpot_s
in_flight_per_replica=validation.in_flight origin=estimate.priced.setup.constants.origin
why_not_served=estimate.hardware.why_not_served
"""


def as_json(plan: Plan) -> dict[str, Any]:
    """Times in milliseconds, rates per second, dollars per hour."""
    from ridgeline.planner.plan import reasons
    from ridgeline.planner.question import ATTAINMENT

    question = plan.question
    return {
        **plain(plan, PLAN),
        "promise": plain(question, "ttft_ms tpot_ms") | {"share": ATTAINMENT},
        "feasible": plan.winner is not None,
        "answer": deployment_json(plan.winner, question),
        "runner_up": deployment_json(plan.runner_up, question),
        "not_served_yet": deployment_json(plan.unserved, question),
        "reasons": [plain(reason, "what choice because") for reason in reasons(plan)],
        "rejected": [plain(one, REJECTED) for one in plan.out],
        "num_candidates": len(plan.estimates),
    }


def deployment_json(found: Deployment | None, question: Question) -> dict[str, Any] | None:
    """`commands` is empty for what this version does not serve, which `why_not_served` says."""
    from ridgeline.planner.plan import commands

    if found is None:
        return None
    hardware, price = found.estimate.hardware, found.estimate.hardware.offer.price
    weights, kv = hardware.precision.names
    band = found.dollars
    return {
        **plain(found, DEPLOYMENT),
        "max_model_len": question.max_model_len,
        "weights": weights,
        "kv": kv,
        "usd_per_hour": band and dict(zip(("low", "mid", "high"), band, strict=True)),
        "price": price and plain(price, "type=source_type source date"),
        "usd_per_million_output": _per_million(found, question),
        "saturation_per_s": found.estimate.saturation * found.replicas,
        "goodput_per_s": found.rate * found.validation.share,
        "served": not hardware.why_not_served,
        "commands": [] if hardware.why_not_served else list(commands(question, found)),
    }


def _per_million(found: Deployment, question: Question) -> float | None:
    from ridgeline.cost.money import per_million_tokens

    if found.dollars is None:
        return None
    return per_million_tokens(found.dollars[1], found.rate * question.num_output)


# ---------------------------------------------------------------------- for people


def shown(plan: Plan) -> Iterator[Table | Text | str]:
    from ridgeline.planner.plan import count_text, dollars, promise_text

    question = plan.question
    yield (
        f"{question.model}: {number(question.rate)} requests/s of {question.num_input} + "
        f"{question.num_output} tokens; {promise_text(question)}"
    )
    if plan.winner is None:
        yield bold(plan.why_none)
    else:
        yield from _winner(plan, plan.winner)
    if plan.unserved is not None:
        unserved = plan.unserved
        yield (
            f"{NOT_SERVED}: {count_text(unserved)}, {dollars(unserved)} "
            f"({unserved.estimate.hardware.why_not_served})"
        )
        if plan.winner is None:
            yield _figures(plan)
    if plan.out:
        yield _rejections(plan.out)
    yield _footnote(plan)


def _winner(plan: Plan, winner: Deployment) -> Iterator[Table | Text | str]:
    from ridgeline.planner.plan import commands, promise_flags, reasons

    typed = commands(plan.question, winner)
    for command in typed[:MANY_COMMANDS]:
        yield unbroken(f"  {command}", "bold")
    if len(typed) > MANY_COMMANDS:
        yield f"  ... and {len(typed) - MANY_COMMANDS} more like these, on further machines"
    if len(typed) > 1:
        yield "  (one on each machine; `ridgeline route` spreads the requests over them)"
    yield _figures(plan)
    why = (Column("what", "what"), Column("choice", "choice"), Column("why", "because"))
    yield table(reasons(plan), why)
    if plan.sensitivity:
        yield "what would change the answer:"
        for change in plan.sensitivity:
            yield f"  {change.text}"
    flags = promise_flags(plan.question)
    yield f"to keep the promise in overload too, by refusing what would break it, add: {flags}"


def _figures(plan: Plan) -> Table:
    from ridgeline.planner.plan import count_text, dollars

    rows = [("answer", plan.winner), ("runner-up", plan.runner_up), (NOT_SERVED, plan.unserved)]
    columns = (
        Column("", lambda row: row[0]),
        Column("what", lambda row: count_text(row[1])),
        Column("price", lambda row: dollars(row[1])),
        Column("load", lambda row: row[1].load, whole_percent),
        Column("promise kept", lambda row: row[1].validation.share, percent),
        Column("TTFT p95", lambda row: row[1].validation.ttft_s, seconds),
        Column("TPOT p95", lambda row: row[1].validation.tpot_s, seconds),
        Column("in flight each", lambda row: row[1].validation.in_flight, number),
    )
    return table([row for row in rows if row[1] is not None], columns, "in simulation")


def _rejections(out: Iterable[Rejection]) -> Table:
    """The first reason for each device."""
    first: dict[str, tuple[str, str, str]] = {}
    for one in out:
        row = one.hardware.text, one.kind, one.because  # others of the device may do
        first.setdefault(one.hardware.device.name, row)
    return grid(("not", "", "because"), first.values(), "out of the question")


def _footnote(plan: Plan) -> str:
    shown = [found for found in (plan.winner, plan.runner_up, plan.unserved) if found is not None]
    said = f"{len(plan.estimates)} candidates, {plan.num_validations} simulations"
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
