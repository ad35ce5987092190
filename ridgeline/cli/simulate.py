"""`ridgeline simulate`: what would this traffic see on that machine? The real scheduler, a
simulated device."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.asked import check_writable
from ridgeline.cli.flags import add_model
from ridgeline.cli.machine import add_machine_flags
from ridgeline.cli.parser import Flag, Parser, Renamed, add_json_flag
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
    _add_traffic(parser.flags("traffic"))
    _add_engine(parser.flags("engine"))
    _add_replicas(parser.flags("replicas"))
    _add_output(parser.flags("what to say"))
    parser.mark_expert(
        *("--max-num-mixed-tokens", "--block-size", "--num-blocks", "--max-in-flight", "--draft"),
        *("--no-deferred-scheduling", "--no-chunked-prefill", "--no-paging", "--no-prefix-cache"),
        *("--batching", "--memory-utilization", "--seed", "--timeline"),
    )


def _add_traffic(flag: Flag) -> None:
    flag("--trace FILE", "recorded requests", Path)
    flag("--rate R", "requests a second; stretches a --trace to it", above_zero)
    flag("--requests N", f"how many (default: {DEFAULT_REQUESTS}, or all of the trace)", positive)
    flag("--input I", "prompt tokens, N or LOW-HIGH", lengths)
    flag("--output O", "answer tokens, N or LOW-HIGH", lengths)
    flag(
        "--arrivals",
        "how requests come (default: poisson, or as in the trace)",
        choices=tuple(ARRIVALS),
    )
    flag("--seed", "of all that is drawn (default: 0)", int, default=0)


def _add_engine(flag: Flag) -> None:
    flag(
        "--max-num-seqs N",
        "requests at once (default: the engine's, 256 on a GPU and 64 on a CPU)",
        positive,
    )
    flag(
        "--max-num-batched-tokens N",
        "most tokens of a step (default: the engine's, 8192 on a GPU and 2048 on a CPU)",
        positive,
    )
    flag(
        "--max-num-mixed-tokens N",
        "most tokens of a step in which prompts join answers that go on (default: on a GPU "
        "the size of a captured step that is nearest to as few as are read at nine tenths of the "
        "full rate, as an engine with this calibration takes it; one without may take another, and "
        "says at its start which)",
        positive,
    )
    flag("--max-model-len N", "longer requests are left out", positive)
    flag("--block-size N", None, positive, default=16)
    flag("--num-blocks N", "instead of what fits", positive)
    flag("--memory-utilization SHARE", None, share, default=0.9)
    flag("--policy", default="fcfs", choices=tuple(sorted(POLICIES)))
    flag("--max-in-flight", "1: host and device take turns", int, default=2, choices=(1, 2))
    flag(
        "--no-deferred-scheduling",
        "a step is planned as soon as the one before it runs, also on a GPU, where a server "
        "waits until just before that ends, so that who comes meanwhile is in it",
    )
    flag(
        "--no-late-plans", action=Renamed, nargs=0, dest="no_deferred_scheduling",
        default=argparse.SUPPRESS, what=argparse.SUPPRESS
    )  # fmt: skip
    flag("--batching", default="continuous", choices=("continuous", "static"))
    flag("--no-chunked-prefill", "a prompt is read in one step")
    flag("--no-paging", "each request reserves its longest possible cache")
    flag("--no-prefix-cache", "equal beginnings are computed again")
    flag(
        "--speculate K:A",
        "K drafts a step, each accepted with chance A; K auto: as many as pay, as the engine "
        "chooses them",
        drafts,
    )
    flag("--draft MODEL", "the model that drafts (default: drafts take no time)")


def _add_replicas(flag: Flag) -> None:
    flag("--replicas N", None, positive, default=1)
    flag("--router", default="least-loaded", choices=tuple(ROUTERS))


def _add_output(flag: Flag) -> None:
    flag("--ttft T", "promised time to first token", time_span)
    flag("--tpot T", "promised time per token after", time_span)
    flag("--sweep", "try many rates and find where it saturates")
    flag("--plot FILE", "a picture, .svg or .png (pip install 'ridgeline[plots]')", Path)
    flag("--timeline FILE", "a JSON line per request", Path)
    add_json_flag(flag)
    flag("-q --quiet", "no progress, no notes")


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
    throughput = case.closed_form()
    found = case.sweep(throughput)
    if args.plot is not None:
        plots.save(args.plot, simulate_tables.title(case), simulate_tables.sweep_charts(found))
    answer(
        args,
        lambda: simulate_tables.sweep_json(case, found, throughput),
        lambda: simulate_tables.sweep_shown(case, found, throughput),
    )
    return 0


def _write_timeline(path: Path, report: SimulationReport) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            for request in report.requests:
                file.write(json.dumps(request.as_json()) + "\n")
    except OSError as problem:
        raise ConfigError(f"--timeline {path}: {problem.strerror}") from None
