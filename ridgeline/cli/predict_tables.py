"""How does a person read a prediction? Tables, the largest figures first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from ridgeline.cli.prediction import Costs, Prediction, by_time
from ridgeline.cli.session import paper
from ridgeline.cost.memory import MemoryPlan
from ridgeline.cost.roofline import StepCost
from ridgeline.cost.steady import Part, Steady
from ridgeline.figures import ROUNDING_S, fixed, number, percent, seconds

BAR = 24  # characters of the longest bar
SMALL = 0.01  # operators with less of the time are shown as one


def show(prediction: Prediction) -> None:
    found, out = prediction.found, paper()
    out.print(_speed(prediction))
    for title, parts, total in (
        ("where the time to the first token goes", found.ttft_parts, found.ttft_s),
        ("where the time between two tokens goes", found.tpot_parts, found.tpot_s),
    ):
        if parts:
            out.print(_waterfall(title, parts, total))
    out.print(_operators("a step of decodes", found.decode))
    out.print(_operators("a step that reads a prompt", found.prefill))
    out.print(_memory(found.memory))
    if prediction.costs is not None:
        out.print(_costs(prediction.costs, found))
    for line in _notes(prediction):
        out.print(f"  {line}", soft_wrap=True)


def _speed(prediction: Prediction) -> Table:
    found = prediction.found
    setup, load = found.setup, found.pace.load
    weights, kv = setup.precision.names
    table = Table(
        "",
        f"{load.batch} in flight",
        f"{found.saturated.load.batch} in flight (full)",
        title=f"{prediction.model} on {setup.device.label}:\n"
        f"{setup.layout.words}, {weights} weights, {kv} cache; "
        f"{load.num_input} + {load.num_output} tokens",
    )
    both = (found.pace, found.saturated)
    table.add_row("time to first token (TTFT)", *(seconds(p.ttft_s) for p in both))
    if load.num_output > 1:
        table.add_row("time per token (TPOT)", *(seconds(p.tpot_s) for p in both))
    table.add_row("whole request", *(seconds(p.e2e_s) for p in both))
    table.add_row("tokens/s per user", *(number(p.tokens_per_s_per_user) for p in both))
    table.add_row("tokens/s in all", *(number(p.tokens_per_s) for p in both))
    table.add_row("requests/s", *(number(p.request_rate) for p in both))
    limit = "memory" if found.batch_limited_by == "memory" else "--max-num-batched-tokens"
    table.add_row("most requests that fit", f"{found.max_batch} ({limit})", "")
    table.add_row("what binds", _bounds(found), "")
    table.add_row("figures are", found.origin, "")
    return table


def _bounds(found: Steady) -> str:
    by_bound = found.seconds_by_bound
    total = sum(by_bound.values())
    shares = sorted(by_bound.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{name} {percent(value / total, 0)}" for name, value in shares if value / total > SMALL
    )


def _waterfall(title: str, parts: Sequence[Part], total: float) -> Table:
    """One part after the other; bars begin where the one above ends."""
    table = Table("", "time", "", title=title)
    before = 0.0
    for part in parts:
        if abs(part.seconds) < ROUNDING_S:
            continue
        start = round(BAR * before / total)
        end = round(BAR * (before + part.seconds) / total)
        table.add_row(part.what, seconds(part.seconds), " " * start + "#" * (end - start))
        before += part.seconds
    table.add_row("expected", seconds(total), "")
    return table


def _operators(title: str, cost: StepCost) -> Table:
    table = Table(
        *("operator", "times", "time", "share", "ideal", "binds", "GFLOP", "MB"),
        title=f"{title}: {seconds(cost.expected_s)}, at best {seconds(cost.ideal_s)}",
    )
    total = sum(one.expected_s for one in cost.ops)
    small = 0.0
    for one in by_time(cost.ops):
        op, share = one.op, one.expected_s / total
        if share < SMALL:
            small += one.expected_s
            continue
        moved = op.bytes + op.sent_bytes
        table.add_row(
            op.name,
            str(op.count),
            seconds(one.expected_s),
            percent(share, 0),
            seconds(one.ideal_s),
            one.bound,
            number(op.count * op.flops / 1e9),
            number(op.count * moved / 1e6),
        )
    if small:
        table.add_row("others", "", seconds(small), percent(small / total, 0), *[""] * 4)
    return table


def _memory(plan: MemoryPlan) -> Table:
    unit, decimal, binary = ("G", 1e9, 2**30) if plan.total_bytes >= 1e9 else ("M", 1e6, 2**20)
    table = Table("memory of each device", f"{unit}B", f"{unit}iB", "", title="what it takes")
    rows = [(item.what, item.bytes, item.note) for item in plan.items]
    rows.append(("together", plan.total_bytes, ""))
    rows.append(("may be taken", plan.capacity_bytes, ""))
    for what, size, words in rows:
        table.add_row(what, fixed(size / decimal, 3), fixed(size / binary, 3), words)
    return table


def _costs(costs: Costs, found: Steady) -> Table:
    devices = found.setup.layout.devices
    table = Table(
        "", "low", "middle", "high", title=f"dollars, {devices} x {found.setup.device.label}"
    )
    for what, band in (
        ("a device for an hour", costs.device_hour),
        ("a million answer tokens, prompts included", costs.output),
        ("by time: a million prompt tokens", costs.input_share),
        ("by time: a million answer tokens", costs.output_share),
    ):
        table.add_row(what, *map(number, (band.low, band.mid, band.high)))
    return table


def _notes(prediction: Prediction) -> tuple[str, ...]:
    device = prediction.found.setup.device.name
    price = () if prediction.costs else (f"no price is known for {device}; say --price USD",)
    energy: tuple[str, ...] = ()
    if (kwh := prediction.kwh) is not None:
        energy = (f"energy of a million answer tokens: {number(kwh)} kWh",)
    return (*energy, *price, *prediction.caveats)
