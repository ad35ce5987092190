"""Which machine, how many, and which command, for what somebody needs?

Seven questions lead to a leaf, and the leaf is a plan: every candidate priced, the best simulated
with the real scheduler. What another answer to each question would lead to is the planner's closed
form, and what would flip the answer is its sensitivity.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Annotated

import msgspec

from ridgeline.architectures.catalogue import catalogue
from ridgeline.cost.hardware import find_device
from ridgeline.errors import ConfigError
from ridgeline.figures import number, percent
from ridgeline.lab.machine import spec_of
from ridgeline.lab.page import Answer, Figure, Guess, Page, Preset, Question, Table, control
from ridgeline.planner.estimate import Estimate, Priced, estimates_of, under
from ridgeline.planner.plan import (
    Plan,
    commands,
    count_text,
    dollars,
    plan,
    promise_flags,
    reasons,
    within_budget,
)
from ridgeline.planner.question import Grid, hardware_of, offer
from ridgeline.planner.question import Question as Asked
from ridgeline.planner.search import Deployment, in_order

GRID = Grid(
    token_budgets=(512, 2048, 8192),
    batch_limits=(4, 16, 64, 256),
    weights=("plain", "fp8", "int8", "int4"),
    kv=("auto",),
    pp=(1,),
    drafts=(),
)
# The largest batch within a promise is found below any limit: few of them tell where answers lead.
OUTLINE = replace(GRID, token_budgets=(2048,), batch_limits=(64, 256))
WORK = 1500  # requests that are simulated for a leaf
PLAN = "ridgeline.planner.plan."

SIZES = {
    "3B": "llama-3.2-3b",
    "8B": "llama-3.1-8b",
    "32B": "qwen2.5-32b",
    "70B": "llama-3.1-70b",
}
PLACES = {
    "cloud": ("l4", "l40s", "a100-80-sxm", "h100-sxm", "h200-sxm", "b200", "b300"),
    "workstation": ("rtx-3090", "rtx-4090", "rtx-5090", "rtx-pro-6000"),
    "server without GPU": ("xeon-8480", "xeon-8592", "epyc-9654"),
}
TRAFFIC = {"one person": 0.02, "a team": 1.0, "a product": 10.0, "a large service": 60.0}
PROMISES = {  # seconds to the first token, and between tokens
    "overnight": (60.0, 1.0),
    "reading along": (2.0, 0.1),
    "fluent": (1.0, 0.05),
    "instant": (0.3, 0.015),
}
LENGTHS = {"chat": (500, 200), "documents": (6000, 300), "long answers": (1000, 3000)}
BUDGETS = {"open": None, "1 $/h": 1.0, "10 $/h": 10.0, "100 $/h": 100.0}
FORMATS = ("as published", "also what this version lacks")

# What is asked, by the field that it sets, in the order of the tree.
BRANCHES = {
    "size": ("How large a model?", tuple(SIZES)),
    "place": ("Where may it run?", tuple(PLACES)),
    "traffic": ("Who uses it?", tuple(TRAFFIC)),
    "promise": ("How fast must it be?", tuple(PROMISES)),
    "length": ("How long are the texts?", tuple(LENGTHS)),
    "budget": ("What may it cost?", tuple(BUDGETS)),
    "formats": ("In which formats?", FORMATS),
}


# fmt: off
class Inputs(msgspec.Struct, frozen=True):
    size: Annotated[str, control("model", choices=tuple(SIZES))] = "8B"
    place: Annotated[str, control("where", choices=tuple(PLACES))] = "cloud"
    traffic: Annotated[str, control("traffic", choices=tuple(TRAFFIC))] = "a product"
    promise: Annotated[str, control("promise", choices=tuple(PROMISES))] = "fluent"
    length: Annotated[str, control("texts", choices=tuple(LENGTHS))] = "chat"
    budget: Annotated[str, control("budget", choices=tuple(BUDGETS))] = "open"
    formats: Annotated[
        str, control("formats", "published weights in served layouts, or all that is priced",
                     choices=FORMATS, is_folded=True)] = "as published"
# fmt: on


class Choice(msgspec.Struct, frozen=True):
    """One answer to a question, with what it leads to when all others stay, as far as this version
    serves it. `device` is "" where nothing keeps the promise; `price` in words, of an hour."""

    name: str
    is_taken: bool
    leads_to: str
    device: str
    price: str


class Branch(msgspec.Struct, frozen=True):
    field: str
    ask: str
    choices: list[Choice]


class Leaf(msgspec.Struct, frozen=True):
    """`command` is the first of `replicas`; `why_none` where there is no plan."""

    title: str
    dollars: str
    command: str
    others: int
    overload: str
    why_none: str
    reasons: list[list[str]]
    sensitivity: list[str]


class Drawing(msgspec.Struct, frozen=True):
    branches: list[Branch]
    leaf: Leaf


def asked(inputs: Inputs) -> Asked:
    """The planner's question."""
    entry = catalogue()[SIZES[inputs.size]]
    ttft_s, tpot_s = PROMISES[inputs.promise]
    num_input, num_output = LENGTHS[inputs.length]
    return Asked(
        model=entry.hub_id,
        spec=spec_of(entry.name),
        rate=TRAFFIC[inputs.traffic],
        num_input=num_input,
        num_output=num_output,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        offers=tuple(offer(find_device(name)) for name in PLACES[inputs.place]),
        budget=BUDGETS[inputs.budget],
        include_unserved=inputs.formats != FORMATS[0],
    )


