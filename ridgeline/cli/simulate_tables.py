"""How does a person, a program or a plot see a simulation? Tables, JSON and charts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ridgeline.architectures.counts import (
    behind_last_attention_flops,
    layer_attention_flops,
    linear_flops_per_token,
    logits_flops,
)
from ridgeline.cli.plots import Chart, Series
from ridgeline.cli.predict import calibration_caveats
from ridgeline.cli.simulate_case import SWEEP_BATCHES
from ridgeline.cli.tables import UNKNOWN, Column, grid, plain, table, unbroken
from ridgeline.cost.step_features import attention_kinds
from ridgeline.figures import number, percent, seconds
from ridgeline.simulator.report import Spread, Summary, thinned, used_blocks
from ridgeline.simulator.sweep import Point, Sweep, is_saturated
from ridgeline.simulator.workload import mean_rate

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from ridgeline.cli.simulate_case import Case
    from ridgeline.cost.throughput import Throughput
    from ridgeline.simulator.simulation import SimulationReport
    from ridgeline.simulator.sweep import Outcome

LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("E2E", "e2e"), ("queue", "queue"))
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
GROWING = frozenset({"ttft", "e2e", "queue"})  # without end, when more arrives than is done
SATURATED = "saturated"
ABOUT = """
model=args.model device=setup.device.name layout=setup.layout num_devices usd_per_hour
"""
POINT = """
rate saturated=is_saturated done_per_s steady_tokens_per_s=tokens_per_s
steady_goodput_per_s=goodput_per_s
"""


def title(case: Case) -> str:
    """Model, machine and formats in a line."""
    setup = case.setup
    weights, kv = setup.precision.names
    return (
        f"{case.args.model} on {setup.device.name}, {setup.layout.text}, "
        f"{weights} weights, {kv} KV cache"
    )


def traffic(case: Case) -> str:
    work = case.workload
    num_input = sum(a.num_input for a in work) / len(work)
    num_output = sum(a.num_output for a in work) / len(work)
    whence = case.args.trace.name if case.args.trace else case.args.arrivals or "poisson"
    rate = mean_rate(work)
    speed = f"{number(rate)} a second" if rate else "at once"
    return (
        f"{len(work)} requests ({whence}), {speed}, {num_input:.0f} + {num_output:.0f} tokens "
        "on average"
    )


def grows(case: Case, outcome: Outcome) -> bool:
    """Made-up arrivals that are not kept up with: waits are as long as one likes to simulate."""
    is_recorded = case.args.trace is not None and case.args.arrivals is None
    return not is_recorded and bool(is_saturated(outcome.requests))


def flop_share(case: Case, outcome: Outcome) -> float:
    """What the answers needed of arithmetic, over what the devices could have done meanwhile."""
    setup, seconds = case.setup, outcome.summary.duration_s
    linear, behind = linear_flops_per_token(setup.spec), behind_last_attention_flops(setup.spec)
    logits = logits_flops(setup.spec)
    kinds = attention_kinds(setup.spec).items()

    def attention(new: int, before: int) -> int:
        return sum(count * layer_attention_flops(kind, new, before) for kind, count in kinds)

    needed = 0
    for r in outcome.requests:
        if r.is_finished:
            new, middle = r.num_input - r.num_cached, max(r.num_input + r.num_output // 2, 1) - 1
            needed += new * (linear - behind) + attention(new, r.num_cached) + behind + logits
            needed += (r.num_output - 1) * (linear + attention(1, middle) + logits)
    peak = setup.device.peak(setup.precision.compute_dtype) * case.num_devices
    return needed / (peak * seconds) if seconds else 0.0


# ---------------------------------------------------------------------- one run, for a person


def run_shown(
    case: Case, report: SimulationReport, outcome: Outcome
) -> Iterator[Table | Text | str]:
    yield title(case)
    yield traffic(case)
    yield _latencies(outcome.summary, growing=grows(case, outcome))
    yield grid(("what", "value", ""), _facts(case, report, outcome), show_header=False)
    for line in _notes(case, outcome):
        yield unbroken(f"  {line}")


def _latencies(summary: Summary, *, growing: bool) -> Table:
    rows = []
    for name, key in LATENCIES:
        spread: Spread = getattr(summary, f"{key}_s")
        words = [time_text(getattr(spread, column)) for column in COLUMNS]
        rows.append((name, *([SATURATED] if growing and key in GROWING else words)))
    return grid(("latency", *COLUMNS), rows)


def time_text(value_s: float | None) -> str:
    """In the unit that reads well: "85.2 ms"."""
    return UNKNOWN if value_s is None else seconds(value_s)


def share_text(share: float | None) -> str:
    return UNKNOWN if share is None else percent(share)


def _facts(
    case: Case, report: SimulationReport, outcome: Outcome
) -> Iterator[tuple[str, str, str]]:
    s, dtype = outcome.summary, case.setup.precision.compute_dtype
    tokens = f"{s.output_tokens_per_s:,.0f} out, {s.input_tokens_per_s:,.0f} in"
    yield "finished", f"{s.num_finished} of {s.num_requests}", f"in {seconds(s.duration_s)}"
    yield "throughput", f"{number(s.requests_per_s)} requests/s", f"tokens/s: {tokens}"
    if s.goodput_per_s is not None:
        kept = f"{share_text(s.slo_share)} kept {_promise(case)}"
        yield "goodput", f"{number(s.goodput_per_s)} requests/s", kept
    places = report.num_slots * report.num_replicas
    idle = f"{s.num_idle_slot_steps:,} places stayed empty in {s.num_steps:,} steps"
    yield "in the system", f"{number(s.mean_in_flight)} on average", f"{places} places to run"
    yield "device busy", share_text(s.busy_share), "of the time"
    yield "arithmetic", share_text(flop_share(case, outcome)), f"of the peak in {dtype}"
    yield "places used", share_text(s.slot_share), idle
    yield "KV cache", share_text(s.kv_mean_share), f"at most {share_text(s.kv_max_share)}"
    yield "prefix hits", share_text(s.cached_share), "of the prompt tokens"
    yield "preemptions", f"{s.num_preemptions:,}", ""
    yield ("cost", *_money(case, s))


def _promise(case: Case) -> str:
    pairs = (("TTFT", case.slo.ttft_s), ("TPOT", case.slo.tpot_s))
    return " and ".join(f"{name} {time_text(limit)}" for name, limit in pairs if limit)


def _money(case: Case, summary: Summary) -> tuple[str, str]:
    paid, cost = case.usd_per_hour, summary.usd_per_million_output
    if paid is None:
        return "-", "no price is known; say --price"
    if cost is None:
        return "-", "nothing was served, so there is no cost per token"
    low, high = (cost * price / paid.mid if paid.mid else 0.0 for price in (paid.low, paid.high))
    band = f" ({number(low)} to {number(high)})" if high > low else ""
    devices = f"{case.num_devices} device{'s' * (case.num_devices > 1)}"
    return (
        f"$ {number(cost)}{band}",
        f"a million answer tokens; {devices} at $ {number(paid.mid)}/h",
    )


def _notes(case: Case, outcome: Outcome) -> Iterable[str]:
    yield from pricing_text(case, outcome.summary.mean_in_flight)
    if is_saturated(outcome.requests):
        yield (
            "saturated: more arrives than is done, and waits grow for as long as it goes on; "
            "--sweep finds the rate that is kept up with"
        )
    refused = [r for r in outcome.requests if r.refused]
    if refused:
        yield f"{len(refused)} requests were refused, the first because {refused[0].refused}"
    if case.args.speculate and not case.args.draft:
        yield "drafts take no time here; name the model that makes them with --draft"


def pricing_text(case: Case, in_flight: float) -> Iterable[str]:
    """Where the times of steps come from; what `predict` says of a calibration is said here too."""
    if case.setup.calibration is None:
        yield (
            "step times: cost model with assumed efficiencies, nobody has calibrated "
            f"{case.setup.device.name}"
        )
        return
    origin = case.origin(in_flight)
    yield f"step times: cost model, {origin}"
    yield from calibration_caveats(case.setup, origin)


# ---------------------------------------------------------------------- one run, for a program


def run_json(case: Case, report: SimulationReport, outcome: Outcome) -> dict[str, Any]:
    """Times in milliseconds, shares from 0 to 1. What grows without end is null."""
    curve = thinned(list(used_blocks(report.steps, report.num_replicas)))
    return {
        **_about(case, outcome.summary.mean_in_flight),
        **summary_json(outcome.summary, growing=grows(case, outcome)),
        "saturated": is_saturated(outcome.requests),
        "flop_share": flop_share(case, outcome),
        "kv_over_time": [
            [time_s, sum(used) / (report.num_blocks * report.num_replicas)]
            for time_s, *used in curve
        ],
        "num_blocks": report.num_blocks,
        "max_num_seqs": report.num_slots,
    }


def _about(case: Case, in_flight: float) -> dict[str, Any]:
    weights, kv = case.setup.precision.names
    origin = case.origin(in_flight)
    return {
        **plain(case, ABOUT),
        "weights": weights,
        "kv": kv,
        "pricing": origin,
        "caveats": calibration_caveats(case.setup, origin),
        "traffic": traffic(case),
    }


def summary_json(summary: Summary, *, growing: bool) -> dict[str, Any]:
    found = asdict(summary)
    for _, key in LATENCIES:
        spread = found.pop(f"{key}_s")
        hidden = growing and key in GROWING
        found[f"{key}_ms"] = {
            name: None if hidden or value is None else value * 1e3 for name, value in spread.items()
        }
    found["tokens_per_s"] = summary.output_tokens_per_s
    return found


# ---------------------------------------------------------------------- one run, as a picture


def run_charts(report: SimulationReport) -> list[Chart]:
    requests, steps = report.requests, sorted(report.steps, key=lambda step: step.end_s)
    whole = [
        Series("TTFT", shares_within(r.ttft_s for r in requests)),
        Series("E2E", shares_within(r.e2e_s for r in requests)),
    ]
    per_token = [Series("TPOT", shares_within(_ms(r.tpot_s) for r in requests))]
    used = thinned(list(used_blocks(steps, report.num_replicas)))
    cache = [
        Series(f"replica {n}", [(row[0], row[n + 1] / report.num_blocks) for row in used])
        for n in range(report.num_replicas)
    ]
    queue = [
        Series("running", _counts(report, lambda step: step.num_running)),
        Series("waiting", _counts(report, lambda step: step.num_waiting)),
    ]
    return [
        Chart("Time to first token and to the end", "seconds", "share of requests", whole),
        Chart("Time per token after the first", "milliseconds", "share of requests", per_token),
        Chart("KV cache in use", "seconds", "share of blocks", cache),
        Chart("Requests in the engine", "seconds", "requests", queue),
    ]


def shares_within(values: Iterable[float | None]) -> list[tuple[float, float]]:
    """(value, share of the values that are no larger), thinned."""
    ordered = sorted(value for value in values if value is not None)
    return thinned([(value, (n + 1) / len(ordered)) for n, value in enumerate(ordered)])


def _counts(report: SimulationReport, count: Callable[[Any], int]) -> list[tuple[float, float]]:
    """(time, count over all replicas)."""
    now, rows = [0] * report.num_replicas, []
    for step in sorted(report.steps, key=lambda step: step.end_s):
        now[step.replica] = count(step)
        rows.append((step.end_s, float(sum(now))))
    return thinned(rows)


# ---------------------------------------------------------------------- a sweep


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _wait(percentile: str) -> Callable[[Point], float | str | None]:
    """Of the time to the first token, where waits do not grow without end."""
    if percentile == "p50":
        return lambda p: SATURATED if p.is_saturated else _ms(p.summary.ttft_s.p50)
    return lambda p: "" if p.is_saturated else _ms(p.summary.ttft_s.p99)


SWEEP = (
    Column("offered/s", "rate", number),
    Column("done/s", "done_per_s", number),
    Column("tokens/s", "tokens_per_s", number),
    Column("TTFT ms", _wait("p50"), number),
    Column("p99", _wait("p99"), number),
    Column("TPOT ms", lambda p: _ms(p.summary.tpot_s.p50), number),
    Column("p99", lambda p: _ms(p.summary.tpot_s.p99), number),
    Column("inside", "summary.mean_in_flight", number),
    Column("KV", "summary.kv_mean_share", percent),
)
GOODPUT = Column("goodput/s", "goodput_per_s", number)


def sweep_shown(case: Case, found: Sweep, throughput: Throughput) -> Iterator[Table | Text | str]:
    yield title(case)
    yield table(found.points, (*SWEEP, GOODPUT) if case.slo.is_given else SWEEP)
    for line in sweep_text(case, found, throughput):
        yield unbroken(f"  {line}")


def sweep_text(case: Case, found: Sweep, throughput: Throughput) -> Iterable[str]:
    closed = throughput.request_rate * case.setup.layout.replicas
    if found.capacity is None:
        yield "no rate that was tried is too much; ask for more --requests"
    else:
        yield (
            f"saturated at {number(found.capacity)} requests/s "
            f"(closed form: {number(closed)}, {throughput.load.batch} in flight on each replica)"
        )
    num_requests, least = found.last.summary.num_requests, case.least_requests(throughput)
    if num_requests < least:
        places = least // SWEEP_BATCHES
        more = "a trace with" if case.args.trace else "--requests"
        yield (
            f"too few requests: {num_requests} fill the {places} places "
            f"{number(num_requests / places)} times, and the rate that saturates them reads too "
            f"high; {more} {least} or more fill them {SWEEP_BATCHES} times"
        )
    best = found.best_goodput
    if best is not None and best.goodput_per_s:
        kept = share_text(best.summary.slo_share)
        yield (
            f"best goodput: {number(best.goodput_per_s)} requests/s at an offered "
            f"{number(best.rate)}; {kept} kept {_promise(case)}"
        )
    elif best is not None:
        yield f"no request kept {_promise(case)} at any rate"
    yield "TTFT and TPOT: medians and 99th percentiles; inside: requests waiting or running"
    yield from pricing_text(case, throughput.load.batch * case.setup.layout.replicas)


def sweep_json(case: Case, found: Sweep, throughput: Throughput) -> dict[str, Any]:
    """`capacity_per_s` null: every rate was kept up with; not `enough_requests`: it reads too
    high, as the run that told it had fewer than `least_requests`."""
    replicas, least = case.setup.layout.replicas, case.least_requests(throughput)
    return {
        **_about(case, throughput.load.batch * replicas),
        "capacity_per_s": found.capacity,
        "enough_requests": found.last.summary.num_requests >= least,
        "least_requests": least,
        "closed_form_per_s": throughput.request_rate * replicas,
        "points": [
            plain(point, POINT) | summary_json(point.summary, growing=point.is_saturated)
            for point in found.points
        ],
    }


def sweep_charts(found: Sweep) -> list[Chart]:
    calm = [point for point in found.points if not point.is_saturated]
    marks = (
        []
        if found.capacity is None
        else [(found.capacity, f"saturated at {number(found.capacity)}/s")]
    )
    ttft = _curves(calm, lambda s: s.ttft_s, 1.0)
    tpot = _curves(found.points, lambda s: s.tpot_s, 1e3)
    done = [Series("finished", [(p.rate, p.done_per_s) for p in found.points], dots=True)]
    kept = [(p.rate, p.goodput_per_s) for p in found.points if p.goodput_per_s is not None]
    if kept:
        done.append(Series("kept the promise", kept, dots=True))
    price = [
        (p.rate, p.summary.usd_per_million_output)
        for p in found.points
        if p.summary.usd_per_million_output is not None
    ]
    tokens = [Series("answers", [(p.rate, p.tokens_per_s) for p in found.points], dots=True)]
    rate = "offered requests/s"
    last = Chart("Throughput in tokens", rate, "tokens/s", tokens, marks=marks)
    if price:
        last = Chart(
            "Cost", rate, "$ per million answer tokens", [Series("cost", price, dots=True)]
        )
    return [
        Chart("Time to first token", rate, "seconds", ttft, y_log=True, marks=marks),
        Chart("Time per token", rate, "milliseconds", tpot, marks=marks),
        Chart("Requests finished", rate, "requests/s", done, marks=marks),
        last,
    ]


def _curves(
    points: Sequence[Point], spread: Callable[[Summary], Spread], unit: float
) -> list[Series]:
    curves = []
    for name, dashed in (("p50", False), ("p99", True)):
        values = [(p.rate, getattr(spread(p.summary), name)) for p in points]
        known = [(rate, value * unit) for rate, value in values if value is not None]
        curves.append(Series(name, known, dashed=dashed, dots=True))
    return curves
