"""Would this fleet keep what is asked, what would it cost, and what is in its way?

The learner chooses; the simulator judges, with the engine's own scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Annotated

import msgspec

from ridgeline.cost.memory import KV_CACHE
from ridgeline.cost.memory_items import WEIGHTS
from ridgeline.cost.throughput import closed_loop_rate, in_flight, replicas, request_seconds
from ridgeline.figures import number, percent, scaled, seconds
from ridgeline.lab.fleet import Fleet
from ridgeline.lab.judge import SHEETS, Check, Verdict, binding_of, checks_of, judged
from ridgeline.lab.machine import Cache, Device, Weights, kind_of
from ridgeline.lab.page import Answer, Figure, Guess, Page, Preset, Question, Table, control
from ridgeline.simulator.report import thinned

MAX_DOTS = 500
READ_S = 0.03  # for the prompt, where no first token is promised
TEXT_TTFT_S, TEXT_STEP_S = 0.030, 0.020  # the text's own, for its design
SUMMARY = "ridgeline.simulator.report.summarize"


# fmt: off
class Inputs(msgspec.Struct, frozen=True):
    challenge: Annotated[str, control("challenge", choices=tuple(SHEETS))] = next(iter(SHEETS))
    device: Device = "h100-sxm"
    replicas: Annotated[int, control("replicas", ge=1, le=64, scale="log")] = 4
    tp: Annotated[int, control("devices of each", "that split every layer (TP)",
                               choices=(1, 2, 4, 8))] = 8
    weights: Weights = "fp8"
    max_num_seqs: Annotated[int, control("largest batch", "requests at once in a replica", ge=1,
                                         le=256, scale="log")] = 64
    kv: Cache = "auto"
    drafts: Annotated[int, control("drafts in a step", "of a head of one layer; 0: none", ge=0,
                                   le=8, is_folded=True)] = 0
    acceptance: Annotated[float, control("acceptance of a draft", "it has to be trained", ge=0,
                                         le=1, step=0.05, is_folded=True)] = 0.7
    max_num_batched_tokens: Annotated[int, control("tokens in a step", "most of them", ge=64,
                                                   le=16384, scale="log", is_folded=True)] = 8192
    seed: Annotated[int, control("seed", ge=0, le=999, is_folded=True)] = 0
# fmt: on


class Part(msgspec.Struct, frozen=True):
    """Of the memory of one device, in bytes. `holds` is weights, kv, activations or free."""

    name: str
    holds: str
    bytes: float


class Drawing(msgspec.Struct, frozen=True):
    """`dots` are (arrival, time to the whole answer), in seconds, of `num_run` replicas. `alone_s`:
    what a lone request takes. `binding` says in a few words what is in the way."""

    text: str
    checks: list[Check]
    is_met: bool
    binding: str
    device: str
    replicas: int
    tp: int
    parts: list[Part]
    capacity_bytes: float
    dots: list[tuple[float, float]]
    num_run: int
    limit_s: float
    alone_s: float


def fleet_of(inputs: Inputs) -> Fleet:
    return Fleet(
        model=SHEETS[inputs.challenge].model,
        device=inputs.device,
        weights=inputs.weights,
        kv=inputs.kv,
        tp=inputs.tp,
        replicas=inputs.replicas,
        max_num_seqs=inputs.max_num_seqs,
        max_num_batched_tokens=inputs.max_num_batched_tokens,
        num_drafts=inputs.drafts,
        acceptance=inputs.acceptance,
    )


def answer(inputs: Inputs) -> Iterator[float | Answer[Drawing]]:
    for step in judged(SHEETS[inputs.challenge], fleet_of(inputs), inputs.seed):
        yield _answered(inputs, step) if isinstance(step, Verdict) else step


# ---------------------------------------------------------------------- what is drawn and said


def _answered(inputs: Inputs, found: Verdict) -> Answer[Drawing]:
    checks = checks_of(found)
    fleet, sheet, report = found.fleet, found.sheet, found.report
    dots = []
    if report is not None:
        ended = [one for one in report.requests if one.e2e_s is not None]
        dots = [(round(r.arrival_s, 3), round(r.e2e_s, 4)) for r in thinned(ended, MAX_DOTS)]
    drawing = Drawing(
        sheet.text,
        checks,
        all(one.is_met for one in checks),
        binding_of(found, checks),
        fleet.setup.device.label,
        fleet.replicas,
        fleet.tp,
        _parts(found),
        fleet.setup.device.memory_bytes,
        dots,
        0 if report is None else report.num_replicas,
        sheet.answer_s
        or request_seconds(sheet.ttft_s or inf, sheet.tpot_s or inf, sheet.num_output),
        found.alone_s,
    )
    if drawing.limit_s == inf:
        drawing = msgspec.structs.replace(drawing, limit_s=0.0)
    return Answer(
        _sentence(found, drawing),
        drawing,
        _figures(found),
        [_table(checks), _sheets()],
        _questions(found),
        _guess(found),
    )


def _parts(found: Verdict) -> list[Part]:
    items = found.plan.items if found.plan else ()
    told = [(one.what, one.bytes) for one in items] or list(
        found.shortage.items if found.shortage else ()
    )
    return [
        Part(what, "weights" if what in WEIGHTS else "kv" if what == KV_CACHE else "activations", n)
        for what, n in told
        if n
    ]


def _sentence(found: Verdict, drawing: Drawing) -> str:
    fleet, sheet = found.fleet, found.sheet
    who = f"{fleet.replicas} x {fleet.tp} {drawing.device}"
    if found.band:
        who += f" (${number(found.dollars)} an hour)"
    if found.shortage is not None:
        out = found.shortage.changes
        least = f" The least change that would fit: {out[0]}." if out else ""
        return f"Not met: a replica of {sheet.model} does not fit {fleet.tp} of these.{least}"
    if drawing.is_met:
        return f"Met by {who}: {_loads(found)}."
    said = f"Not met by {who}. In the way is {drawing.binding}"
    if sheet.answer_s and found.alone_s > sheet.answer_s:
        said += f" ({seconds(found.alone_s)}, and {seconds(sheet.answer_s)} is allowed)"
    if found.is_full:
        more = sheet.rate - found.capacity
        said += f". {_loads(found).capitalize()}: the queue grows by {number(more)} a second"
    return f"{said}."


def _loads(found: Verdict) -> str:
    return (
        f"it can do {number(found.capacity)} requests/s, and {number(found.sheet.rate)} come "
        f"({percent(found.sheet.rate / found.capacity, 0)})"
    )


def _figures(found: Verdict) -> list[Figure]:
    sheet, fleet = found.sheet, found.fleet
    badge = kind_of(fleet.setup.constants.origin)
    tokens = sheet.num_output - 1
    figures = [
        Figure("reading the weights once", found.weights_s, "s", "ideal",
               f"a device's share at {scaled(fleet.setup.device.bandwidth, 'B/s')}",
               "ridgeline.cost.pricer.Pricer.cost"),
    ]  # fmt: skip
    if sheet.answer_s:
        room = (sheet.answer_s - (sheet.ttft_s or READ_S)) / tokens
        figures.append(
            Figure("time per token that may be", room, "s", "ideal",
                   f"({seconds(sheet.answer_s)} - {seconds(sheet.ttft_s or READ_S)}) / {tokens}",
                   "ridgeline.cost.throughput.request_seconds")
        )  # fmt: skip
    if (summary := found.summary) is None:
        return figures
    e2e = summary.e2e_s.mean or 0.0
    there = in_flight(sheet.rate, found.alone_s)
    places = fleet.replicas * fleet.max_num_seqs
    count = f"of {summary.num_finished} requests"
    figures += [
        Figure("a lone request", found.alone_s, "s", badge, "simulated",
               "ridgeline.simulator.simulation.Simulation.run"),
        Figure("requests that are there, at least", there, "requests", badge,
               f"{number(sheet.rate)}/s x {seconds(found.alone_s)}; there are {places} places",
               "ridgeline.cost.throughput.in_flight"),
        Figure("capacity", found.capacity, "requests/s", badge,
               "from the growth of the queue" if found.is_full else "in closed form",
               "ridgeline.simulator.sweep.capacity_seen" if found.is_full
               else "ridgeline.cost.throughput.saturation"),
        Figure("replicas that carry it", replicas(sheet.rate, found.capacity / fleet.replicas),
               "replicas", badge,
               f"{number(sheet.rate)} / {number(found.capacity / fleet.replicas)}, rounded up",
               "ridgeline.cost.throughput.replicas"),
        Figure("whole answer, mean", e2e, "s", badge, count, SUMMARY),
        Figure("whole answer, p99", summary.e2e_s.p99 or 0.0, "s", badge, count, SUMMARY),
        Figure("first token, p99", summary.ttft_s.p99 or 0.0, "s", badge, count, SUMMARY),
        Figure("time per token, p99", summary.tpot_s.p99 or 0.0, "s", badge, count, SUMMARY),
    ]  # fmt: skip
    if found.band is not None:
        figures.append(
            Figure("price", found.dollars, "$/h", "assumed",
                   f"{fleet.num_devices} devices x ${number(found.band.mid)} "
                   f"(${number(found.band.low)} to ${number(found.band.high)})",
                   "ridgeline.cost.money.rent_band")
        )  # fmt: skip
    return figures


def _table(checks: list[Check]) -> Table:
    rows: list[list[str | float]] = [
        [one.name, one.had, one.limit, 100 * one.share, "yes" if one.is_met else "no"]
        for one in checks
    ]
    return Table("the sheet", ["line", "had", "limit", "% of it", "met"], rows)


def _sheets() -> Table:
    rows: list[list[str | float]] = [
        [name, one.model, one.rate, one.num_input, one.num_output, one.answer_s, one.ttft_s,
         one.tpot_s, one.budget, one.devices]
        for name, one in SHEETS.items()
    ]  # fmt: skip
    columns = ["challenge", "model", "requests/s", "prompt", "answer", "answer p99 s",
               "first token p99 s", "per token p99 s", "$/h", "devices"]  # fmt: skip
    return Table("all challenges (0: not asked)", columns, rows)


def _questions(found: Verdict) -> list[Question]:
    fleet, sheet = found.fleet, found.sheet
    step_s = found.alone_s / sheet.num_output
    text_s = request_seconds(TEXT_TTFT_S, TEXT_STEP_S, 200)
    rate = closed_loop_rate(64, text_s)
    return [
        Question(
            "A text answers the first challenge with four replicas of eight H100, batch 64, and a "
            "P99 of 190 ms. Where is its error?",
            "It divides the step of 20 ms by the batch. A request gets one token a step: 200 steps "
            f"are {seconds(text_s)}. At 25 requests a second {number(in_flight(25, text_s))} are "
            f"there at once, and 64 have a place: a replica does {number(rate)} a second, so "
            f"{replicas(100, rate)} are needed, and none of them answers in a second.",
        ),
        Question(
            "What bounds the time of a token from below here?",
            f"Reading the weights, {seconds(found.weights_s)} for each step of this layout. More "
            "devices for each replica (TP), fewer bits, or more tokens a step (drafts) lower it; "
            "more replicas do not.",
        ),
        Question(
            "What do more replicas mend, and what not?",
            f"The queue, at a price: {fleet.replicas} replicas share {number(sheet.rate)} "
            f"requests a second. A lone request takes "
            f"{seconds(found.alone_s) if found.alone_s else 'as long'} with any number of them"
            f"{f', {seconds(step_s)} a token' if found.alone_s else ''}.",
        ),
    ]


def _guess(found: Verdict) -> Guess | None:
    if not found.capacity:
        return None
    ask = "How many requests a second can this fleet do?"
    return Guess(ask, "requests/s", found.capacity)


PAGE = Page(
    "design_challenges",
    "Design challenges",
    "You choose devices, layout and formats; the simulator says whether the promise is kept.",
    "Plan",
    Inputs,
    answer,
    long=True,
    presets=(
        Preset("The text's design", {}),
        Preset("As many as carry it", {"replicas": 7}),
        Preset("Small batches", {"replicas": 24, "max_num_seqs": 8}),
        Preset(
            "Drafts, on H200",
            {
                "device": "h200-sxm", "replicas": 12, "max_num_seqs": 16, "drafts": 4,
                "acceptance": 0.8,
            },
        ),
        Preset(
            "A chat on an L40S",
            {
                "challenge": "8B chat for $10 an hour", "device": "l40s", "tp": 1,
                "replicas": 4, "max_num_seqs": 32,
            },
        ),
    ),
)  # fmt: skip
