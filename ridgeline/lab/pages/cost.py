"""What does a million tokens cost here, and when is it cheaper to rent, to own or to buy tokens?

Prices are bands with sources and dates; a typed one replaces them. Costs fall with the batch, as a
step is shared by more people, and so does the speed that each of them sees.
"""

from __future__ import annotations

from functools import lru_cache
from math import isfinite
from typing import Annotated

import msgspec

from ridgeline.cost.fit_suggestions import Limits
from ridgeline.cost.hardware import Device
from ridgeline.cost.money import (
    Band,
    Ownership,
    SplitCost,
    device_kilowatts,
    fixed_price,
    kwh_per_million_tokens,
    own_versus_rent,
    per_million_tokens,
    rent_band,
    requests_to_pay,
    split_cost,
)
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Layout
from ridgeline.cost.steady_state import batch_limit, check_context, token_budget
from ridgeline.cost.throughput import Load, Throughput, throughput
from ridgeline.errors import ConfigError
from ridgeline.figures import number, percent
from ridgeline.lab import market
from ridgeline.lab.machine import WEIGHTS, Model, kind_of, pricer_of
from ridgeline.lab.machine import Device as DeviceName
from ridgeline.lab.page import Answer, Figure, Guess, Page, Preset, Question, Table, control

BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
WHERE = "ridgeline.cost.money."
HOUR_S = 3600
# Dollars an hour and tokens a second of set-ups that teaching texts print.
TEXTBOOK = (
    ("one card", 2.5, 800.0),
    ("a server of older cards", 20.0, 3000.0),
    ("a server of newer cards", 32.0, 8000.0),
)


# fmt: off
class Inputs(msgspec.Struct, frozen=True):
    model: Model = "llama-3.1-8b"
    device: DeviceName = "h100-sxm"
    batch: Annotated[
        int, control("requests at once", ge=1, le=256, step=1, scale="log")] = 32
    num_input: Annotated[
        int, control("prompt", ge=1, le=65536, step=1, unit="tokens", scale="log")] = 1000
    num_output: Annotated[
        int, control("answer", ge=1, le=16384, step=1, unit="tokens", scale="log")] = 300
    utilisation: Annotated[
        float, control("busy share of the paid hours", ge=0.01, le=1, step=0.01)] = 0.5
    price: Annotated[
        float, control("price of a device", "0: the catalogue's, with its band", ge=0, le=200,
                       step=0.01, unit="$/h", is_folded=True)] = 0.0
    weights: Annotated[
        str, control("weights", "number format", choices=WEIGHTS, is_folded=True)] = "bf16"
    tp: Annotated[
        int, control("devices", "that split every layer", choices=(1, 2, 4, 8),
                     is_folded=True)] = 1
    api_input: Annotated[
        float, control("an API's prompt tokens", ge=0, le=100, step=0.01, unit="$/1M",
                       is_folded=True)] = market.API[0]
    api_output: Annotated[
        float, control("an API's answer tokens", ge=0, le=500, step=0.01, unit="$/1M",
                       is_folded=True)] = market.API[1]
    capex: Annotated[
        float, control("buying a device", "with its share of the server", ge=0, le=1e6, step=100,
                       unit="$", is_folded=True)] = round(market.H100_SERVER / 8, -2)
    years: Annotated[
        float, control("years of use", ge=0.5, le=10, step=0.5, is_folded=True)] = market.YEARS
    dollars_per_kwh: Annotated[
        float, control("electricity", ge=0, le=2, step=0.01, unit="$/kWh",
                       is_folded=True)] = market.KWH
# fmt: on


class Point(msgspec.Struct, frozen=True):
    """Of one batch: what a person sees, and dollars per million of all tokens."""

    batch: int
    tokens_per_s_per_user: float
    tokens_per_s: float
    low: float
    mid: float
    high: float


class Bar(msgspec.Struct, frozen=True):
    """Dollars per million tokens of one kind, here and at the API."""

    name: str
    low: float
    mid: float
    high: float
    api: float


class Drawing(msgspec.Struct, frozen=True):
    """`own` is the curve's figure at the chosen batch for a device that is owned."""

    points: list[Point]
    chosen: Point
    bars: list[Bar]
    own: float
    api: float
    most: int


