"""`ridgeline calibrate`: how fast is this machine really, operator by operator?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.asked import check_threads, check_writable
from ridgeline.cli.parser import Parser
from ridgeline.cli.session import Report, bars, note
from ridgeline.cli.tables import Column, answer, grid, table
from ridgeline.cli.values import names, positive
from ridgeline.config import check_device
from ridgeline.figures import percent, scaled, seconds

if TYPE_CHECKING:
    from rich.table import Table

    from ridgeline.cost.constants import Calibration
    from ridgeline.measure.calibrate import Answer

EXAMPLES = """Measures memory, matrix products, attention, elementwise passes, sampling, the
host's own work and whole steps of a few random models, on a GPU by its own clock too; fits a few
constants to each class; tests them on a fifth of the points that it kept out. Takes minutes
(--quick: one or two), best on an idle machine. The record goes to the user's cache folder, where
every command that asks for `--device this` finds it.

examples:
  ridgeline calibrate                              the device that the engine would choose
  ridgeline calibrate --device cpu --threads 1     as small models run on a CPU
  ridgeline calibrate --dtype bfloat16 --quick
  ridgeline calibrate --output here.json           keep it there as well, for --calibration
"""

WAY_OUT = "Stop the other programs and calibrate again"


def add_arguments(parser: Parser) -> None:
    flag = parser.flags("what to measure")
    flag("--device D", "auto, cpu, cuda or cuda:N (default: auto)", default="auto")
    flag(
        "--dtype NAMES",
        "float32, bfloat16, float16 (default: float32 and bfloat16 on a CPU, the fastest "
        "16-bit one on a GPU)",
        names,
        default=[],
        action="append",
    )
    flag("--threads N", "of a CPU (default: all its cores)", positive)
    flag("--quick", "fewer points, a minute or two")
    flag("--output FILE", "write the record here as well")
    flag("--json", "print the record instead of tables")
    flag("-q --quiet", "no progress, no notes")


def run(args: argparse.Namespace) -> int:
    check_threads(args.threads)  # before torch, which takes its time
    check_device(args.device)
    from ridgeline.measure.calibrate import Question, calibrate
    from ridgeline.measure.disturbance import look_around
    from ridgeline.records import prepare_folder, record_path, write_record

    question = Question(
        device=args.device,
        dtypes=tuple(name for names in args.dtype for name in names),
        threads=args.threads,
        is_quick=args.quick,
    )
    if args.output:
        check_writable("--output", Path(args.output))
    prepare_folder(record_path("any"))
    if not args.quiet and (busy := look_around()):
        note(
            args,
            f"{'; '.join(busy)}: this machine is busy. {WAY_OUT}, or go on: the record says so",
        )
    with progress_of(args) as progress:
        found = calibrate(question, progress)
    kept = record_path(found.device.name)
    write_record(found.record, kept)
    note(args, f"kept in {kept}")
    if args.output:
        write_record(found.record, Path(args.output))
        note(args, f"written to {args.output}")
    answer(args, lambda: found.record, lambda: shown(found))
    if caveat := found.fit.calibration.caveat:
        note(args, f"{caveat}. {WAY_OUT}. Until then other commands repeat this")
    return 0


@contextmanager
def progress_of(args: argparse.Namespace) -> Iterator[Report]:
    """Draws bars on a terminal, lines elsewhere."""
    if args.quiet:
        yield lambda stage, done, total: None
    elif not sys.stderr.isatty():
        yield _lines()
    else:
        text = "{task.description:40}"
        with bars("TimeElapsedColumn", text=text, transient=False) as report:
            yield report


def _lines() -> Report:
    """One line a stage."""
    seen: set[str] = set()

    def report(stage: str, done: int, total: int) -> None:
        if stage not in seen:
            seen.add(stage)
            print(stage, file=sys.stderr, flush=True)

    return report


def shown(found: Answer) -> Iterator[Table]:
    """The device, its constants and how well they predict."""
    yield grid(("figure", "value"), _device_rows(found), found.device.label)
    headings = ("class", "of the peak", "of the bandwidth", "a launch")
    yield grid(headings, _constants(found.fit.calibration), "constants")
    columns = (
        Column("points kept out", lambda row: row[0]),
        Column("number", lambda row: row[1].count),
        Column("median error", lambda row: row[1].median, percent),
        Column("90 %", lambda row: row[1].p90, percent),
    )
    yield table(found.fit.errors.items(), columns, "does it predict?")


def _device_rows(found: Answer) -> Iterator[tuple[str, str]]:
    device, about = found.device, found.record["about"]
    for dtype, flops in device.peak_flops.items():
        yield f"peak {dtype}", scaled(flops, "FLOP/s")
    yield "memory, read (measured)", scaled(about["read_bytes_per_s"], "B/s")
    yield "memory, copy (measured)", scaled(about["copy_bytes_per_s"], "B/s")
    yield "bandwidth that shares refer to", scaled(device.bandwidth, "B/s")
    yield "one small operator, host side", seconds(about["launch_s"])
    host = found.fit.calibration.host
    yield "step, host side", f"{seconds(host.c0_s)} + {seconds(host.c1_s)} a request"
    if host.check_request_s:
        yield (
            "step that verifies drafts, host side",
            f"{seconds(host.check_request_s)} a request more",
        )
    if host.captured_s:
        beside = f"{seconds(host.captured_s)}, {seconds(host.pass_s)} a draft of a model"
        yield "captured step, beside its operators", beside


def _constants(calibration: Calibration) -> Iterator[tuple[str, str, str, str]]:
    measured = {
        name.rpartition(" ")[2] for name in calibration.held_out if name.startswith("matmul")
    }
    for dtype in measured:
        product, a = calibration.matmul[dtype], calibration.attention_for(dtype)
        for name, share, stream, launch in (
            ("products", product.e_c, product.e_m, product.t0_s),
            ("prefill attention", a.prefill_e_c, a.prefill_e_m, a.prefill_t0_s),
            ("decode attention", a.decode_e_c, a.decode_e_m, a.decode_t0_s),
        ):
            yield f"{name} {dtype}", percent(share), percent(stream), seconds(launch)
    for name, passes in calibration.streams.items():
        yield name, "", percent(passes.e_m), seconds(passes.t0_s)
