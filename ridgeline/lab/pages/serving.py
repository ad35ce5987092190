"""What do requests see when they come to a fleet of engines, and at which rate does it give way?

The scheduler, the block manager and the router are the engine's own, on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from ridgeline.cost.money import per_million_tokens, rent_band
from ridgeline.errors import RequestFault
from ridgeline.figures import number, percent, seconds
from ridgeline.formats import POLICIES
from ridgeline.lab.fleet import SWEPT, Fleet, Traffic
from ridgeline.lab.machine import Device, Model, Weights, kind_of
from ridgeline.lab.page import FOLDED, Answer, Figure, Guess, Page, Preset, Question, Table, control
from ridgeline.router import POLICIES as ROUTERS
from ridgeline.simulator.options import Outage
from ridgeline.simulator.report import (
    RequestTimeline,
    Slo,
    Summary,
    mean_in_system,
    phases,
    thinned,
)
from ridgeline.simulator.simulation import SimulationReport
from ridgeline.simulator.sweep import Sweep, is_saturated
from ridgeline.simulator.workload import ARRIVALS

MAX_DOTS = 400  # requests that flow in the drawing
MAX_POINTS = 240  # of a line over time
MAX_STEPS = 100  # of a distribution
RUNS_OF_A_SWEEP = 7  # about
SUMMARY = "ridgeline.simulator.report.summarize"


# fmt: off
class Inputs(msgspec.Struct, frozen=True):
    rate: Annotated[float, control("requests", ge=0.1, le=500, step=0.1, scale="log",
                                   unit="per s")] = 10.0
    gpus: Annotated[int, control("devices", "in all", ge=1, le=64, scale="log")] = 4
    tp: Annotated[int, control("devices of a replica", "that split every layer (TP)",
                               choices=(1, 2, 4, 8))] = 2
    readers: Annotated[int, control("replicas that only read", "prompts, and hand their caches to "
                                    "the others; 0: each does both", ge=0, le=32,
                                    is_folded=True)] = 0
    batching: Annotated[str, control("batching", choices=("continuous", "static"))] = "continuous"
    weights: Weights = "int8"
    max_num_seqs: Annotated[int, control("largest batch", "requests at once in a replica", ge=1,
                                         le=256, scale="log")] = 32
    drafts: Annotated[int, control("drafts in a step", "speculative decoding; 0: none", ge=0,
                                   le=8, is_folded=True)] = 0
    acceptance: Annotated[float, control("acceptance of a draft", ge=0, le=1, step=0.05,
                                         is_folded=True)] = 0.7
    model: Annotated[Model, FOLDED] = "llama-3.1-70b"
    device: Annotated[Device, FOLDED] = "h100-sxm"
    num_input: Annotated[int, control("prompts", "on average", ge=1, le=16000, scale="log",
                                      unit="tokens", is_folded=True)] = 500
    num_output: Annotated[int, control("answers", "on average", ge=1, le=4000, scale="log",
                                       unit="tokens", is_folded=True)] = 200
    ttft_ms: Annotated[float, control("promised first token", ge=1, le=60000, scale="log",
                                      unit="ms", is_folded=True)] = 1000.0
    tpot_ms: Annotated[float, control("promised time per token", "after the first", ge=1, le=1000,
                                      scale="log", unit="ms", is_folded=True)] = 50.0
    arrivals: Annotated[str, control("arrivals", choices=tuple(ARRIVALS),
                                     is_folded=True)] = "poisson"
    policy: Annotated[str, control("policy", "of the scheduler", choices=tuple(POLICIES),
                                   is_folded=True)] = "fcfs"
    router: Annotated[str, control("router", "of requests to replicas", choices=tuple(ROUTERS),
                                   is_folded=True)] = "least-loaded"
    prefixes: Annotated[int, control("texts that prompts begin with", "0: each is new", ge=0,
                                     le=64, is_folded=True)] = 0
    outage: Annotated[bool, control("a replica is lost", "for a sixth of the time, and comes back "
                                    "empty", is_folded=True)] = False
    requests: Annotated[int, control("requests in the run", ge=50, le=1000, step=50,
                                     is_folded=True)] = 300
    seed: Annotated[int, control("seed", ge=0, le=999, is_folded=True)] = 0
# fmt: on


class Rate(msgspec.Struct, frozen=True):
    """A run of the sweep: requests a second that came, and what they saw, in seconds."""

    rate: float
    done: float
    p50_s: float
    p99_s: float
    ttft_p99_s: float
    tokens_per_s: float
    kept: float
    is_saturated: bool


class Drawing(msgspec.Struct, frozen=True):
    """`requests` are (arrival, first scheduled, first token, end, replica that reads, one that
    answers), in seconds; -1: it never was. The first `readers` replicas only read. `times`: at
    each, requests that wait, read their prompts and are answered, and the share of the cache in
    use. `e2e`, `ttft`: seconds of the fastest, ..., slowest."""

    requests: list[tuple[float, float, float, float, int, int]]
    end_s: float
    replicas: int
    readers: int
    slots: int
    times: list[float]
    waiting: list[int]
    prefill: list[int]
    decode: list[int]
    cache: list[float]
    e2e: list[float]
    ttft: list[float]
    ttft_limit_s: float
    rates: list[Rate]
    rate: float
    capacity: float | None
    outage: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class _Run:
    """`together`: of the same requests where each replica does both, if none does here."""

    inputs: Inputs
    fleet: Fleet
    report: SimulationReport
    summary: Summary
    together: Summary | None
    sweep: Sweep | None = None


def answer(inputs: Inputs) -> Iterator[float | Answer[Drawing]]:
    """The run at this rate first; then the curve over rates, as far as it has come."""
    fleet, traffic = fleet_of(inputs), traffic_of(inputs)
    yield 0.0
    work = traffic.workload(inputs.requests)
    report = fleet.run(work)
    summary = report.summary(fleet.slo, _dollars(fleet))
    together = replace(fleet, readers=0).run(work).summary() if fleet.readers else None
    run = _Run(inputs, fleet, report, summary, together)
    yield _answered(run)
    calm = msgspec.structs.replace(inputs, outage=False)
    for done, found in enumerate(fleet_of(calm).sweep(traffic)):
        yield min(0.95, (done + 1) / RUNS_OF_A_SWEEP)
        if len(found.points) > 1:
            yield _answered(replace(run, sweep=found))


# ---------------------------------------------------------------------- what is run


def fleet_of(inputs: Inputs) -> Fleet:
    """Raises RequestFault for devices that make no whole replicas."""
    if inputs.gpus % inputs.tp:
        raise RequestFault(
            f"gpus is {inputs.gpus}; it must be a multiple of tp ({inputs.tp}), such as "
            f"{inputs.tp * max(1, round(inputs.gpus / inputs.tp))}",
            param="gpus",
        )
    start = 0.4 * inputs.requests / inputs.rate
    length = inputs.requests / inputs.rate / 6
    return Fleet(
        model=inputs.model,
        device=inputs.device,
        weights=inputs.weights,
        tp=inputs.tp,
        replicas=inputs.gpus // inputs.tp,
        readers=inputs.readers,
        batching=inputs.batching,  # type: ignore[arg-type]
        max_num_seqs=inputs.max_num_seqs,
        num_drafts=inputs.drafts,
        acceptance=inputs.acceptance,
        policy=inputs.policy,
        router=inputs.router,
        slo=Slo(inputs.ttft_ms / 1e3, inputs.tpot_ms / 1e3),
        outages=(Outage(0, start, start + length),) if inputs.outage else (),
    )


def traffic_of(inputs: Inputs) -> Traffic:
    return Traffic(inputs.rate, inputs.num_input, inputs.num_output, inputs.arrivals,
                   inputs.prefixes, inputs.seed)  # fmt: skip


def _dollars(fleet: Fleet) -> float | None:
    """An hour of all devices, at the middle of the catalogue's prices."""
    band = rent_band(fleet.setup.device)
    return None if band is None else band.mid * fleet.num_devices


