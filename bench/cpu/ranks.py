"""What do several ranks of one CPU cost? The driver's part of a step, a sum, and TP 2 with
a thread each against one process with two.

usage: python -m bench.cpu.ranks [--model demo:chat] [--rounds 8] [--out FILE]

What is compared is measured in turns, round by round, and the median of the rounds is told: other
work on the machine meets both, but ranks more, who wait for each other. So the fastest tenth of all
decode steps is told as well. Each figure of the driver has the
microseconds that passed and those for which a core was held; the second does not grow while others
hold the cores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import secrets
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from ridgeline import LLM, SamplingParams
from ridgeline.devices.cpu import CpuDevice
from ridgeline.distributed.collectives import open_collective
from ridgeline.distributed.links import SECRET_BYTES, DriverLink, Processes, Ranks
from ridgeline.distributed.messages import COMMANDS, DecodeStep, Step, step_message
from ridgeline.engine import Engine
from ridgeline.executor.group import GroupExecutor
from ridgeline.executor.local import LocalExecutor
from ridgeline.frames import frame
from ridgeline.request import Request
from ridgeline.step import Decodes, ScheduledRequest, StepPlan, StepResult

ROWS, BLOCK_SIZE = 256, 16
SUM_BYTES = 16 << 10
STEPS = 400  # of a round
SUMS = 2000
TOKENS = 32  # of each request in a turn


class Done:
    """In the place of a rank's device."""

    num_blocks, block_size = 1, BLOCK_SIZE

    def submit(self, plan: StepPlan) -> Done:
        return self

    def is_over(self) -> bool:
        return True

    def result(self) -> StepResult:
        return StepResult({})


def decode_plan(step_id: int) -> StepPlan:
    """Of ROWS requests, a sixteenth of which get a block."""
    names = tuple(f"request-{row:08}" for row in range(ROWS))
    starts = tuple(1000 + row + step_id for row in range(ROWS))
    none: tuple[tuple[int, ...], ...] = ((),)
    opened = tuple(row for row in range(ROWS) if starts[row] % BLOCK_SIZE == 0)
    rows = [ScheduledRequest(names[row], starts[row], 1, none, True) for row in range(ROWS)]
    for row in opened:
        rows[row] = ScheduledRequest(names[row], starts[row], 1, ((7 + row,),), True)
    return StepPlan(step_id, tuple(rows)).knowing(Decodes(names, starts, opened))


def listening(sock: socket.socket, secret: bytes) -> None:
    """A rank that reads steps and computes nothing."""
    link = DriverLink(sock, secret, 1)
    link.listen(on_end=lambda: os._exit(0))
    while True:
        command = link.take()
        if isinstance(command, (Step, DecodeStep)):
            command.plan()


def timed(call: Callable[[], object], times: int) -> tuple[float, float]:
    """Microseconds of one call that passed, and for which a core was held: medians."""
    passed, held = [], []
    for _ in range(times):
        wall, core = time.perf_counter(), time.thread_time()
        call()
        held.append(time.thread_time() - core)
        passed.append(time.perf_counter() - wall)
    return statistics.median(passed) * 1e6, statistics.median(held) * 1e6


def driver(rounds: int) -> dict[str, Any]:
    """What the driver does for its other rank in one step, and the rank for the driver."""
    secret = secrets.token_bytes(SECRET_BYTES)
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(target=listening, args=(theirs, secret))
    process.start()
    theirs.close()
    ranks = Ranks(2, secret, [ours], Processes())
    ranks.gather(60.0, "it is started here")
    group = GroupExecutor(cast(LocalExecutor, Done()), ranks)
    plans = iter([decode_plan(step_id) for step_id in range(1, rounds * STEPS + 1)])

    def step() -> None:
        group.submit(next(plans)).result()

    sent = [timed(step, STEPS) for _ in range(rounds)]
    payload = frame(step_message(decode_plan(1), 0))[4:]

    def read() -> None:
        cast(DecodeStep, COMMANDS.decode(payload)).plan()

    taken = [timed(read, STEPS) for _ in range(rounds)]
    ranks.close()
    process.join()
    return {
        "rows": ROWS,
        "message_bytes": len(payload),
        "driver_us": _median(sent, 0),
        "driver_core_us": _median(sent, 1),
        "rank_us": _median(taken, 0),
        "rank_core_us": _median(taken, 1),
    }


