"""How does a person read an explanation? Tables of seconds, shares and what would help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from ridgeline.cli.session import paper
from ridgeline.figures import percent, scaled, seconds
from ridgeline.observe.readout import NOT_CALIBRATED

PARTS = {
    "queue": "queue",
    "own_prefill": "own prompt",
    "others_prefill": "others' prompts",
    "decode": "decode",
    "preemption": "preemption",
    "host": "host",
}
FLOORS = {"own_prefill": "prefill_s", "decode": "decode_s"}


def _some(num: int, what: str) -> str:
    return f"{num} {what}" if num == 1 else f"{num} {what}s"


def show(report: Mapping[str, Any], most: int) -> None:
    """Print the report of `ridgeline.observe.explain`, as JSON has it, to standard output."""
    out, server = paper(), report.get("server")
    if server is None:  # the key's own requests
        out.print(f"{report['model']}: {_some(len(report['requests']), 'request')} of this key")
        if report["requests"]:
            out.print(whole_table(report, floors=False))
            out.print(request_table(report["requests"], most, floors=False))
        return
    out.print(
        f"{report['model']} on {server['device']}: {_some(server['num_steps'], 'step')}, "
        f"{_some(server['num_finished'], 'request')} ended"
    )
    out.print(f"expectations are {server['origin']}" if is_calibrated(server) else NOT_CALIBRATED)
    if report["requests"]:
        floors = is_calibrated(server)
        out.print(whole_table(report, floors=floors))
        out.print(request_table(report["requests"], most, floors=floors))
    out.print(gap_table(server))
    if server.get("guesses") is not None:
        out.print(guess_table(server["guesses"], is_calibrated(server)))
    if report.get("findings"):
        unexplained = percent(server["unexplained_share"], 0)
        out.print(f"{unexplained} of the time is unexplained, so no change is advised. To be seen:")
        for finding in report["findings"]:
            out.print(f"  {finding['what']}\n    -> {finding['how']}", soft_wrap=True)
        return
    out.print(f"what binds: {server['binds']}")
    if report["changes"]:
        out.print(change_table(report["changes"]))
    best = report["next_change"]
    if best is None:
        out.print("next best change: none that this version serves gains one percent")
    else:
        gain = f"{best['gain']:.2f}x {best['of']} expected"
        out.print(f"next best change: {best['name']} ({best['how']}), {gain}")


def is_calibrated(server: Mapping[str, Any]) -> bool:
    """Comparisons with what is expected mean something."""
    return bool(server["origin"] != "assumed")


def whole_table(report: Mapping[str, Any], *, floors: bool) -> Table:
    """All requests together: each part, its share and, where it is known, its floor."""
    parts, floor, count = report["whole"], report["floor"], len(report["requests"])
    total = sum(parts.values())
    table = Table(
        *("part", "all requests", "share", "per request"),
        *(("floor alone", "over the floor") if floors else ()),
        title=f"where the time of {count} request{'s' * (count != 1)} went",
    )
    for name, text in PARTS.items():
        least = floor[FLOORS[name]] if name in FLOORS else None
        cells = (
            "" if least is None else seconds(least),
            f"{parts[name] / least:.2f}x" if least else "",
        )
        table.add_row(
            text,
            seconds(parts[name]),
            percent(parts[name] / total if total else 0.0),
            seconds(parts[name] / count),
            *(cells if floors else ()),
        )
    table.add_row("latency", seconds(total), percent(1.0), seconds(total / count))
    return table


def request_table(requests: list[Mapping[str, Any]], most: int, *, floors: bool) -> Table:
    """The slowest requests, a row each."""
    rows = sorted(requests, key=lambda request: -request["latency_s"])[:most]
    table = Table(
        *("request", "tokens", "latency", "TTFT", *PARTS.values(), *(("floor",) if floors else ())),
        title=f"the slowest {len(rows)} of {len(requests)}",
    )
    for row in rows:
        floor = row["floor"]["prefill_s"] + row["floor"]["decode_s"]
        table.add_row(
            row["request_id"] + ("" if row["end"] else " (running)"),
            f"{row['num_prompt_tokens']}+{row['num_output_tokens']}",
            seconds(row["latency_s"]),
            "" if row["ttft_s"] is None else seconds(row["ttft_s"]),
            *(seconds(row["parts"][name]) for name in PARTS),
            *((seconds(floor),) if floors else ()),
        )
    return table


def gap_table(server: Mapping[str, Any]) -> Table:
    """From what an ideal device needs to what was measured."""
    gap = server["gap"]
    total = server["measured_s"] + gap["host_s"]
    table = Table("the time of all steps", "seconds", "share", "what it is", title="the gap")
    moved, flops = scaled(server["bytes_per_s"], "B/s"), scaled(server["flops_per_s"], "FLOP/s")
    limits = "limits that are assumed"
    if not server.get("is_assumed_device"):
        limits = "the device's limits"
        moved += f", {percent(server['share_of_bandwidth'])} of the bandwidth"
        flops += f", {percent(server['share_of_peak'])} of the peak"
    expected = "expected" if is_calibrated(server) else "assumed"
    for name, what in (
        ("ideal_s", f"{limits}; achieved: {moved}; {flops}"),
        ("kernels_s", f"what real kernels are {expected} to add"),
        ("unexplained_s", f"measured beyond what is {expected}"),
        ("host_s", "the device waited for the host"),
    ):
        share = gap[name] / total if total else 0.0
        table.add_row(name.removesuffix("_s"), seconds(gap[name]), percent(share), what)
    for name, regime in server["regimes"].items():
        if regime["num_steps"]:
            ratio = regime["measured_s"] / regime["expected_s"] if regime["expected_s"] else 0.0
            text = f"{regime['num_steps']} step{'s' * (regime['num_steps'] != 1)}"
            text += f", measured {ratio:.2f}x of expected" if is_calibrated(server) else ""
            share = regime["measured_s"] / total if total else 0.0
            table.add_row(f"{name} steps", seconds(regime["measured_s"]), percent(share), text)
    return table


def guess_table(guesses: Mapping[str, Any], calibrated: bool) -> Table:
    """What drafts brought, but what rests on assumed prices."""
    positions = "  ".join(f"{share:.2f}" for share in guesses["by_position"])
    drafting, verifying = guesses["drafting_s"], guesses["checking_s"]
    than = "such steps measured here" if guesses["is_measured"] else "what such steps should take"
    gain = f"{guesses['gain']:.2f}x the tokens per second of {than}"
    by_price = (
        ("drafting", f"{seconds(drafting)}, {percent(guesses['drafting_share'])} (by price)"),
        ("verifying", f"{seconds(verifying)}, {percent(guesses['checking_share'])} (by price)"),
    )
    table = Table("drafts", "", title=f"{_some(guesses['num_steps'], 'step')} verified drafts")
    for name, text in (
        ("tokens a row and step", f"{guesses['accepted_length']:.2f}, its own one included"),
        ("right, of those reached", percent(guesses["acceptance"])),
        ("right by position", positions),
        *(by_price if calibrated else ()),
        ("against steps without", gain if calibrated or guesses["is_measured"] else NOT_CALIBRATED),
    ):
        table.add_row(name, text)
    return table


def change_table(changes: list[Mapping[str, Any]]) -> Table:
    table = Table(
        *("change", "gain", "how", "because"), title="what would help, priced on recent steps"
    )
    for change in changes:
        how = change["how"] if change["served_today"] else "not served by this version"
        gain = f"{change['gain']:.2f}x {change['of']}"
        table.add_row(change["name"], gain, how, change["because"])
    return table