# ---------------------------------------------------------------------- what is drawn


def _answered(run: _Run) -> Answer[Drawing]:
    inputs, fleet, report, sweep = run.inputs, run.fleet, run.report, run.sweep
    requests = report.requests
    end = max((r.finished_s or r.arrival_s for r in requests), default=0.0)
    times = [end * n / (MAX_POINTS - 1) for n in range(MAX_POINTS)]
    outage = fleet.outages[0] if fleet.outages else None
    drawing = Drawing(
        [_moments(one) for one in thinned(requests, MAX_DOTS)],
        end,
        fleet.replicas,
        fleet.readers,
        report.num_slots,
        times,
        *phases(requests, times),
        [round(share, 4) for share in report.used_shares(times)],
        _spread([one.e2e_s for one in requests]),
        _spread([one.ttft_s for one in requests]),
        inputs.ttft_ms / 1e3,
        _rates(sweep),
        inputs.rate,
        sweep.capacity if sweep else None,
        (outage.start_s, outage.end_s) if outage else None,
    )
    return Answer(
        _sentence(run),
        drawing,
        [*_figures(run), *_apart(run)],
        [_run_table(run.summary), _sweep_table(drawing)],
        _questions(run),
        Guess(
            "How many requests are in the fleet at once, on average?",
            "requests",
            mean_in_system(requests, 0.0, requests[-1].arrival_s),
        ),
    )