class _Case:
    """What is asked, priced at each batch that has room."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.pricer = _pricer(inputs.model, inputs.device, inputs.weights, inputs.tp)
        self.device = self.pricer.setup.device
        self.budget = max(token_budget(self.pricer.setup), inputs.batch)
        load = self.load(inputs.batch)
        check_context(self.pricer.setup.spec, load)
        self.most = _most_requests(
            inputs.model, inputs.device, inputs.weights, inputs.tp, load.num_tokens
        )
        if inputs.batch > self.most:
            raise ConfigError(_no_room(inputs, self.most))
        self.price = self._price()
        self.rates = self.rates_at(inputs.batch)

    def _price(self) -> Band:
        if self.inputs.price:
            return fixed_price(self.inputs.price)
        band = rent_band(self.device)
        if band is None:
            raise ConfigError(
                f"no price of {self.device.name} is known; type one under price, in dollars an hour"
            )
        return band

    def load(self, batch: int) -> Load:
        return Load(batch, self.inputs.num_input, self.inputs.num_output, self.budget)

    def rates_at(self, batch: int) -> Throughput:
        return throughput(self.pricer, self.load(batch), stages=1)

    def per_million(self, price: float, tokens_per_s: float) -> float:
        inputs = self.inputs
        return per_million_tokens(
            price, tokens_per_s, num_devices=inputs.tp, utilisation=inputs.utilisation
        )

    def point(self, batch: int) -> Point:
        rates = self.rates_at(batch)
        every = rates.request_rate * rates.load.num_tokens
        band = self.price.map(lambda price: self.per_million(price, every))
        return Point(
            batch, rates.tokens_per_s_per_user, rates.tokens_per_s, band.low, band.mid, band.high
        )

    def split(self, price: float) -> SplitCost:
        """By the time that prompt and answer tokens keep the devices busy."""
        rates, inputs = self.rates, self.inputs
        return split_cost(
            price,
            rates.prompt_share / (rates.request_rate * inputs.num_input),
            (1 - rates.prompt_share) / rates.tokens_per_s,
            num_devices=inputs.tp,
            utilisation=inputs.utilisation,
        )


def _pricer(model: str, device: str, weights: str, tp: int) -> Pricer:
    return pricer_of(model, device, weights, layout=Layout(tp))


@lru_cache(maxsize=256)
def _most_requests(model: str, device: str, weights: str, tp: int, num_tokens: int) -> int:
    """How many requests of so many tokens have room at once; 0 where the weights have none."""
    setup = _pricer(model, device, weights, tp).setup
    return batch_limit(setup, Limits(num_tokens, 1, token_budget(setup)))


def _no_room(inputs: Inputs, most: int) -> str:
    if not most:
        return (
            f"{inputs.model} in {inputs.weights} does not fit on {inputs.tp} x {inputs.device};"
            " take more devices, fewer bits, or another device"
        )
    return (
        f"batch is {inputs.batch}; {most} requests of {inputs.num_input + inputs.num_output} tokens"
        f" have room on {inputs.tp} x {inputs.device}; lower it, or take more devices or fewer bits"
    )


def answer(inputs: Inputs) -> Answer[Drawing]:
    case = _Case(inputs)
    chosen = case.point(inputs.batch)
    batches = sorted({b for b in BATCHES if b <= min(case.most, case.budget)} | {inputs.batch})
    api = SplitCost(inputs.api_input, inputs.api_output)
    api_blend = api.request(inputs.num_input, inputs.num_output) / case.rates.load.num_tokens * 1e6
    owned = Ownership(
        inputs.capex, device_kilowatts(case.device), inputs.dollars_per_kwh, years=inputs.years
    )
    every = case.rates.request_rate * case.rates.load.num_tokens
    own = per_million_tokens(owned.per_hour(inputs.utilisation), every, num_devices=inputs.tp)
    splits = case.price.map(lambda p: case.split(p).input_per_million)
    answers = case.price.map(lambda p: case.split(p).output_per_million)
    drawing = Drawing(
        [case.point(batch) for batch in batches],
        chosen,
        [
            Bar("prompt", splits.low, splits.mid, splits.high, inputs.api_input),
            Bar("answer", answers.low, answers.mid, answers.high, inputs.api_output),
            Bar("all tokens", chosen.low, chosen.mid, chosen.high, api_blend),
        ],
        own,
        api_blend,
        case.most,
    )
    hourly = case.price.mid * inputs.tp
    pays = requests_to_pay(hourly, api.request(inputs.num_input, inputs.num_output))
    return Answer(
        _sentence(case, drawing, pays),
        drawing,
        _figures(case, drawing, owned, pays),
        [_points_table(drawing), _price_table(case.device), *_other_tables()],
        _questions(case, drawing, pays),
        Guess(
            f"What does a million answer tokens cost with {inputs.batch} requests at once?",
            "$",
            answers.mid,
        ),
    )


def _sentence(case: _Case, drawing: Drawing, pays: float) -> str:
    inputs, answers = case.inputs, drawing.bars[1]
    most = case.rates.request_rate * HOUR_S
    against = (
        f"from {number(pays)} requests an hour, {percent(pays / most, 0)} of what it can do, it is"
        " cheaper than the API"
        if pays <= most
        else "even at full load the API is cheaper"
    )
    band = f" (${number(answers.low)} to ${number(answers.high)} by source)"
    band = band if answers.low < answers.high else ""
    return (
        f"A million answer tokens cost ${number(answers.mid)}{band} and a million prompt tokens"
        f" ${number(drawing.bars[0].mid)} with {inputs.batch} requests at once, each at"
        f" {number(drawing.chosen.tokens_per_s_per_user)} tokens/s; {against}."
    )


# fmt: off
def _figures(case: _Case, drawing: Drawing, owned: Ownership, pays: float) -> list[Figure]:
    inputs, rates, kind = case.inputs, case.rates, kind_of(case.pricer.setup.constants.origin)
    prompt, answers, blended = drawing.bars
    hourly = f"{number(case.price.mid)} $/h x {inputs.tp}"
    busy = f"{number(inputs.utilisation)}"
    every = rates.request_rate * rates.load.num_tokens
    kilowatts = device_kilowatts(case.device)
    kwh = kwh_per_million_tokens(
        kilowatts, rates.tokens_per_s, num_devices=inputs.tp, utilisation=inputs.utilisation
    )
    against = own_versus_rent(owned, case.price.mid, utilisation=inputs.utilisation)
    request = case.split(case.price.mid).request(inputs.num_input, inputs.num_output)
    s_in = rates.prompt_share / (rates.request_rate * inputs.num_input)
    s_out = (1 - rates.prompt_share) / rates.tokens_per_s
    found = [
        Figure("prompt tokens", prompt.mid, "$/1M", kind,
            f"{hourly} / 3600 / {busy} x {number(s_in * 1e6)} us of the device x 1e6",
            WHERE + "split_cost"),
        Figure("answer tokens", answers.mid, "$/1M", kind,
            f"{hourly} / 3600 / {busy} x {number(s_out * 1e6)} us of the device x 1e6",
            WHERE + "split_cost"),
        Figure("all tokens", blended.mid, "$/1M", kind,
            f"{hourly} / ({number(every)} tokens/s x {busy} x 3600) x 1e6",
            WHERE + "per_million_tokens"),
        Figure("one request", request, "$", kind,
            f"({inputs.num_input} x {number(prompt.mid)} + {inputs.num_output} x"
            f" {number(answers.mid)}) / 1e6",
            WHERE + "SplitCost.request"),
        Figure("energy of a million answer tokens", kwh, "kWh", kind,
            f"{number(kilowatts)} kW x {inputs.tp} x 1e6 / ({number(rates.tokens_per_s)} tokens/s x"
            f" {busy}) / 3600",
            WHERE + "kwh_per_million_tokens"),
        Figure("an hour of use of an owned device", against.own_per_hour, "$/h", "assumed",
            f"{number(inputs.capex)} $ / ({number(inputs.years)} x 8760 h) / {busy} +"
            f" {number(kilowatts)} kW x {number(inputs.dollars_per_kwh)} $",
            WHERE + "Ownership.per_hour"),
    ]
    if isfinite(pays):
        found.append(
            Figure("cheaper than the API from", pays, "requests/h", "assumed",
                f"{hourly} / {number(drawing.api * rates.load.num_tokens / 1e6)} $ a request",
                WHERE + "requests_to_pay")
        )
    if against.break_even is not None:
        standing, energy = owned.standing_per_hour, owned.energy_per_hour
        found.append(
            Figure("owning is cheaper when busy for", 100 * against.break_even, "%", "assumed",
                f"{number(standing)} $/h / ({number(case.price.mid)} - {number(energy)}) $/h",
                WHERE + "own_versus_rent")
        )
    return found
# fmt: on


def _points_table(drawing: Drawing) -> Table:
    return Table(
        "By requests at once",
        ["requests", "tokens/s each", "tokens/s in all", "$/1M low", "$/1M", "$/1M high"],
        [
            [p.batch, p.tokens_per_s_per_user, p.tokens_per_s, p.low, p.mid, p.high]
            for p in drawing.points
        ],
    )


def _price_table(device: Device) -> Table:
    return Table(
        f"Prices of one {device.label} for an hour",
        ["low $", "middle $", "high $", "kind", "source", "date"],
        [[p.low, p.mid, p.high, p.source_type, p.source, p.date] for p in device.prices],
    )


def _other_tables() -> list[Table]:
    """What others asked; the cost table of teaching texts, and what their laptop at $0 leaves out;
    the engines."""
    asked: list[list[str | float]] = [
        [one.what, one.low, one.high, one.unit, one.source, one.date] for one in market.PRICES
    ]
    texts: list[list[str | float]] = [
        [name, price, speed, round(per_million_tokens(price, speed), 3)]
        for name, price, speed in TEXTBOOK
    ]
    kwh = kwh_per_million_tokens(0.06, 8.0)
    texts.append([f"laptop, 60 W: not 0 $ but {kwh:.1f} kWh", 0.0, 8.0, round(kwh * 0.15, 3)])
    columns = ["what", "low, or prompt", "high, or answer", "unit", "source", "date"]
    judged = ["engine", "for (our judgement)", "hardware", "several devices",
              "take another for (our judgement)", "source"]  # fmt: skip
    return [
        Table("What was asked for devices and for tokens", columns, asked),
        Table("Figures of teaching texts", ["set-up", "$/h", "tokens/s", "$/1M"], texts),
        Table("Which engine is for what", judged, [list(row) for row in market.ENGINES]),
    ]


# fmt: off
def _questions(case: _Case, drawing: Drawing, pays: float) -> list[Question]:
    first, last = drawing.points[0], drawing.points[-1]
    prompt, answers, _ = drawing.bars
    return [
        Question("How much of the cost is a matter of the batch?",
            f"One request at a time costs ${number(first.mid)} a million tokens,"
            f" {last.batch} at once ${number(last.mid)}: {number(first.mid / last.mid)} times less,"
            f" while each person's speed falls from {number(first.tokens_per_s_per_user)} to"
            f" {number(last.tokens_per_s_per_user)} tokens/s."),
        Question("Why are answer tokens dearer than prompt tokens?",
            "A prompt is read many tokens a step, an answer is written one token a step and"
            f" request: ${number(answers.mid)} against ${number(prompt.mid)} here."),
        Question("Does half the use cost twice as much?",
            f"Yes, of rented hours: at {percent(case.inputs.utilisation / 2, 0)} use a million"
            f" answer tokens would cost ${number(2 * answers.mid)}. What a token costs is first a"
            " question of traffic, then of speed."),
    ]
# fmt: on


PAGE = Page(
    "cost",
    "Cost",
    "A token costs what the device costs while making it, so the batch and the idle hours decide.",
    "Plan",
    Inputs,
    answer,
    presets=(
        Preset("8B on one H100", {}),
        Preset(
            "70B on eight H100",
            {"model": "llama-3.1-70b", "tp": 8, "batch": 64, "api_input": 0.13, "api_output": 0.40},
        ),
        Preset(
            "8B on a gaming card",
            {
                "device": "rtx-4090",
                "weights": "fp8",
                "batch": 16,
                "capex": 2500.0,
                "utilisation": 0.2,
            },
        ),
        Preset("A reader of long prompts", {"num_input": 16000, "num_output": 200, "batch": 8}),
    ),
)
