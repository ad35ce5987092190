"""`ridgeline explain`: where did the time of each request go, what binds, and what would help?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.cli.parser import Parser, add_json_flag, option
from ridgeline.cli.tables import Column, answer, grid, table, unbroken
from ridgeline.cli.values import whole
from ridgeline.errors import ConfigError
from ridgeline.figures import percent, scaled, seconds

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

PARTS = {
    "queue": "queue",
    "own_prefill": "own prompt",
    "others_prefill": "others' prompts",
    "decode": "decode",
    "preemption": "preemption",
    "host": "host",
}
FLOORS = {"own_prefill": "prefill_s", "decode": "decode_s"}

EXAMPLES = """A run is explained from its event log (--event-log of serve, generate and bench), a
living server by itself. Each request's parts sum to its latency; floors are what the same work is
expected to take alone. Expectations are those of the engine: calibrated, or called assumed.

examples:
  ridgeline serve --event-log events.jsonl
  ridgeline explain --url http://127.0.0.1:8000
  ridgeline explain --log events.jsonl --requests 5
  ridgeline explain --log events.jsonl --request cmpl-1 --json
"""


def add_arguments(parser: Parser) -> None:
    parser.usage = "ridgeline explain (--log FILE | --url URL) [options]"
    source = parser.add_mutually_exclusive_group(required=True)
    option(source, "--log FILE", "an event log; its last engine is explained")
    option(source, "--url URL", "a running server")
    parser.flag("--api-key-file FILE", "holds the key that --url wants")
    parser.flag("--requests N", "show the N slowest (default: 10)", whole(0), default=10)
    parser.flag("--request ID", "show those whose id has this in it")
    add_json_flag(parser.flag)


def run(args: argparse.Namespace) -> int:
    report = _of_log(args.log) if args.log else _of_server(args.url, args.api_key_file)
    if args.request:
        report["requests"] = [r for r in report["requests"] if args.request in r["request_id"]]
        if not report["requests"]:
            raise ConfigError(f"no request that is known has {args.request!r} in its id")
    answer(args, lambda: report, lambda: shown(report, args.requests))
    return 0


def _of_log(name: str) -> dict[str, Any]:
    from ridgeline.observe.event_log import read_event_log
    from ridgeline.observe.evidence import evidence_of
    from ridgeline.observe.explain import explain

    return explain(evidence_of(read_event_log(Path(name)))).to_json()


def _of_server(url: str, api_key_file: str | None) -> dict[str, Any]:
    from ridgeline.benchmark.http_client import endpoint, fetch
    from ridgeline.cli.bench import first_key

    server = endpoint(url, "", first_key(api_key_file))
    try:
        report = json.loads(fetch(server, "/explain"))
    except OSError as error:
        raise ConfigError(f"--url {url}: {error}") from None
    except ValueError:
        raise ConfigError(f"--url {url}: /explain is not what a ridgeline server says") from None
    if not isinstance(report, dict) or "requests" not in report:
        raise ConfigError(f"--url {url}: /explain is not what a ridgeline server says")
    return report


# ---------------------------------------------------------------------- tables


def _some(num: int, what: str) -> str:
    return f"{num} {what}" if num == 1 else f"{num} {what}s"


def shown(report: Mapping[str, Any], most: int) -> Iterator[Table | Text | str]:
    """The report of `ridgeline.observe.explain`, as JSON has it, with the `most` slowest."""
    from ridgeline.observe.run_summary import NOT_CALIBRATED

    server, requests = report.get("server"), report["requests"]
    if server is None:  # the key's own requests
        yield f"{report['model']}: {_some(len(requests), 'request')} of this key"
    else:
        yield (
            f"{report['model']} on {server['device']}: {_some(server['num_steps'], 'step')}, "
            f"{_some(server['num_finished'], 'request')} ended"
        )
        yield f"expectations are {server['origin']}" if is_calibrated(server) else NOT_CALIBRATED
    if requests:
        floors = server is not None and is_calibrated(server)
        yield whole_table(report, floors=floors)
        yield request_table(requests, most, floors=floors)
    if server is not None:
        yield gap_table(server)
        if server.get("drafts") is not None:
            yield draft_table(server["drafts"], is_calibrated(server))
        if rows := server.get("num_masked_rows"):
            moved = scaled(server["mask_bytes"], "B")
            yield f"masks of grammars: {_some(rows, 'row')} of logits, {moved}"
        if server.get("expert_load"):
            most = max(server["expert_load"])
            where = server["expert_load"].index(most)
            yield f"busiest expert: {most:.2f} times the mean one, layer {where} of those with any"
        if ranks := server.get("ranks"):
            waits = ", ".join(f"{one['waited_s']:.2f} s" for one in ranks)
            slowest = min(ranks, key=lambda one: one["waited_s"])
            yield (
                f"ranks waited for others {waits}; least, so the others wait for it: rank"
                f" {slowest['rank']} on {slowest['host']}"
            )
        yield from _advice(report, server)


def _advice(report: Mapping[str, Any], server: Mapping[str, Any]) -> Iterator[Table | Text | str]:
    if report.get("findings"):
        unexplained = percent(server["unexplained_share"], 0)
        yield f"{unexplained} of the time is unexplained, so no change is advised. To be seen:"
        for finding in report["findings"]:
            yield unbroken(f"  {finding['what']}\n    -> {finding['how']}")
        return
    yield f"what binds: {server['binds']}"
    if report["changes"]:
        yield table(report["changes"], CHANGES, "what would help, priced on recent steps")
    best = report["next_change"]
    if best is None:
        yield "next best change: none that this version serves gains one percent"
    else:
        gain = f"{best['gain']:.2f}x {best['of']} expected"
        yield f"next best change: {best['name']} ({best['how']}), {gain}"


CHANGES = (
    Column("change", "name"),
    Column("gain", lambda change: f"{change['gain']:.2f}x {change['of']}"),
    Column(
        "how",
        lambda change: change["how"] if change["served_today"] else "not served by this version",
    ),
    Column("because", "because"),
)


def is_calibrated(server: Mapping[str, Any]) -> bool:
    """Comparisons with what is expected mean something."""
    return bool(server["origin"] != "assumed")


def whole_table(report: Mapping[str, Any], *, floors: bool) -> Table:
    """All requests together: each part, its share and, where it is known, its floor."""
    parts, floor, count = report["whole"], report["floor"], len(report["requests"])
    total = sum(parts.values())
    headings = ("part", "all requests", "share", "per request")
    rows = []
    for name, text in PARTS.items():
        least = floor[FLOORS[name]] if name in FLOORS else None
        share = percent(parts[name] / total if total else 0.0)
        row = [text, seconds(parts[name]), share, seconds(parts[name] / count)]
        if floors and least is not None:
            row += [seconds(least), f"{parts[name] / least:.2f}x" if least else ""]
        rows.append(row)
    rows.append(["latency", seconds(total), percent(1.0), seconds(total / count)])
    more = ("floor alone", "over the floor") if floors else ()
    return grid((*headings, *more), rows, f"where the time of {_some(count, 'request')} went")


def request_table(requests: list[Mapping[str, Any]], most: int, *, floors: bool) -> Table:
    """The slowest requests, a row each."""
    rows = sorted(requests, key=lambda request: -request["latency_s"])[:most]
    columns = [
        Column("request", lambda r: r["request_id"] + ("" if r["end"] else " (running)")),
        Column("tokens", lambda r: f"{r['num_prompt_tokens']}+{r['num_output_tokens']}"),
        Column("latency", "latency_s", seconds),
        Column("TTFT", lambda r: "" if r["ttft_s"] is None else seconds(r["ttft_s"])),
        *(Column(text, f"parts.{name}", seconds) for name, text in PARTS.items()),
    ]
    if floors:
        columns.append(
            Column("floor", lambda r: r["floor"]["prefill_s"] + r["floor"]["decode_s"], seconds)
        )
    return table(rows, columns, f"the slowest {len(rows)} of {len(requests)}")


def gap_table(server: Mapping[str, Any]) -> Table:
    """From what an ideal device needs to what was measured."""
    gap = server["gap"]
    total = server["measured_s"] + gap["host_s"]
    rows = []
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
        rows.append((name.removesuffix("_s"), seconds(gap[name]), percent(share), what))
    for name, regime in server["regimes"].items():
        if regime["num_steps"]:
            ratio = regime["measured_s"] / regime["expected_s"] if regime["expected_s"] else 0.0
            text = _some(regime["num_steps"], "step")
            text += f", measured {ratio:.2f}x of expected" if is_calibrated(server) else ""
            share = regime["measured_s"] / total if total else 0.0
            rows.append((f"{name} steps", seconds(regime["measured_s"]), percent(share), text))
    return grid(("the time of all steps", "seconds", "share", "what it is"), rows, "the gap")


def draft_table(drafts: Mapping[str, Any], calibrated: bool) -> Table:
    """What drafts brought, but what rests on assumed prices."""
    from ridgeline.observe.run_summary import NOT_CALIBRATED

    positions = "  ".join(f"{share:.2f}" for share in drafts["by_position"])
    than = "such steps measured here" if drafts["is_measured"] else "what such steps should take"
    gain = f"{drafts['gain']:.2f}x the tokens per second of {than}"
    by_price = [
        (what, f"{seconds(drafts[f'{key}_s'])}, {percent(drafts[f'{key}_share'])} (by price)")
        for what, key in (("drafting", "drafting"), ("verifying", "checking"))
    ]
    rows = (
        ("tokens a row and step", f"{drafts['accepted_length']:.2f}, its own one included"),
        ("right, of those reached", percent(drafts["acceptance"])),
        ("right by position", positions),
        *(by_price if calibrated else ()),
        ("against steps without", gain if calibrated or drafts["is_measured"] else NOT_CALIBRATED),
    )
    return grid(("drafts", ""), rows, f"{_some(drafts['num_steps'], 'step')} verified drafts")