def _moments(one: RequestTimeline) -> tuple[float, float, float, float, int, int]:
    told = (one.started_s, one.first_token_s, one.finished_s)
    started, first, end = (-1.0 if moment is None else round(moment, 4) for moment in told)
    reader = one.replica if one.read_by is None else one.read_by
    return (round(one.arrival_s, 4), started, first, end, reader, one.replica)


def _spread(values: Sequence[float | None]) -> list[float]:
    return thinned(sorted(round(v, 4) for v in values if v is not None), MAX_STEPS)


def _rates(sweep: Sweep | None) -> list[Rate]:
    if sweep is None:
        return []
    return [
        Rate(one.rate, one.done_per_s, one.summary.e2e_s.p50 or 0.0, one.summary.e2e_s.p99 or 0.0,
             one.summary.ttft_s.p99 or 0.0, one.tokens_per_s, one.summary.slo_share or 0.0,
             one.is_saturated)
        for one in sweep.points
    ]  # fmt: skip


# ---------------------------------------------------------------------- what is said


def _sentence(run: _Run) -> str:
    inputs, report, summary = run.inputs, run.report, run.summary
    p50, p99 = (seconds(value or 0.0) for value in (summary.e2e_s.p50, summary.e2e_s.p99))
    said = (
        f"At {number(inputs.rate)} requests/s {percent(summary.slo_share or 0.0, 0)} get what was "
        f"promised; half are answered within {p50}, 99 % within {p99}"
    )
    if run.together is not None:
        apart, both = (seconds(one.tpot_s.p99 or 0.0) for one in (summary, run.together))
        said += f"; a token takes up to {apart} (99 %), {both} if each replica does both"
    if summary.num_retries:
        said += f", and {summary.num_retries} had to begin anew"
    capacity = run.sweep.capacity if run.sweep else None
    if capacity is None:
        if is_saturated(report.requests):
            return f"{said}; the queue keeps growing."
        return f"{said}."
    load = inputs.rate / capacity
    if load > 1:
        more = number(inputs.rate - capacity)
        return f"{said}. The fleet can do {number(capacity)}: the queue grows by {more} a second."
    return f"{said}. The fleet gives way at {number(capacity)}: it runs at {percent(load, 0)}."


def _figures(run: _Run) -> list[Figure]:
    inputs, fleet, report, summary = run.inputs, run.fleet, run.report, run.summary
    badge = kind_of(fleet.setup.constants.origin)
    last = report.requests[-1].arrival_s
    inside = mean_in_system(report.requests, 0.0, last)
    e2e = summary.e2e_s.mean or 0.0
    count, tokens = f"{summary.num_finished} requests", summary.output_tokens_per_s
    figures = [
        Figure("promise kept", 100 * (summary.slo_share or 0.0), "%", badge,
               f"TTFT <= {number(inputs.ttft_ms)} ms and TPOT <= {number(inputs.tpot_ms)} ms of "
               f"{len(report.requests)} requests", "ridgeline.simulator.report.Slo.is_kept"),
        Figure("answered, median", summary.e2e_s.p50 or 0.0, "s", badge, f"of {count}", SUMMARY),
        Figure("answered, p99", summary.e2e_s.p99 or 0.0, "s", badge, f"of {count}", SUMMARY),
        Figure("first token, p99", summary.ttft_s.p99 or 0.0, "s", badge, f"of {count}", SUMMARY),
        Figure("time per token, p99", summary.tpot_s.p99 or 0.0, "s", badge, f"of {count}",
               SUMMARY),
        Figure("answer tokens of all", tokens, "tok/s", badge,
               f"{count} / {seconds(summary.duration_s)}", SUMMARY),
        Figure("answer tokens of a user", 1 / (summary.tpot_s.mean or 1.0), "tok/s", badge,
               f"1 / {seconds(summary.tpot_s.mean or 0.0)}", SUMMARY),
        Figure("in the fleet", inside, "requests", badge,
               f"Little's law: {number(inputs.rate)}/s x {seconds(e2e)} = "
               f"{number(inputs.rate * e2e)} in the long run",
               "ridgeline.simulator.report.mean_in_system"),
        Figure("slots used", 100 * summary.slot_share, "%", badge,
               f"of {report.num_slots} in each of {report.num_replicas} replicas, while steps run",
               SUMMARY),
        Figure("KV cache, at most", 100 * summary.kv_max_share, "%", badge,
               f"of {report.num_blocks:,} blocks in each replica", SUMMARY),
    ]  # fmt: skip
    paid = _dollars(fleet)
    if paid is not None and tokens:
        figures.append(
            Figure("a million answer tokens", per_million_tokens(paid, tokens), "$", "assumed",
                   f"${number(paid)}/h / ({number(tokens)} tok/s x 3600) x 1e6",
                   "ridgeline.cost.money.per_million_tokens")
        )  # fmt: skip
    if run.sweep is not None and run.sweep.capacity is not None:
        num = fleet.replicas if fleet.readers else min(fleet.replicas, SWEPT)
        figures.append(
            Figure("capacity", run.sweep.capacity, "requests/s", badge,
                   f"from the growth of the queue of {num} replicas",
                   "ridgeline.simulator.sweep.capacity_seen")
        )  # fmt: skip
    return figures


