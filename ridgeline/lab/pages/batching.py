"""How much of a batch is empty that waits for its longest answer, and if free slots are refilled?

Both runs are the real scheduler on the virtual clock, once with static batches and once as an
engine runs it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Annotated

import msgspec

from ridgeline.cost.pricer import Pricer
from ridgeline.cost.throughput import static_waste
from ridgeline.errors import RequestFault
from ridgeline.figures import number, percent, seconds
from ridgeline.lab.machine import Device, Kind, Model, Weights, kind_of, pricer_of
from ridgeline.lab.page import FOLDED, Answer, Figure, Guess, Page, Preset, Question, Table, control
from ridgeline.scheduler.block_manager import blocks_needed
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.simulator.lanes import Lanes
from ridgeline.simulator.report import Summary
from ridgeline.simulator.simulation import Machine, Options, Simulation
from ridgeline.simulator.workload import Arrival, Workload, arrival_times

BLOCK_SIZE = 16
SHAPES = ("one long", "uneven", "equal")
SIMULATION = "ridgeline.simulator.report.summarize"


class Inputs(msgspec.Struct, frozen=True):
    slots: Annotated[int, control("slots", "requests at once (max_num_seqs)", ge=2, le=16)] = 8
    lengths: Annotated[
        str,
        control(
            "answers",
            "one long: the last of the first batch is the longest, all others the shortest; "
            "uneven: anything between the two",
            choices=SHAPES,
        ),
    ] = "one long"
    longest: Annotated[
        int, control("longest answer", ge=2, le=1000, scale="log", unit="tokens")
    ] = 500
    waiting: Annotated[
        int, control("requests behind the first batch", "they wait for a slot", ge=0, le=400)
    ] = 168
    chunked_prefill: Annotated[
        bool,
        control("chunked prefill", "a long prompt is read in pieces, beside the answers"),
    ] = True
    small_cache: Annotated[
        bool,
        control("small KV cache", "not all slots can grow to their end: requests are preempted"),
    ] = False
    shortest: Annotated[
        int, control("shortest answer", ge=1, le=1000, scale="log", unit="tokens", is_folded=True)
    ] = 20
    prompt: Annotated[
        int, control("prompts", ge=1, le=4000, scale="log", unit="tokens", is_folded=True)
    ] = 16
    long_prompt: Annotated[
        int,
        control(
            "and one long prompt",
            "of the first that waits; 0: none",
            ge=0,
            le=32000,
            step=500,
            unit="tokens",
            is_folded=True,
        ),
    ] = 0
    budget: Annotated[
        int,
        control(
            "tokens in a step",
            "most of them (max_num_batched_tokens)",
            ge=16,
            le=8192,
            scale="log",
            is_folded=True,
        ),
    ] = 512
    cache: Annotated[
        int,
        control(
            "size of the small cache",
            "of what all slots need at their longest",
            ge=15,
            le=100,
            unit="%",
            is_folded=True,
        ),
    ] = 50
    rate: Annotated[
        float,
        control(
            "arrivals of those behind",
            "0: all are there from the start",
            ge=0,
            le=200,
            step=1,
            unit="per s",
            is_folded=True,
        ),
    ] = 0.0
    plans_ahead: Annotated[
        bool,
        control(
            "plan ahead",
            "the next step is planned while one runs, as an engine on a GPU does: it "
            "learns a step late that a request has ended",
            is_folded=True,
        ),
    ] = False
    model: Annotated[Model, FOLDED] = "llama-3.1-8b"
    device: Annotated[Device, FOLDED] = "h100-sxm"
    weights: Annotated[Weights, FOLDED] = "bf16"
    seed: Annotated[int, control("seed", ge=0, le=999, is_folded=True)] = 0


class Lane(msgspec.Struct, frozen=True):
    """One way of batching. `pieces` are (slot, request, kind, start s, end s, steps), `preemptions`
    (s, request); shares are 0 to 1."""

    name: str
    pieces: list[tuple[int, str, str, float, float, int]]
    preemptions: list[tuple[float, str]]
    end_s: float
    num_steps: int
    num_idle: int
    num_again: int
    slot_share: float
    tokens_per_s: float
    p50_s: float
    p99_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    longest_step_s: float


class Drawing(msgspec.Struct, frozen=True):
    """`lengths` are tokens of the answers, by request."""

    slots: int
    lengths: list[int]
    static: Lane
    continuous: Lane


def answer(inputs: Inputs) -> Iterator[float | Answer[Drawing]]:
    work = workload(inputs)
    yield 0.0
    static = lane_of(inputs, work, is_static=True)
    yield 0.5
    continuous = lane_of(inputs, work, is_static=False)
    lengths = [one.num_output for one in work]
    drawing = Drawing(inputs.slots, lengths, static, continuous)
    yield Answer(
        _sentence(inputs, drawing),
        drawing,
        _figures(inputs, work, drawing),
        [_table(drawing)],
        _questions(inputs, work, drawing),
        Guess(
            "How many slot-steps does static batching pay for without a token coming out?",
            "slot-steps",
            static.num_idle,
        ),
    )


# ---------------------------------------------------------------------- what is run


def workload(inputs: Inputs) -> Workload:
    """The first batch is there at once; those behind it come at their rate."""
    if inputs.shortest > inputs.longest:
        raise RequestFault(
            f"shortest is {inputs.shortest}; it must be at most longest ({inputs.longest})",
            param="shortest",
        )
    rng = Random(inputs.seed)
    times = [0.0] * inputs.waiting
    if inputs.rate and inputs.waiting:
        coming = arrival_times(rng, inputs.rate, "poisson")
        times = [next(coming) for _ in range(inputs.waiting)]
    arrivals = []
    for index, when in enumerate([0.0] * inputs.slots + times):
        prompt = inputs.prompt
        if index == inputs.slots and inputs.long_prompt:
            prompt = inputs.long_prompt
        arrivals.append(Arrival(when, prompt, _length(inputs, index, rng), id=str(index)))
    return tuple(arrivals)


def _length(inputs: Inputs, index: int, rng: Random) -> int:
    low, high = inputs.shortest, inputs.longest
    if inputs.lengths == "one long":
        return high if index == inputs.slots - 1 else low
    if inputs.lengths == "equal":
        return high
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def lane_of(inputs: Inputs, work: Workload, *, is_static: bool) -> Lane:
    """One run, with what was in each slot."""
    found: list[Lanes] = []

    def listener(number: int, scheduler: Scheduler) -> Lanes:
        found.append(Lanes(scheduler))
        return found[-1]

    options = Options(
        static_batching=is_static,
        chunked_prefill=inputs.chunked_prefill,
        prefix_caching=False,
        max_in_flight=2 if inputs.plans_ahead else 1,
        max_num_seqs=inputs.slots,
        max_num_batched_tokens=max(inputs.budget, inputs.slots),
        block_size=BLOCK_SIZE,
    )
    report = Simulation(_machine(inputs, work), work, options, listener_of=listener).run()
    lanes, summary = found[0], report.summary()
    longest = max((one.end_s - one.start_s) / one.num_steps for one in report.steps)
    return _lane("static" if is_static else "continuous", lanes, summary, longest)


def _machine(inputs: Inputs, work: Workload) -> Machine:
    pricer = _pricer(inputs)
    longest = max(one.num_input + one.num_output for one in work)
    each = blocks_needed(longest, BLOCK_SIZE, (None,), inputs.budget)
    need = inputs.slots * each
    return Machine(pricer, max(each, need * inputs.cache // 100) if inputs.small_cache else need)


def _pricer(inputs: Inputs) -> Pricer:
    return pricer_of(inputs.model, inputs.device, inputs.weights)


def _lane(name: str, lanes: Lanes, summary: Summary, longest_step_s: float) -> Lane:
    e2e, ttft = summary.e2e_s, summary.ttft_s
    return Lane(
        name,
        [(p.slot, p.request, p.kind, p.start_s, p.end_s, p.num_steps) for p in lanes.pieces],
        lanes.preemptions,
        summary.duration_s,
        summary.num_steps,
        summary.num_idle_slot_steps,
        lanes.count("again"),
        summary.slot_share,
        summary.output_tokens_per_s,
        e2e.p50 or 0.0,
        e2e.p99 or 0.0,
        ttft.p50 or 0.0,
        ttft.p99 or 0.0,
        longest_step_s,
    )


# ---------------------------------------------------------------------- what is said


def _sentence(inputs: Inputs, drawing: Drawing) -> str:
    static, other = drawing.static, drawing.continuous
    paid = static.num_steps * inputs.slots
    first = (
        f"Static batching leaves {static.num_idle:,} of {paid:,} slot-steps empty "
        f"({percent(static.num_idle / paid, 0)})"
    )
    ratio = static.end_s / other.end_s
    if static.num_steps == other.num_steps and not inputs.waiting:
        return f"{first}; with nobody waiting for them, continuous batching takes as many steps."
    steps = f"{other.num_steps:,} steps instead of {static.num_steps:,}"
    end = f"{first}; continuous batching refills them and is done after {steps}, "
    end += f"{number(ratio)} times as fast, with {percent(other.slot_share, 0)} of its slots used"
    if other.preemptions:
        end += f" and {len(other.preemptions)} preemptions for want of cache"
    return f"{end}."


def _figures(inputs: Inputs, work: Workload, drawing: Drawing) -> list[Figure]:
    first = [one.num_output for one in work[: inputs.slots]]
    waste, longest = static_waste(first), max(first)
    static, other = drawing.static, drawing.continuous
    formula = f"{len(first)} x {longest} - {sum(first)}"
    if inputs.lengths == "one long":
        formula = f"{inputs.slots - 1} x ({inputs.longest} - {inputs.shortest})"
    badge = kind_of(_pricer(inputs).setup.constants.origin)
    found = [
        Figure(
            "empty in the first batch, if static", waste, "slot-steps", "ideal", formula,
            "ridgeline.cost.throughput.static_waste",
        ),
        Figure(
            "share of that batch", 100 * waste / (len(first) * longest), "%", "ideal",
            f"{waste:,} / ({len(first)} x {longest})", "ridgeline.cost.throughput.static_waste",
        ),
    ]  # fmt: skip
    for lane in (static, other):
        found += _lane_figures(lane, inputs, len(work), badge)
    found.append(
        Figure(
            "speed-up", static.end_s / other.end_s, "x", badge,
            f"{seconds(static.end_s)} / {seconds(other.end_s)}", SIMULATION,
        )
    )  # fmt: skip
    return found


def _lane_figures(lane: Lane, inputs: Inputs, num_requests: int, badge: Kind) -> list[Figure]:
    name, paid = lane.name, lane.num_steps * inputs.slots
    used = paid - lane.num_idle
    return [
        Figure(
            f"{name}: empty in all", lane.num_idle, "slot-steps", "ideal",
            f"{lane.num_steps:,} steps x {inputs.slots} slots - {used:,} used", SIMULATION,
        ),
        Figure(
            f"{name}: slots used", 100 * lane.slot_share, "%", "ideal",
            f"{used:,} / {paid:,}", SIMULATION,
        ),
        Figure(
            f"{name}: tokens of answers", lane.tokens_per_s, "tok/s", badge,
            f"all answers / {seconds(lane.end_s)}", SIMULATION,
        ),
        Figure(
            f"{name}: half of the requests are answered within", lane.p50_s, "s", badge,
            f"median of {num_requests} times from arrival to last token", SIMULATION,
        ),
        Figure(
            f"{name}: 99 % are answered within", lane.p99_s, "s", badge,
            f"99th percentile of {num_requests}", SIMULATION,
        ),
    ]  # fmt: skip


def _table(drawing: Drawing) -> Table:
    rows: list[list[str | float]] = [
        [
            one.name, one.num_steps, one.num_idle, 100 * one.slot_share, one.end_s,
            one.tokens_per_s, one.p50_s, one.p99_s, one.ttft_p50_s, one.ttft_p99_s,
            1e3 * one.longest_step_s, len(one.preemptions),
        ]
        for one in (drawing.static, drawing.continuous)
    ]  # fmt: skip
    columns = [
        "batching", "steps", "empty slot-steps", "slots used %", "seconds", "tok/s", "p50 s",
        "p99 s", "first token p50 s", "p99 s", "longest step ms", "preemptions",
    ]  # fmt: skip
    return Table("both ways of batching", columns, rows)


def _questions(inputs: Inputs, work: Workload, drawing: Drawing) -> list[Question]:
    static, other = drawing.static, drawing.continuous
    first = [one.num_output for one in work[: inputs.slots]]
    waste, paid = static_waste(first), len(first) * max(first)
    return [
        Question(
            "What does the longest answer of a static batch cost the others?",
            f"{waste:,} of the first batch's {paid:,} slot-steps: it runs for {max(first)} steps, "
            f"its other answers need {sum(first) - max(first):,} of {paid - max(first):,}.",
        ),
        Question(
            "Does continuous batching always fill all slots?",
            f"No: here it leaves {other.num_idle:,} slot-steps empty. Slots stay empty when nobody "
            "waits, as at the end of this run, and each refill comes a step late where the next "
            "step is planned while one runs.",
        ),
        Question(
            "Who gains most, the throughput or the requests?",
            f"Both: {number(other.tokens_per_s)} tok/s instead of {number(static.tokens_per_s)}, "
            f"and half of the requests are answered within {seconds(other.p50_s)} instead of "
            f"{seconds(static.p50_s)}. The longest step takes {seconds(other.longest_step_s)}; "
            "everybody who is being answered waits for it.",
        ),
    ]


PAGE = Page(
    "batching",
    "Static and continuous batching",
    "A static batch waits for its longest answer; continuous batching gives a free slot away.",
    "Many requests",
    Inputs,
    answer,
    long=True,
    presets=(
        Preset("A textbook's batch, and who waits", {}),
        Preset("The batch alone", {"waiting": 0}),
        Preset("Uneven answers", {"lengths": "uneven", "waiting": 40, "slots": 8}),
        Preset("Equal answers", {"lengths": "equal", "longest": 100, "waiting": 40}),
        Preset(
            "A long prompt, in chunks",
            {"longest": 200, "waiting": 20, "long_prompt": 16000, "lengths": "uneven"},
        ),
        Preset(
            "The same, whole",
            {
                "longest": 200, "waiting": 20, "long_prompt": 16000, "lengths": "uneven",
                "chunked_prefill": False,
            },
        ),
        Preset(
            "Preemption", {"lengths": "uneven", "waiting": 40, "small_cache": True, "cache": 30}
        ),
    ),
)  # fmt: skip