@lru_cache(maxsize=512)
def _outline(inputs: Inputs) -> Estimate | None:
    """The cheapest by the closed form; None where nothing keeps the promise in budget."""
    question = asked(inputs)
    priced = _priced(inputs.size, inputs.place, inputs.length, inputs.formats)
    benches = (under(question, one, GRID) for one in priced)
    found = [e for bench in benches if bench is not None for e in estimates_of(bench, OUTLINE)]
    affordable = within_budget(question, found, [])
    return in_order(affordable, question.rate)[0] if affordable else None


@lru_cache(maxsize=128)
def _priced(size: str, place: str, length: str, formats: str) -> tuple[Priced, ...]:
    """Every hardware with its prices, whatever is promised."""
    question = asked(Inputs(size=size, place=place, length=length, formats=formats))
    found = []
    for hardware in hardware_of(question, GRID):
        if question.include_unserved or not hardware.why_not_served:
            with suppress(ConfigError):
                found.append(Priced(question, hardware))
    return tuple(found)


@lru_cache(maxsize=64)
def _plan(inputs: Inputs) -> Plan:
    return plan(asked(inputs), lambda: Random(0), GRID, WORK)


def answer(inputs: Inputs) -> Iterator[float | Answer[Drawing]]:
    """The leaf first, as it takes the longest; then what each other answer leads to."""
    every = sum(len(choices) for _, choices in BRANCHES.values())
    done, whole = 0.0, every + 8.0
    yield 0.0
    found = _plan(inputs)
    done += 8
    yield done / whole
    branches = []
    for field, (ask, names) in BRANCHES.items():
        choices = []
        for name in names:
            is_taken = getattr(inputs, field) == name
            others = {"formats": FORMATS[0], field: name}
            other = msgspec.structs.replace(inputs, **others)
            choices.append(_choice(name, _outline(other), TRAFFIC[other.traffic], is_taken))
            done += 1
            yield done / whole
        branches.append(Branch(field, ask, choices))
    drawing = Drawing(branches, _leaf(found))
    yield Answer(
        _sentence(inputs, found),
        drawing,
        _figures(found),
        [_choices_table(drawing), _out_table(found)],
        _questions(inputs, found, drawing),
        _guess(found),
    )


def _guess(found: Plan) -> Guess | None:
    best = _best(found)
    if best is None or best.estimate.hardware.offer.price is None:
        return None
    return Guess("What does an hour of the cheapest machine that keeps the promise cost?", "$",
                 best.cost)  # fmt: skip


def _choice(name: str, found: Estimate | None, rate: float, is_taken: bool) -> Choice:
    if found is None:
        return Choice(name, is_taken, "nothing keeps it", "", "")
    count, device = found.replicas(rate), found.hardware.device
    is_priced = found.hardware.offer.per_hour is not None
    price = f"${found.cost(count):.2f}/h" if is_priced else "price unknown"
    return Choice(name, is_taken, f"{count} x {device.name}", device.name, price)


def _best(found: Plan) -> Deployment | None:
    """What is cheaper and not served yet only where it was asked for."""
    return found.winner or found.unserved


def _leaf(found: Plan) -> Leaf:
    best = _best(found)
    if best is None:
        return Leaf("no plan", "", "", 0, "", found.why_none, [], [])
    lines = commands(found.question, best) if found.winner is not None else ("",)
    return Leaf(
        count_text(best),
        dollars(best),
        lines[0],
        len(lines) - 1,
        promise_flags(found.question),
        "" if found.winner is not None else best.estimate.hardware.why_not_served,
        [[one.what, one.choice, one.because] for one in reasons(found)],
        [one.text for one in found.sensitivity],
    )