def _apart(run: _Run) -> list[Figure]:
    """What separation is to be compared with, and what it costs."""
    if run.together is None:
        return []
    badge, num_tokens = kind_of(run.fleet.setup.constants.origin), run.inputs.num_input
    pairs = (("time per token", run.together.tpot_s), ("first token", run.together.ttft_s))
    return [
        *(Figure(f"unseparated: {name}, p99", one.p99 or 0.0, "s", badge,
                 "the same requests, each replica doing both", SUMMARY) for name, one in pairs),
        Figure("handing over a cache", run.fleet.handing_s(num_tokens), "s", badge,
               f"keys and values of {num_tokens:,} tokens over the link between replicas",
               "ridgeline.lab.fleet.Fleet.handing_s"),
    ]  # fmt: skip


def _run_table(summary: Summary) -> Table:
    named = {"time in the queue": summary.queue_s, "time to first token": summary.ttft_s,
             "time per token": summary.tpot_s, "whole answer": summary.e2e_s}  # fmt: skip
    rows: list[list[str | float]] = [
        [name, one.mean or 0.0, one.p50 or 0.0, one.p90 or 0.0, one.p99 or 0.0, one.max or 0.0]
        for name, one in named.items()
    ]
    return Table("the run, in seconds", ["", "mean", "p50", "p90", "p99", "max"], rows)


def _sweep_table(drawing: Drawing) -> Table:
    rows: list[list[str | float]] = [
        [one.rate, one.done, one.tokens_per_s, one.p50_s, one.p99_s, one.ttft_p99_s,
         100 * one.kept, "yes" if one.is_saturated else "no"]
        for one in drawing.rates
    ]  # fmt: skip
    columns = ["requests/s", "done/s", "tok/s", "answered p50 s", "p99 s", "first token p99 s",
               "promise kept %", "saturated"]  # fmt: skip
    return Table("by rate", columns, rows)


def _questions(run: _Run) -> list[Question]:
    inputs, report, summary, sweep = run.inputs, run.report, run.summary, run.sweep
    e2e, tpot = summary.e2e_s.mean or 0.0, summary.tpot_s.mean or 0.0
    places = report.num_slots * report.num_replicas
    capacity = sweep.capacity if sweep else None
    known = f"{number(capacity)} requests/s" if capacity else "the capacity (see the curve)"
    return [
        Question(
            "How many places does this traffic need?",
            f"Little's law: {number(inputs.rate)} a second, each here for {seconds(e2e)}, are "
            f"{number(inputs.rate * e2e)} at once. There are {places:,} places.",
        ),
        Question(
            "Is the time of a token the time of a step, or that divided by the batch?",
            f"Of a step: {seconds(tpot)} for each token of each request, however many share the "
            f"step. Divided by the batch it is the time between any two tokens of the fleet, "
            f"{seconds(1 / summary.output_tokens_per_s)}, which nobody waits for.",
        ),
        Question(
            "Why not plan for all that the fleet can do?",
            f"Near {known} chance alone fills the queue: waiting grows as 1 / (1 - load). The "
            "curve by rate turns up well before the end.",
        ),
    ]


PAGE = Page(
    "serving",
    "A serving system",
    "Up to some rate of requests nearly nobody waits; beyond it the queue grows without end.",
    "Many requests",
    Inputs,
    answer,
    long=True,
    presets=(
        Preset("70B in int8 on 4 H100", {}),
        Preset("Too many requests", {"rate": 30.0}),
        Preset("Static batches", {"batching": "static", "rate": 6.0}),
        Preset("8B, 4 replicas", {"model": "llama-3.1-8b", "tp": 1, "weights": "bf16", "rate": 60.0,
                                  "requests": 600}),
        Preset("A replica is lost", {"outage": True}),
        Preset("Shared beginnings", {"prefixes": 12, "num_input": 3000, "router": "prefix-aware",
                                     "gpus": 8, "rate": 12.0, "requests": 400}),
        Preset("Prompts read apart", {"model": "llama-3.1-8b", "tp": 1, "weights": "bf16",
                                      "rate": 4.0, "num_input": 8000, "readers": 2}),
        Preset("With drafts", {"drafts": 3, "rate": 4.0}),
    ),
)  # fmt: skip
