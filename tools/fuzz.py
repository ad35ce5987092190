"""What do random and damaged inputs do to the parts that read what strangers send?

usage: python -m tools.fuzz [--target NAME ...] [--cases N] [--seconds S] [--seed N]

Each target gets at most N cases and S seconds (default: 60 s, or N cases however long they take).
Exit code 1 after a fault: the case is kept as tests/fuzz/seeds/TARGET/DIGEST, and tests/fuzz
replays all that are there.

A target is one line of TARGETS, its name and "module:NAME" of a Target: `make(rng)` draws a case
from nothing but the generator it gets, and `check(case)` feeds it to the code and raises whatever
is wrong. `check` takes any bytes, leaves nothing behind, and a case takes at most CASE_LIMIT_S.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

SEEDS = Path(__file__).resolve().parents[1] / "tests/fuzz/seeds"
CASE_LIMIT_S = 10
MAX_FAULTS = 20  # of one target, then it ends
MAX_GROWTH_BYTES = 64 << 20  # of resident memory, after the first tenth of the cases

TARGETS: dict[str, str] = {
    "bodies": "tools.fuzz_bodies:bodies",
    "http": "tools.fuzz_http:http",
    "safetensors": "tools.fuzz_files:safetensors",
    "gguf": "tools.fuzz_files:gguf",
    "index": "tools.fuzz_files:index",
    "config": "tools.fuzz_files:config",
    "stored": "tools.fuzz_files:stored",
    "generation": "tools.fuzz_files:generation",
    "tokenizer": "tools.fuzz_files:tokenizer",
}


class Target(NamedTuple):
    make: Callable[[random.Random], bytes]
    check: Callable[[bytes], None]


def load(name: str) -> Target:
    module, _, attribute = TARGETS[name].partition(":")
    target: Target = getattr(import_module(module), attribute)
    return target


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"one case took longer than {CASE_LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, CASE_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_case(target: Target, case: bytes) -> Exception | None:
    """What `case` did wrong, if anything."""
    try:
        with _time_limit():
            target.check(case)
    except Exception as fault:
        return fault
    return None


def draw(target: Target, name: str, seed: int, number: int) -> bytes:
    return target.make(random.Random(f"{name} {seed} {number}"))


def keep(name: str, case: bytes) -> Path:
    path = SEEDS / name / hashlib.sha256(case).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(case)
    return path


def _resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096


def fuzz(name: str, seed: int, num_cases: float, seconds: float) -> int:
    """Run one target and tell; the number of faults."""
    target = load(name)
    start = time.monotonic()
    number = num_faults = memory = 0

    def share() -> float:
        return max(number / num_cases, (time.monotonic() - start) / seconds)

    while share() < 1 and num_faults < MAX_FAULTS:
        case = draw(target, name, seed, number)
        if (fault := run_case(target, case)) is not None:
            num_faults += 1
            print(f"{name}: case {number}: {type(fault).__name__}: {fault}\n  {keep(name, case)}")
        number += 1
        if not memory and share() >= 0.1:
            memory = _resident_bytes()
    growth = _resident_bytes() - (memory or _resident_bytes())
    if growth > MAX_GROWTH_BYTES:
        num_faults += 1
        print(f"{name}: memory grew by {growth >> 20} MiB")
    print(
        f"{name}: {number} cases in {time.monotonic() - start:.0f} s, {num_faults} faults, "
        f"memory +{growth / (1 << 20):.1f} MiB"
    )
    return num_faults


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="default: all")
    parser.add_argument("--cases", type=int, help="for each target")
    parser.add_argument("--seconds", type=float, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    names = args.target or list(TARGETS)
    seconds = args.seconds or (math.inf if args.cases else 60.0)
    faults = [fuzz(name, args.seed, args.cases or math.inf, seconds) for name in names]
    return int(sum(faults) > 0)


if __name__ == "__main__":
    sys.exit(main())
