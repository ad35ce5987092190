"""Do the GPU kernels stay within their memory, and do their threads wait for each other?

usage: python bench/gpu/sanitize.py [--tools memcheck,racecheck] [--each 2] [--limit-s 120] [PATH]

Runs tests of the kernels under NVIDIA's compute-sanitizer: `--each` cases of every test function,
more of those with many, drawn by `--seed` and dealt out to `--jobs` processes for each tool. A new
kernel is taken in by having tests. They run once without a tool first, so that nothing is compiled
under one. Torch's allocator gives every tensor memory of its own, or reads past the end of one
would not be seen; a test that captures a graph cannot run so, and is left out, as are tests of
many numbers. What racecheck says of cuBLAS's own kernels is counted apart. The exit code is 1 if a
tool found something, a test failed, or a process ended in another way or had no time for any test;
what the time did not allow is counted.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATHS = (
    "tests/kernels",
    "tests/gpu/test_paged_decode_cuda.py",
    "tests/gpu/test_int8_linear.py",
    "tests/gpu/test_stream_linear.py",
    "tests/gpu/test_tile_linear.py",
)
LEFT_OUT = (
    *("large", "Large", "4096", "14336", "28672", "151936", "many_rows"),
    *("graph", "captured", "replays", "always_the_same", "one_launch_after"),
    *("tuner", "runs_dry", "contract", "tests/kernels/cpu/", "test_cache", "test_noise"),
)
CASES_A_MORE = 60  # one more case for so many that a test function has
FOUND = 9  # the tools' exit code
SUMMARIES = (
    re.compile(r"ERROR SUMMARY: (\d+) error"),
    re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
)
OF_LIBRARIES = re.compile(r"Race reported between \w+ access at \S*(?:nvjet|cublas|cutlass)")
COUNTS = re.compile(
    r"^sanitized: (\d+) tests, (\d+) passed, (\d+) failed, (\d+) skipped, (\d+) not begun$",
    re.MULTILINE,
)


@dataclass(slots=True)
class Chosen:
    """A pytest plugin: picks the cases of one part of `jobs`, and stops beginning new ones when
    the time is over."""

    each: int
    seed: int
    part: int
    jobs: int
    deadline: float
    num_chosen: int = 0
    num_passed: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    num_late: int = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        rng, kept = random.Random(self.seed), []
        for _, group in groupby(items, lambda item: item.nodeid.split("[")[0]):
            cases = [i for i in group if not any(word in i.nodeid for word in LEFT_OUT)]
            count = min(len(cases), self.each + len(cases) // CASES_A_MORE)
            kept += [cases[i] for i in rng.sample(range(len(cases)), count)]
        rng.shuffle(kept)  # what the time does not allow is of all kinds
        items[:] = kept[self.part :: self.jobs]
        self.num_chosen = len(items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if time.monotonic() < self.deadline:
            print(f"\n{item.nodeid}", end=" ", flush=True)
            return None
        self.num_late += 1
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.num_failed += report.failed
        self.num_skipped += report.skipped
        self.num_passed += report.passed and report.when == "call"

    def text(self) -> str:
        return (
            f"sanitized: {self.num_chosen} tests, {self.num_passed} passed,"
            f" {self.num_failed} failed, {self.num_skipped} skipped, {self.num_late} not begun"
        )


def run_tests(asked: argparse.Namespace) -> int:
    """In this process; pytest's exit code."""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    deadline = time.monotonic() + asked.limit_s
    plugin = Chosen(asked.each, asked.seed, asked.part, asked.jobs, deadline)
    found = [path for path in asked.paths if Path(path).exists()]
    code = pytest.main(["-q", "--tb=short", "--durations=5", "-p", "no:cacheprovider", *found],
                       plugins=[plugin])  # fmt: skip
    print(f"\n{plugin.text()}", flush=True)
    return int(code)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one process ended; `num_found` is None where the tool said nothing, `num_theirs` were
    found in libraries, `counts` are chosen, passed, failed, skipped and not begun."""

    tool: str
    code: int
    seconds: float
    num_found: int | None
    num_theirs: int
    counts: tuple[int, ...]

    @property
    def is_clean(self) -> bool:
        ended = self.code == 0 or (self.code == FOUND and self.num_theirs > 0)
        _, passed, failed, *_ = self.counts
        return ended and passed > 0 and not failed and (self.tool == "none" or self.num_found == 0)


def words_of(tool: str, parts: Sequence[Outcome]) -> str:
    codes = ", ".join(str(code) for code in sorted({part.code for part in parts}))
    found = [part.num_found for part in parts if part.num_found is not None]
    said = f"{sum(found)} found" if len(found) == len(parts) else f"{len(found)} summaries"
    said += f", {sum(part.num_theirs for part in parts)} more in libraries"
    sums = [sum(column) for column in zip(*(part.counts for part in parts), strict=True)]
    names = ("tests", "passed", "failed", "skipped", "not begun")
    tests = ", ".join(f"{n} {name}" for n, name in zip(sums, names, strict=True))
    seconds = max(part.seconds for part in parts)
    return f"{tool}: exit {codes}; {said}; {tests}; {seconds:.0f} s"


def start(
    tool: str, program: str, words: Sequence[str], log: Path, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """The tests in a process of their own, under the tool unless that is "none"."""
    inner = [sys.executable, "-u", str(Path(__file__).resolve()), "--inner", *words]
    under = [
        *(program, "--tool", tool, "--error-exitcode", str(FOUND)),
        *("--target-processes", "application-only", "--report-api-errors", "no"),
        *("--show-backtrace", "device", "--print-limit", "40"),
    ]
    command = inner if tool == "none" else [*under, *inner]
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ)


def finish(
    tool: str, process: subprocess.Popen[bytes], begun: float, limit_s: float, log: Path
) -> Outcome:
    """Waits; a process that goes on far past its limit is ended."""
    try:
        code = process.wait(timeout=max(1.0, begun + limit_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = 124
    text = log.read_text(errors="replace")
    found = [int(hit) for summary in SUMMARIES for hit in summary.findall(text)]
    theirs = len(OF_LIBRARIES.findall(text))
    counts = COUNTS.findall(text)
    return Outcome(
        tool,
        code,
        time.monotonic() - begun,
        sum(found) - theirs if found else None,
        theirs,
        tuple(map(int, counts[-1])) if counts else (0,) * 5,
    )


def run_tools(
    tools: Sequence[str], program: str, asked: argparse.Namespace, environ: Mapping[str, str]
) -> list[Outcome]:
    """All at once; a line for each tool."""
    begun = time.monotonic()
    runs = []
    for tool in tools:
        for part in range(asked.jobs):
            words = ["--each", str(asked.each), "--seed", str(asked.seed), "--part", str(part)]
            words += ["--jobs", str(asked.jobs), "--limit-s", str(asked.limit_s), *asked.paths]
            log = asked.out / f"{tool}-{part}.log"
            runs.append((tool, start(tool, program, words, log, environ), log))
    limit_s = 1.5 * asked.limit_s + 60
    outcomes = [finish(tool, process, begun, limit_s, log) for tool, process, log in runs]
    for tool in tools:
        print(words_of(tool, [o for o in outcomes if o.tool == tool]), flush=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", default=list(PATHS), metavar="PATH")
    parser.add_argument("--tools", default="memcheck,racecheck", help="also synccheck, initcheck")
    parser.add_argument("--each", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=4, help="processes for each tool")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=120.0, help="of tests, for each process")
    parser.add_argument("--out", type=Path, default=Path("build/sanitize"), help="for the logs")
    parser.add_argument("--program", default="compute-sanitizer")
    parser.add_argument("--skip-warm-up", action="store_true", help="no run without a tool")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inner:
        return run_tests(asked)
    program = shutil.which(asked.program)
    if program is None:
        print(f"{asked.program} is not installed; CUDA's toolkit brings it", file=sys.stderr)
        return 1
    asked.out.mkdir(parents=True, exist_ok=True)
    environ = os.environ | {"RIDGELINE_TEST_DEVICE": "cuda"}
    alone = environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    outcomes = [] if asked.skip_warm_up else run_tools(["none"], program, asked, environ)
    outcomes += run_tools(asked.tools.split(","), program, asked, alone)
    return 0 if all(outcome.is_clean for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