def _median(found: list[tuple[float, float]], which: int) -> float:
    return round(statistics.median(one[which] for one in found), 1)


def sums(rank: int, addresses: dict[str, str], rounds: int) -> dict[str, float]:
    """Microseconds of a sum, by collective: the medians of the rounds' medians, and the best tenth
    of all calls."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    opened = {n: open_collective(n, rank, 2, at, timeout_s=60.0) for n, at in addresses.items()}
    x = torch.zeros(SUM_BYTES // 4)
    found: dict[str, list[list[float]]] = {name: [] for name in opened}
    for _ in range(rounds):
        for name, collective in opened.items():
            taken: list[float] = []
            for _ in range(SUMS if name == "shared" else SUMS // 10):
                begin = time.perf_counter()
                collective.all_reduce(x)
                taken.append(time.perf_counter() - begin)
            found[name].append(sorted(taken))
    for collective in opened.values():
        collective.close()
    os.sched_setaffinity(0, cores)
    told = {}
    for name, each in found.items():
        every = sorted(us for taken in each for us in taken)
        medians = [taken[len(taken) // 2] for taken in each]
        told[f"{name}_p50_us"] = round(statistics.median(medians) * 1e6, 1)
        told[f"{name}_p10_us"] = round(every[len(every) // 10] * 1e6, 1)
    return told


def collectives(rounds: int) -> dict[str, Any]:
    addresses = {}
    for name in ("shared", "gloo"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            addresses[name] = f"127.0.0.1:{free.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    other = context.Process(target=sums, args=(1, addresses, rounds))
    other.start()
    found = sums(0, addresses, rounds)
    other.join()
    return {"bytes": SUM_BYTES, **found}


def decoding(model: str, rows: int, rounds: int, options: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a decode step, of one process with two threads and two ranks with one each in
    turns: the median of all steps, and of the tenth that was disturbed least."""
    shared = {"device": "cpu", "dtype": "bfloat16", "speculate": "off", "max_model_len": 128}
    found: dict[str, list[float]] = {"one": [], "two": []}
    with (
        LLM(model, threads=2, **shared, **options) as one,
        LLM(model, threads=1, tp=2, **shared, **options) as two,
    ):
        for number in range(rounds + 1):
            for name, llm in (("one", one), ("two", two)):
                taken = _steps(llm.engine, rows, number)
                found[name] += taken if number else []  # the first records steps
    told: dict[str, Any] = {"model": model, "rows": rows, "steps": len(found["one"])}
    for part, share in (("p50", 0.5), ("p10", 0.1)):
        one_s, two_s = (sorted(each)[int(len(each) * share)] for each in found.values())
        told[f"one_process_{part}_ms"] = round(one_s * 1e3, 3)
        told[f"two_ranks_{part}_ms"] = round(two_s * 1e3, 3)
        told[f"ratio_{part}"] = round(one_s / two_s, 3)
    return told


def _steps(engine: Engine, rows: int, number: int) -> list[float]:
    """Seconds of each step in which all rows decode."""
    ask = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    for row in range(rows):
        engine.add(Request(f"{number}-{row}", (5 + row, 17, 99, 3), ask, 0.0))
    taken = []
    while not engine.is_idle:
        begin = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - begin)
    return taken[2:-2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo:chat")
    parser.add_argument("--random", action="store_true", help="with random weights")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    options = {"load_format": "random"} if asked.random else {}
    every = [int(rows) for rows in asked.rows.split(",")]
    found = {
        "command": " ".join(["python -m bench.cpu.ranks", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "cpu": CpuDevice().describe(),
        "cores": os.cpu_count(),
        "load": [round(one, 1) for one in os.getloadavg()],
        "driver": driver(asked.rounds),
        "sum": collectives(asked.rounds),
        "decode": [decoding(asked.model, rows, asked.rounds, options) for rows in every],
    }
    text = json.dumps(found, indent=1)
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
