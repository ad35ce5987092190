"""Run the engine in many simulated worlds, every step of them checked.

usage: python tools/simulate_core.py [--steps 1000000] [--seed 0] [--only SEED] [--processes N]
       [--ranks]

Exit code 1 when a world is violated; the seed that is printed runs that world alone (--only).
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STEPS_PER_WORLD = 400
LONG_WORLD_STEPS = 20_000  # one world in LONG_EVERY goes on for longer
LONG_EVERY = 500


def live(seed: int, *, has_ranks: bool = False) -> tuple[int, int, Counter[str], str]:
    """One world: (seed, steps, what happened, what was violated). `has_ranks`: none of one rank."""
    from tests.fake_device import Violation
    from tests.simulated_world import World, run_seed

    logging.disable()
    if has_ranks and World(seed).num_ranks == 1:
        return seed, 0, Counter(), ""
    num_steps = LONG_WORLD_STEPS if seed % LONG_EVERY == LONG_EVERY - 1 else STEPS_PER_WORLD
    try:
        world = run_seed(seed, num_steps)
    except Violation as violation:
        return seed, 0, Counter(), str(violation)
    counts = Counter(world.counts)
    counts["faults"] = world.device.num_faults + world.device.num_row_faults
    counts["late results"] = world.scheduler.num_late_results
    counts["idle parts of waves"] = world.device.wave.num_idle
    counts["accepted drafts"] = world.device.num_accepted
    counts["worlds"] = 1
    counts["worlds with ranks"] = world.num_ranks > 1
    counts["worlds with a late rank"] = world.late is not None
    return seed, world.device.num_steps, counts, ""


def worlds(
    first: int, num_processes: int, *, has_ranks: bool
) -> Iterator[tuple[int, int, Counter[str], str]]:
    seeds, one = iter(range(first, sys.maxsize)), partial(live, has_ranks=has_ranks)
    if num_processes == 1:
        yield from map(one, seeds)
        return
    batch = 8 * num_processes
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        while True:
            chunk = [next(seeds) for _ in range(batch)]
            yield from pool.imap_unordered(one, chunk)


def simulate(num_steps: int, first: int, num_processes: int, *, has_ranks: bool) -> int:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    total: Counter[str] = Counter()
    violations: list[str] = []
    done = last = 0
    start = time.monotonic()
    columns = (
        TextColumn("checked steps"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=num_steps)
        for seed, steps, counts, problem in worlds(first, num_processes, has_ranks=has_ranks):
            done, last = done + steps, max(last, seed)
            total.update(counts)
            progress.update(task, completed=min(done, num_steps))
            if problem:
                violations.append(problem)
                progress.console.print(f"VIOLATION {problem}", markup=False)
            if done >= num_steps or len(violations) >= 10:
                break
    shown = " ".join(f"{name}={count}" for name, count in sorted(total.items()))
    print(f"{done} checked steps, seeds {first} to {last}, {time.monotonic() - start:.0f} s")
    print(shown)
    print(f"{len(violations)} violations")
    return 1 if violations else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="the first world's seed")
    parser.add_argument("--only", type=int, help="run this world alone")
    parser.add_argument("--ranks", action="store_true", help="only worlds of several ranks")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    if asked.only is not None:
        _, steps, counts, problem = live(asked.only)
        print(problem or f"{steps} checked steps, no violation, {dict(counts)}")
        return 1 if problem else 0
    return simulate(asked.steps, asked.seed, asked.processes, has_ranks=asked.ranks)


if __name__ == "__main__":
    raise SystemExit(main())