def _sentence(inputs: Inputs, found: Plan) -> str:
    best = _best(found)
    if best is None:
        return f"For {inputs.traffic} with {inputs.size} there is no plan: {found.why_none}."
    question = found.question
    said = (
        f"{count_text(best)} for {dollars(best)}: {percent(best.validation.share, 0)} of the"
        f" simulated requests begin within {number(question.ttft_s)} s and go on with"
        f" {number(question.tpot_s * 1e3)} ms a token"
    )
    if found.winner is None:
        return f"{said}, but this version does not serve {best.estimate.hardware.why_not_served}."
    if found.sensitivity:
        return f"{said}; {found.sensitivity[0].text}."
    return said + "."


# fmt: off
def _figures(found: Plan) -> list[Figure]:
    best = _best(found)
    if best is None:
        return []
    estimate, check = best.estimate, best.validation
    question, name = found.question, "ridgeline.planner.search.validate"
    per_hour = 3600 * question.rate * (question.num_input + question.num_output)
    return [
        Figure("cost", best.cost, "$/h", "assumed",
            f"{best.num_devices} x {number(best.cost / best.num_devices)} $/h, the middle price",
            PLAN + "plan"),
        Figure("cost of all tokens", best.cost / per_hour * 1e6, "$/1M", "assumed",
            f"{number(best.cost)} $/h / ({number(question.rate)} requests/s x 3600 x"
            f" {question.num_input + question.num_output} tokens) x 1e6", PLAN + "plan"),
        Figure("promise kept", 100 * check.share, "%", "assumed",
            f"of {check.num_requests} simulated requests at {number(check.rate)} requests/s each",
            name),
        Figure("first token, 95 % within", check.ttft_s, "s", "assumed",
            "simulated with the real scheduler and the cost model's steps", name),
        Figure("between tokens, 95 % within", check.tpot_s, "s", "assumed",
            "simulated with the real scheduler and the cost model's steps", name),
        Figure("load of each replica", 100 * best.load, "%", "assumed",
            f"{number(best.rate / best.replicas)} / {number(estimate.saturation)} requests/s at"
            " saturation", "ridgeline.planner.search.Deployment.load"),
    ]
# fmt: on


def _choices_table(drawing: Drawing) -> Table:
    rows: list[list[str | float]] = [
        [branch.ask, one.name, "taken" if one.is_taken else "", one.leads_to, one.price]
        for branch in drawing.branches
        for one in branch.choices
    ]
    columns = ["question", "answer", "", "leads to, in closed form", "price"]
    return Table("One other answer, all else as it is", columns, rows)


def _out_table(found: Plan) -> Table:
    """The best of each hardware, and why others are out."""
    rows: list[list[str | float]] = [
        [one.hardware.text, one.kind, one.because] for one in found.out[:40]
    ]
    return Table("What is out, and why", ["hardware", "how", "because"], rows)


def _questions(inputs: Inputs, found: Plan, drawing: Drawing) -> list[Question]:
    changes = [
        (one.name, one.leads_to)
        for branch in drawing.branches
        for one in branch.choices
        if not one.is_taken and one.device != _taken(branch).device
    ]
    shown = "; ".join(f"{name}: {leads}" for name, leads in changes[:4])
    same = sum(len(branch.choices) - 1 for branch in drawing.branches) - len(changes)
    return [
        Question(
            "Which other answers lead to other hardware?",
            f"{len(changes)} of {len(changes) + same}" + (f", such as {shown}." if shown else "."),
        ),
        Question(
            "Why not simply the rule fits one device: quantize; else tensor parallel; else stages?",
            "A rule knows no prices, no traffic and no promise. Here"
            f" {len(found.estimates)} candidates were priced and {found.num_validations}"
            " simulated; the cheapest that keeps the promise wins, whatever its shape.",
        ),
    ]


def _taken(branch: Branch) -> Choice:
    return next(one for one in branch.choices if one.is_taken)


PAGE = Page(
    "decision_tree",
    "Which machine?",
    "Seven answers lead to a plan with its command, and to what would change it.",
    "Plan",
    Inputs,
    answer,
    long=True,
    presets=(
        Preset("A product in the cloud", {}),
        Preset("At home", {"place": "workstation", "traffic": "one person"}),
        Preset(
            "No GPU",
            {
                "place": "server without GPU",
                "size": "3B",
                "traffic": "one person",
                "promise": "reading along",
            },
        ),
        Preset("70B for a team", {"size": "70B", "traffic": "a team"}),
        Preset("Overnight documents", {"promise": "overnight", "length": "documents"}),
    ),
)
