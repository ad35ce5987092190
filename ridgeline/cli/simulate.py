"""`ridgeline simulate`: what would this traffic see on that machine? The real scheduler, a
simulated device."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.asked import check_writable
from ridgeline.cli.flags import add_model
from ridgeline.cli.machine import add_machine_flags
from ridgeline.cli.parser import Parser, Renamed
from ridgeline.cli.session import stage
from ridgeline.cli.tables import answer
from ridgeline.cli.values import above_zero, positive, share, time_span
from ridgeline.errors import ConfigError
from ridgeline.formats import MAX_DRAFT_TOKENS, POLICIES
from ridgeline.router import POLICIES as ROUTERS
from ridgeline.simulator.workload import ARRIVALS, DEFAULT_REQUESTS, Lengths

if TYPE_CHECKING:
    from ridgeline.cli.simulate_case import Case
    from ridgeline.simulator.simulation import SimulationReport

EXAMPLES = """The engine, its scheduler and its block manager are the real ones; only the device is
made up: a step takes as long as the cost model says. No weights are needed, and nothing is
computed. A time is written as 200ms or 1.5s; a bare number is milliseconds.

traces (--trace FILE, also packed as .gz):
  Azure LLM inference traces (CSV), Mooncake traces (JSON lines; equal hashes share their
  prefix), and event logs of our own engine (--event-log of serve, generate or bench).

examples:
  ridgeline simulate llama-3.1-8b --device h100-sxm --rate 8 --input 512 --output 128
  ridgeline simulate user/model --device a100-80-sxm --rate 8 --input 100-2000 --output 20-400 \\
      --arrivals bursty --ttft 500ms --tpot 50ms
  ridgeline simulate user/model --device h100-sxm --rate 8 --sweep --plot curve.svg
  ridgeline simulate user/model --device h100-sxm --trace azure_conv.csv --requests 5000
  ridgeline simulate user/model --device h100-sxm --trace mooncake.jsonl --replicas 4 \\
      --router prefix-aware --timeline requests.jsonl
  ridgeline simulate user/model --device h100-sxm --rate 8 --batching static     and then without
"""


def lengths(text: str) -> Lengths:
    """Token counts of "512", or drawn evenly from "100-2000"."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no length; write 512 or 100-2000")
    try:
        return Lengths(int(match[1]), int(match[2] or match[1]))
    except ConfigError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def drafts(text: str) -> tuple[int | None, float]:
    """ "4:0.8" is four drafts a step, each right with 0.8 if those before it were; "auto:0.8" as
    many as pay in that step."""
    number, colon, chance = text.partition(":")
    try:
        found = None if number == "auto" else int(number), float(chance)
    except ValueError:
        colon = ""
        found = 0, 0.0
    is_number = found[0] is None or 1 <= found[0] <= MAX_DRAFT_TOKENS
    if not colon or not is_number or not 0 <= found[1] <= 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no speculation; write K:ACCEPTANCE such as 4:0.8, with K up to "
            f"{MAX_DRAFT_TOKENS}, or auto:ACCEPTANCE"
        )
    return found


def add_arguments(parser: Parser) -> None:
    add_model(parser, takes_names=True)
    add_machine_flags(parser)
    _add_traffic(parser.add_argument_group("traffic"))
    _add_engine(parser.add_argument_group("engine"))
    _add_replicas(parser.add_argument_group("replicas"))
    _add_output(parser.add_argument_group("what to say"))
    parser.mark_expert(
        *("--max-num-mixed-tokens", "--block-size", "--num-blocks", "--max-in-flight", "--draft"),
        *("--no-deferred-scheduling", "--no-chunked-prefill", "--no-paging", "--no-prefix-cache"),
        *("--batching", "--memory-utilization", "--seed", "--timeline"),
    )


def _add_traffic(group: Any) -> None:
    group.add_argument("--trace", type=Path, metavar="FILE", help="recorded requests")
    group.add_argument(
        "--rate", type=above_zero, metavar="R", help="requests a second; stretches a --trace to it"
    )
    group.add_argument(
        "--requests",
        type=positive,
        metavar="N",
        help=f"how many (default: {DEFAULT_REQUESTS}, or all of the trace)",
    )
    group.add_argument("--input", type=lengths, metavar="I", help="prompt tokens, N or LOW-HIGH")
    group.add_argument("--output", type=lengths, metavar="O", help="answer tokens, N or LOW-HIGH")
    group.add_argument(
        "--arrivals",
        choices=tuple(ARRIVALS),
        help="how requests come (default: poisson, or as in the trace)",
    )
    group.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: 0)")


