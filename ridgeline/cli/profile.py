"""`ridgeline profile`: the kernels of a step beside their prices."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.asked import check_writable
from ridgeline.cli.parser import Parser, add_json_flag
from ridgeline.cli.session import add_session_flags, note, open_llm
from ridgeline.cli.tables import Column, answer, places, plain, table, whole_percent
from ridgeline.cli.values import positive
from ridgeline.figures import number, seconds
from ridgeline.observe.run_summary import NOT_CALIBRATED

if TYPE_CHECKING:
    from rich.table import Table

    from ridgeline.measure.profile import Profile

EXAMPLES = """A step is run with PyTorch's profiler on. Each kernel counts in the class of the
operator that launched it; the cost model's operators are put into the same classes. "expected"
comes from this machine's calibration (ridgeline calibrate), else from assumed efficiencies, "ideal"
from the peak and the bandwidth alone.

Where the engine drafts (--speculate, the default of the bundled model), kernels and prices are of
making drafts and of checking them, of as many as each step had, and of the draft model reading
prompts; with --speculate off a step is one token of each request.

On a CPU the kernels are PyTorch's operators, and the profiler itself slows small ones down: compare
the step with the profiler with the step without it.

examples:
  ridgeline profile                                    decode steps of the bundled model
  ridgeline profile --phase prefill --input 1024
  ridgeline profile path/to/model --batch 16 --input 2048 --steps 20
  ridgeline profile --trace step.json                  open it in a browser: ui.perfetto.dev
  ridgeline profile path/to/model --load-format random --json
"""
SHOWN = 15


def add_arguments(parser: Parser) -> None:
    flag = parser.flags("what to profile")
    flag("--phase", "(default: decode)", default="decode", choices=("decode", "prefill"))
    flag("--batch B", "requests that decode (default: 1)", positive, default=1)
    flag("--input N", "prompt tokens (default: 256)", positive, default=256)
    flag("--steps N", "steps to average (default: 10)", positive, default=10)
    flag("--trace FILE", "write a Chrome trace (JSON)", Path)
    flag("--top N", f"kernels shown (default: {SHOWN})", positive, default=SHOWN)
    add_json_flag(flag)
    add_session_flags(parser)


def run(args: argparse.Namespace) -> int:
    if args.trace is not None:
        check_writable("--trace", args.trace)
    with open_llm(args) as llm:
        from ridgeline.measure.profile import profile_steps

        found = profile_steps(
            llm.built,
            llm.built.pricer.setup,
            phase=args.phase,
            batch=args.batch,
            num_input=args.input,
            num_steps=args.steps,
            trace=args.trace,
        )
        name = llm.resolved.model_name
    answer(
        args,
        lambda: {"model": name, **plain(found, PROFILE)},
        lambda: _shown(name, found, args.top),
    )
    if args.trace is not None:
        note(args, f"trace written to {args.trace}")
    return 0


PROFILE = """
phase shape num_steps draft_tokens step_s=plain_s step_expected_s=plain_expected_s
step_with_profiler_s=wall_s kernels_s expected_s=cost.expected_s drafting_expected_s=cost.draft_s
ideal_s=cost.ideal_s bound=cost.bound origin=cost.origin classes kernels
"""  # seconds, bytes and operations, all of one step


def _shown(model: str, found: Profile, top: int) -> Iterator[Table | str]:
    is_calibrated = found.cost.origin != "assumed"
    drafts = (
        f", {number(found.num_draft_tokens)} of them drafts," if any(found.draft_tokens) else ""
    )
    yield _class_table(model, found, drafts, is_calibrated=is_calibrated)
    kernels = (
        Column("kernel", lambda kernel: kernel.name[:60]),
        Column("class", "kind"),
        Column("calls", "calls", ".0f"),
        Column("us each", lambda kernel: kernel.seconds / kernel.calls * 1e6, places(1)),
        Column("ms", lambda kernel: kernel.seconds * 1e3, places(3)),
        _share_of(found),
    )
    yield table(found.kernels[:top], kernels, "longest kernels")
    # With drafts, the steps without the profiler are others than those with it.
    plain = ""
    if drafts and is_calibrated:
        plain = f" (expected {seconds(found.plain_expected_s)})"
    drafting = ""
    if found.cost.draft_s and is_calibrated:
        drafting = f", {seconds(found.cost.draft_s)} of them of the draft"
    expected = f"expected {seconds(found.cost.expected_s)} ({found.cost.origin})"
    if not is_calibrated:
        expected = NOT_CALIBRATED
    yield (
        f"step without the profiler {seconds(found.plain_s)}{plain}, with it "
        f"{seconds(found.wall_s)}, of which kernels {seconds(found.kernels_s)}; "
        f"{expected}{drafting}, ideal "
        f"{seconds(found.cost.ideal_s)}, bound by {found.cost.bound}"
    )


def _share_of(found: Profile) -> Column:
    total = found.kernels_s
    return Column("share", lambda row: row.seconds / total if total else "", whole_percent)


def _class_table(model: str, found: Profile, drafts: str, *, is_calibrated: bool) -> Table:
    def rate(amount: float, seconds: float) -> float:
        return amount / seconds / 1e9 if seconds else 0.0

    columns = (
        Column("class", "kind"),
        Column("kernels", "calls", ".0f"),
        Column("measured ms", lambda row: row.seconds * 1e3, places(3)),
        _share_of(found),
        Column(
            "expected ms", lambda row: row.expected_s * 1e3 if is_calibrated else None, places(3)
        ),
        Column("ideal ms", lambda row: row.ideal_s * 1e3, places(3)),
        Column("GB/s", lambda row: rate(row.bytes, row.seconds), number),
        Column("GFLOP/s", lambda row: rate(row.flops, row.seconds), number),
    )
    title = (
        f"{model}: a {found.phase} step of {number(found.num_tokens)} tokens{drafts} "
        f"for {len(found.shape)} requests"
    )
    return table(found.classes, columns, title)
