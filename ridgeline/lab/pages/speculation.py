"""How much faster are answers whose next tokens a draft proposes and the model verifies together?

The tape is drawn by chance, or it is what the engine does with the bundled model and its draft: its
own verification on real tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from ridgeline.cost.setup import Layout
from ridgeline.figures import number, percent, seconds
from ridgeline.formats import AskedDrafts
from ridgeline.lab.machine import Device, Model, Weights, kind_of, pricer_of, spec_of
from ridgeline.lab.page import FOLDED, Answer, Figure, Guess, Page, Preset, Question, Table, control
from ridgeline.lab.tape import (
    CHANCE,
    MAX_TAPE,
    NUM_TOSSED,
    REAL,
    Step,
    Tape,
    read_places,
    real_tape,
    tossed_tape,
)
from ridgeline.speculation.price import (
    MAX_DRAFTS,
    DraftPrices,
    drafter_of,
    expected_curve,
    simple_speedup,
)

DRAFTERS = {"draft model": "draft", "draft head": "eagle3", "prompt lookup": "ngram"}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PRICE = "ridgeline.speculation.price"


class Inputs(msgspec.Struct, frozen=True):
    source: Annotated[
        str,
        control("drafts are right by", "or as the bundled pair agrees", choices=(CHANCE, REAL)),
    ] = CHANCE
    num_drafts: Annotated[int, control("drafts in a step, k", ge=1, le=MAX_DRAFTS)] = 5
    acceptance: Annotated[
        float,
        control("acceptance", "that a draft is right if all before it were", ge=0, le=1, step=0.01),
    ] = 0.8
    draft_cost: Annotated[
        float,
        control(
            "cost of a draft",
            "of one token, in steps of the model; for the simple form alone",
            ge=0,
            le=0.5,
            step=0.01,
            unit="steps",
        ),
    ] = 0.05
    batch: Annotated[int, control("batch", "requests", ge=1, le=256, scale="log")] = 1
    prompt: Annotated[
        str, control("what the bundled model is asked", "its draft proposes", length=300)
    ] = "Tell me a story about a dog and a red ball."
    temperature: Annotated[
        float,
        control("temperature", "of the bundled model", ge=0, le=1.5, step=0.1, is_folded=True),
    ] = 0.0
    model: Annotated[Model, FOLDED] = "llama-3.1-70b"
    drafter: Annotated[
        str, control("what drafts", "there", choices=tuple(DRAFTERS), is_folded=True)
    ] = "draft model"
    draft: Annotated[Model, msgspec.Meta(title="draft model", extra={"is_folded": True})] = (
        "llama-3.2-1b"
    )
    device: Annotated[Device, FOLDED] = "h200-sxm"
    weights: Annotated[Weights, FOLDED] = "fp8"
    tp: Annotated[
        int, control("devices", "that split every layer", choices=(1, 2, 4, 8), is_folded=True)
    ] = 1
    context: Annotated[
        int, control("context", ge=16, le=32768, scale="log", unit="tokens", is_folded=True)
    ] = 1000
    seed: Annotated[int, control("seed", ge=0, le=999, is_folded=True)] = 3
    rejected: Annotated[
        str, control("drafts rejected", "on the tape, step:draft", length=100, is_hidden=True)
    ] = ""


class Bar(msgspec.Struct, frozen=True):
    num_drafts: int
    tokens: float
    simple: float
    priced: float


class Drawing(msgspec.Struct, frozen=True):
    """`surface[b][k]` is the speed-up with `batches[b]` requests and k drafts."""

    steps: list[Step]
    tape_mean: float
    curve: list[Bar]
    batches: list[int]
    surface: list[list[float]]
    best: list[int]
    best_simple: int
    by_position: list[float]
    text: str


def answer(inputs: Inputs) -> Iterator[float | Answer[Drawing]]:
    yield 0.0
    tape = _tape(inputs)
    yield 0.3
    expected = expected_curve(tape.acceptance)
    prices = _prices(inputs)
    surface = []
    for done, batch in enumerate(BATCHES):
        surface.append(prices.speedups(batch, inputs.context, expected))
        yield 0.3 + 0.6 * (done + 1) / len(BATCHES)
    priced = prices.speedups(inputs.batch, inputs.context, expected)
    curve = [
        Bar(k, tokens, simple_speedup(tape.acceptance, k, inputs.draft_cost), priced[k])
        for k, tokens in enumerate(expected)
    ]
    drawing = Drawing(
        tape.steps[:MAX_TAPE],
        tape.mean,
        curve,
        list(BATCHES),
        surface,
        [max(range(len(row)), key=row.__getitem__) for row in surface],
        max(curve, key=lambda one: one.simple).num_drafts,
        tape.by_position,
        tape.text,
    )
    yield Answer(
        _sentence(inputs, tape, drawing),
        drawing,
        _figures(inputs, tape, drawing, prices),
        [_curve_table(drawing, inputs), _surface_table(drawing)],
        _questions(inputs, drawing, prices),
        _guess(inputs, tape, drawing),
    )


def _tape(inputs: Inputs) -> Tape:
    k, seed, places = inputs.num_drafts, inputs.seed, read_places(inputs.rejected)
    if inputs.source == REAL:
        prompt = inputs.prompt.strip() or "Hello."
        return real_tape(k, prompt, inputs.temperature, seed, places)
    return tossed_tape(k, inputs.acceptance, seed, places)


# ---------------------------------------------------------------------- prices


def _prices(inputs: Inputs) -> DraftPrices:
    layout = Layout(tp=inputs.tp)
    target = pricer_of(inputs.model, inputs.device, inputs.weights, layout=layout)
    asked = AskedDrafts(DRAFTERS[inputs.drafter], inputs.draft)
    draft = spec_of(inputs.draft) if inputs.drafter == "draft model" else None
    return DraftPrices(target, drafter_of(target.setup, asked, draft))


# ---------------------------------------------------------------------- what is said


def _sentence(inputs: Inputs, tape: Tape, drawing: Drawing) -> str:
    k = inputs.num_drafts
    chosen, simple = drawing.curve[k], drawing.curve[drawing.best_simple]
    best = max(drawing.curve, key=lambda one: one.priced)
    drafts = "1 draft" if k == 1 else f"{k} drafts"
    begin = (
        f"With {drafts} a step gives {number(chosen.tokens)} tokens and answers come "
        f"{number(chosen.simple)} times as fast; the best is {simple.num_drafts} drafts with "
        f"{number(simple.simple)} times"
    )
    if inputs.source == REAL:
        begin = (
            f"The bundled model keeps {percent(tape.acceptance, 0)} of the draft tokens that it "
            f"looks at: with {drafts} a step gives {number(tape.mean)} tokens"
        )
    if tape.num_lost:
        begin += f", {tape.num_lost} right drafts thrown away as you rejected some"
    who = "1 request" if inputs.batch == 1 else f"{inputs.batch} requests"
    where = f"By the price of steps of {inputs.model} with {who}"
    if best.num_drafts == 0:
        return f"{begin}. {where}, no number of drafts pays."
    return f"{begin}. {where}, {best.num_drafts} is best: {number(best.priced)} times."


def _figures(inputs: Inputs, tape: Tape, drawing: Drawing, prices: DraftPrices) -> list[Figure]:
    k, rate, cost = inputs.num_drafts, tape.acceptance, inputs.draft_cost
    chosen, simple = drawing.curve[k], drawing.curve[drawing.best_simple]
    best = max(drawing.curve, key=lambda one: one.priced)
    is_real = inputs.source == REAL
    target = pricer_of(inputs.model, inputs.device, inputs.weights, layout=Layout(tp=inputs.tp))
    badge = kind_of(target.setup.constants.origin)
    step_s = prices.seconds(inputs.batch, inputs.context, 0)
    verify_s = prices.seconds(inputs.batch, inputs.context, k)
    drafting_s = prices.drafter.seconds(inputs.batch, inputs.context, k)
    a = number(rate)
    return [
        Figure(
            "tokens of a step", chosen.tokens, "tokens", "ideal",
            f"1 + {a} + .. + {a}^{k} = (1 - {a}^{k + 1}) / (1 - {a})" if rate < 1 else f"{k} + 1",
            f"{PRICE}.expected_tokens",
        ),
        Figure(
            "tokens of a step on this tape", tape.mean, "tokens",
            "measured" if is_real else "ideal",
            "counted by the engine" if is_real else f"mean of {NUM_TOSSED} steps by chance",
            "ridgeline.lab.tape.real_tape" if is_real
            else "ridgeline.simulator.executor.Speculation.num_accepted",
        ),
        *([Figure(
            "right drafts that you rejected", tape.num_lost, "tokens",
            "measured" if is_real else "ideal", "and those that stood behind them",
            "ridgeline.lab.tape.real_tape" if is_real else "ridgeline.lab.tape.tossed_tape",
        )] if tape.num_lost else []),
        Figure(
            "acceptance", rate, "", "measured" if is_real else "assumed",
            "right ones / drafts that were looked at" if is_real else "as given",
            "ridgeline.speculation.report.DraftTotals.count_result",
        ),
        Figure(
            "speed-up, simple form", chosen.simple, "x", "ideal",
            f"{number(chosen.tokens)} / (1 + {k} x {number(cost)})", f"{PRICE}.simple_speedup",
        ),
        Figure(
            "best k, simple form", simple.num_drafts, "drafts", "ideal",
            f"the largest of k = 0 .. {MAX_DRAFTS}: {number(simple.simple)} times",
            f"{PRICE}.simple_speedup",
        ),
        Figure(
            "best speed-up, simple form", simple.simple, "x", "ideal",
            f"{number(simple.tokens)} / (1 + {simple.num_drafts} x {number(cost)})",
            f"{PRICE}.simple_speedup",
        ),
        Figure(
            "speed-up by the price of steps", chosen.priced, "x", badge,
            f"{number(chosen.tokens)} x {seconds(step_s)} / {seconds(verify_s)}",
            f"{PRICE}.DraftPrices.seconds",
        ),
        Figure(
            "best k by the price of steps", best.num_drafts, "drafts", badge,
            f"the largest of k = 0 .. {MAX_DRAFTS}: {number(best.priced)} times",
            f"{PRICE}.DraftPrices.seconds",
        ),
        Figure(
            "drafting", drafting_s, "s", badge, f"{k} drafts for {inputs.batch} of "
            f"{inputs.context:,} tokens", f"{PRICE}.Drafter.seconds",
        ),
        Figure(
            "verifying", verify_s - drafting_s, "s", badge,
            f"{seconds(verify_s)} - {seconds(drafting_s)}", f"{PRICE}.DraftPrices.seconds",
        ),
    ]  # fmt: skip


def _curve_table(drawing: Drawing, inputs: Inputs) -> Table:
    rows: list[list[str | float]] = [
        [one.num_drafts, one.tokens, one.simple, one.priced] for one in drawing.curve
    ]
    columns = ["drafts k", "tokens of a step", "simple form, times", "by price, times"]
    return Table(f"by the number of drafts, batch {inputs.batch}", columns, rows)


def _surface_table(drawing: Drawing) -> Table:
    rows: list[list[str | float]] = [
        [batch, best, *row]
        for batch, best, row in zip(drawing.batches, drawing.best, drawing.surface, strict=True)
    ]
    columns = ["batch", "best k", *(f"k = {k}" for k in range(len(drawing.curve)))]
    return Table("speed-up by the price of steps", columns, rows)


def _questions(inputs: Inputs, drawing: Drawing, prices: DraftPrices) -> list[Question]:
    curve, best = drawing.curve, drawing.best_simple
    flat = [one.num_drafts for one in curve if one.simple >= 0.95 * curve[best].simple]
    k = inputs.num_drafts
    verify_s, plain_s = (
        prices.seconds(1, inputs.context, n) - prices.drafter.seconds(1, inputs.context, n)
        for n in (k, 0)
    )
    first, last = drawing.surface[0][drawing.best[0]], drawing.surface[-1][drawing.best[-1]]
    return [
        Question(
            "How exactly must k be chosen?",
            f"Not very: in the simple form {flat[0]} to {flat[-1]} drafts keep 95 % of the best "
            f"speed-up, {number(curve[best].simple)} times at {best}.",
        ),
        Question(
            f"How much longer does a step take that verifies {k} drafts of one request?",
            f"{seconds(verify_s)} instead of {seconds(plain_s)}: the weights are read once in "
            "either case, and a lone request leaves arithmetic idle.",
        ),
        Question(
            "What becomes of the gain when many are served?",
            f"It falls from {number(first)} times for one request to {number(last)} for "
            f"{drawing.batches[-1]}: each draft is one more row of a step whose arithmetic is "
            "already busy.",
        ),
    ]


def _guess(inputs: Inputs, tape: Tape, drawing: Drawing) -> Guess:
    a, cost = number(tape.acceptance), number(inputs.draft_cost)
    ask = f"With acceptance {a} and {cost} steps a draft, which number of drafts is best?"
    return Guess(ask, "drafts", drawing.best_simple)


PAGE = Page(
    "speculation",
    "Speculative decoding",
    "A draft proposes tokens, the model verifies them in one step: the same answer, sooner.",
    "Many requests",
    Inputs,
    answer,
    long=True,
    presets=(
        Preset("A textbook's 0.8 and 0.05", {}),
        Preset("Another's 0.7 and 0.07", {"acceptance": 0.7, "draft_cost": 0.07}),
        Preset("The bundled models", {"source": REAL, "num_drafts": 4}),
        Preset("A bad draft", {"acceptance": 0.3, "draft_cost": 0.2, "num_drafts": 4}),
        Preset("Many requests", {"batch": 128, "num_drafts": 3}),
        Preset("Prompt lookup", {"drafter": "prompt lookup", "acceptance": 0.4, "draft_cost": 0}),
    ),
)