def _add_engine(group: Any) -> None:
    group.add_argument(
        "--max-num-seqs",
        type=positive,
        metavar="N",
        help="requests at once (default: the engine's, 256 on a GPU and 64 on a CPU)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=positive,
        metavar="N",
        help="most tokens of a step (default: the engine's, 8192 on a GPU and 2048 on a CPU)",
    )
    group.add_argument(
        "--max-num-mixed-tokens",
        type=positive,
        metavar="N",
        help="most tokens of a step in which prompts join answers that go on (default: on a GPU "
        "the size of a captured step that is nearest to as few as are read at nine tenths of the "
        "full rate, as an engine with this calibration takes it; one without may take another, and "
        "says at its start which)",
    )
    group.add_argument(
        "--max-model-len", type=positive, metavar="N", help="longer requests are left out"
    )
    group.add_argument("--block-size", type=positive, default=16, metavar="N")
    group.add_argument("--num-blocks", type=positive, metavar="N", help="instead of what fits")
    group.add_argument("--memory-utilization", type=share, default=0.9, metavar="SHARE")
    group.add_argument("--policy", choices=tuple(sorted(POLICIES)), default="fcfs")
    group.add_argument(
        "--max-in-flight", type=int, choices=(1, 2), default=2, help="1: host and device take turns"
    )
    group.add_argument(
        "--no-deferred-scheduling",
        action="store_true",
        help="a step is planned as soon as the one before it runs, also on a GPU, where a server "
        "waits until just before that ends, so that who comes meanwhile is in it",
    )
    group.add_argument(
        "--no-late-plans", action=Renamed, nargs=0, dest="no_deferred_scheduling",
        default=argparse.SUPPRESS, help=argparse.SUPPRESS,
    )  # fmt: skip
    group.add_argument("--batching", choices=("continuous", "static"), default="continuous")
    group.add_argument(
        "--no-chunked-prefill", action="store_true", help="a prompt is read in one step"
    )
    group.add_argument(
        "--no-paging", action="store_true", help="each request reserves its longest possible cache"
    )
    group.add_argument(
        "--no-prefix-cache", action="store_true", help="equal beginnings are computed again"
    )
    group.add_argument(
        "--speculate",
        type=drafts,
        metavar="K:A",
        help="K drafts a step, each accepted with chance A; K auto: as many as pay, as the engine "
        "chooses them",
    )
    group.add_argument(
        "--draft", metavar="MODEL", help="the model that drafts (default: drafts take no time)"
    )


def _add_replicas(group: Any) -> None:
    group.add_argument("--replicas", type=positive, default=1, metavar="N")
    group.add_argument("--router", choices=tuple(ROUTERS), default="least-loaded")


def _add_output(group: Any) -> None:
    group.add_argument("--ttft", type=time_span, metavar="T", help="promised time to first token")
    group.add_argument("--tpot", type=time_span, metavar="T", help="promised time per token after")
    group.add_argument(
        "--sweep", action="store_true", help="try many rates and find where it saturates"
    )
    group.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="a picture, .svg or .png (pip install 'ridgeline[plots]')",
    )
    group.add_argument("--timeline", type=Path, metavar="FILE", help="a JSON line per request")
    group.add_argument("--json", action="store_true", help="print JSON instead of tables")
    group.add_argument("-q", "--quiet", action="store_true", help="no progress, no notes")


def run(args: argparse.Namespace) -> int:
    from ridgeline.cli import plots, simulate_tables
    from ridgeline.cli.simulate_case import make_case

    if args.plot is not None:
        plots.check_plot(args.plot)
    for flag in ("plot", "timeline"):
        if getattr(args, flag) is not None:
            check_writable(f"--{flag}", getattr(args, flag))
    if args.sweep and args.timeline is not None:
        raise ConfigError("--timeline is of one run; leave out --sweep")
    case = make_case(args)
    if args.sweep:
        return _run_sweep(case)
    with stage(args, f"simulating {len(case.workload)} requests"):
        report = case.run(case.workload)
    outcome = case.outcome(report)
    if args.timeline is not None:
        _write_timeline(args.timeline, report)
    if args.plot is not None:
        plots.save(args.plot, simulate_tables.title(case), simulate_tables.run_charts(report))
    answer(
        args,
        lambda: simulate_tables.run_json(case, report, outcome),
        lambda: simulate_tables.run_shown(case, report, outcome),
    )
    return 0


def _run_sweep(case: Case) -> int:
    from ridgeline.cli import plots, simulate_tables

    args = case.args
    pace = case.closed_form()
    found = case.sweep(pace)
    if args.plot is not None:
        plots.save(args.plot, simulate_tables.title(case), simulate_tables.sweep_charts(found))
    answer(
        args,
        lambda: simulate_tables.sweep_json(case, found, pace),
        lambda: simulate_tables.sweep_shown(case, found, pace),
    )
    return 0


def _write_timeline(path: Path, report: SimulationReport) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            for request in report.requests:
                file.write(json.dumps(request.as_json()) + "\n")
    except OSError as problem:
        raise ConfigError(f"--timeline {path}: {problem.strerror}") from None
