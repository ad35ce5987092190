r"""Where does the time to a first token go, from the client's call to its first line of answer?

    PYTHONPATH=. python3 bench/gpu/server_times.py --workloads workloads.py --model DIR \
        --serve 32 --out times.json

The load of `run.py --serve`, from a server that writes an event log. Per request, in order:

sent      from when it was due until the client has begun to send it
inbound   until the engine could have seen it: client, HTTP, and the way to the engine's process;
          what is left of the next part if the engine had looked all the time
turn      until the engine looks for new requests: between steps, and while its next plan waits
queue     until the first step with a part of its prompt is planned
behind    until that step begins, as the device still works on the one before it
prompt    the steps that compute the prompt, up to the result of the last one
outbound  the way to the client's first line: engine, HTTP, client

"inbound" and "turn" are told apart by the log: the engine looks from each result to the plan behind
it, so a request that was taken in when it began to look might have come at any time after the look
before it. Where a request missed looks, they count as inbound. The row also has what the simulator
says of the same requests by the engine's own prices (predicted over measured, less 1), how long
before the step ahead ended plans were made, steps as long as they were and as priced by what they
computed, and the CPU time of each process.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import psutil
from processes import Call, send, served
from run import (
    add_engine,
    apart,
    command,
    engine_options,
    environment,
    load_workloads,
    numbers,
)

from bench.simulator_comparison import plans_ahead_s, simulate
from ridgeline.cost.pricer import Pricer
from ridgeline.observe.engine_header import read_setup
from ridgeline.observe.event_log import (
    Added,
    Collected,
    EventLog,
    Planned,
    Submitted,
    read_event_log,
)

PARTS = ("sent", "inbound", "turn", "queue", "behind", "prompt", "outbound")
AT_ONCE_S = 0.1e-3  # a result that is there so soon was there already
Row = dict[str, Any]


# ---------------------------------------------------------------------- the client


async def load(
    work: ModuleType, url: str, rate: float, sizes: Sequence[int], seed: int
) -> list[Call]:
    """As the workload file sends it, with all times kept."""
    count, prompt_len, out_len = sizes
    rng = random.Random(seed)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        prompts = [work.fresh_ids(prompt_len) for _ in range(count)]
        calls, tasks = list[Call](), list[asyncio.Task[None]]()
        due = time.monotonic()
        for prompt in prompts:
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            calls.append(Call(prompt, due))
            tasks.append(asyncio.create_task(send(session, url, calls[-1], out_len)))
        await asyncio.gather(*tasks)
    return calls


# ---------------------------------------------------------------------- what the engine did


@dataclass
class Looked:
    """A request in the log."""

    taken_s: float
    planned_s: float = 0.0
    begun_s: float = 0.0
    first_s: float = 0.0


def looked_at(log: EventLog) -> tuple[dict[tuple[int, ...], Looked], list[tuple[float, float]]]:
    """Requests by their prompts, and the times at which the engine looked for requests: from a
    result to the next plan."""
    found: dict[tuple[int, ...], Looked] = {}
    by_id: dict[str, Looked] = {}
    plans: dict[int, Planned] = {}
    looks: list[tuple[float, float]] = []
    looks_since: float | None = None
    begins: dict[int, float] = {}
    waiting: list[int] = []
    for event in log.events:
        if isinstance(event, Added):
            by_id[event.request_id] = found[event.prompt] = Looked(event.now)
        elif isinstance(event, Planned) and event.plan.scheduled:
            step = event.plan.step_id
            plans[step] = event
            if looks_since is not None:
                looks.append((looks_since, event.now))
                looks_since = None
            if not waiting:
                begins[step] = event.now
            waiting.append(step)
            for entry in event.plan.scheduled:
                row = by_id.get(entry.request_id)
                if row is not None and not row.planned_s:
                    row.planned_s = event.now
        elif isinstance(event, Collected):
            looks_since = event.now
            waiting.remove(event.step_id)
            if waiting:
                begins.setdefault(waiting[0], event.now)
            begun = begins.pop(event.step_id)
            for entry in plans.pop(event.step_id).plan.scheduled:
                row = by_id.get(entry.request_id)
                if row is not None and not row.begun_s:
                    row.begun_s = max(begun, row.planned_s)
            for output in event.outputs:
                row = by_id[output.request_id]
                if output.new_token_ids and not row.first_s:
                    row.first_s = event.now
    return found, looks


def parts(call: Call, row: Looked, looks: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Milliseconds; they add up to the time from due to the first line."""
    place = bisect.bisect_left(looks, call.sent_s, key=lambda look: look[1])
    look = max(looks[place][0], call.sent_s) if place < len(looks) else row.taken_s
    turn = max(0.0, min(look, row.taken_s) - call.sent_s)
    times = {
        "sent": call.sent_s - call.due_s,
        "inbound": row.taken_s - call.sent_s - turn,
        "turn": turn,
        "queue": row.planned_s - row.taken_s,
        "behind": row.begun_s - row.planned_s,
        "prompt": row.first_s - row.begun_s,
        "outbound": call.line_s[0] - row.first_s,
    }
    return {name: 1e3 * seconds for name, seconds in times.items()}


def host(log: EventLog) -> Row:
    """The engine's own work, milliseconds: from a result to the plan behind it (where plans wait,
    that too), from a plan until it was sent; the share of steps that were planned when the device
    had nothing more to do, and of those that were sent when it had done it."""
    plan_ms, send_ms, num_alone, num_late = list[float](), list[float](), 0, 0
    flying: set[int] = set()
    planned_s = sent_s = result_s = 0.0
    for event in log.events:
        if isinstance(event, Planned) and event.plan.scheduled:
            planned_s = event.now
            if result_s:
                plan_ms.append(1e3 * (planned_s - result_s))
            num_alone += not flying
            flying.add(event.plan.step_id)
        elif isinstance(event, Submitted):
            send_ms.append(1e3 * (event.now - planned_s))
            sent_s = event.now
        elif isinstance(event, Collected):
            num_late += len(flying) > 1 and event.now - sent_s < AT_ONCE_S
            flying.discard(event.step_id)
            result_s = event.now
    return {
        "result_to_plan_ms": quantiles(plan_ms),
        "plan_to_sent_ms": quantiles(send_ms),
        "nothing_in_flight": num_alone / max(1, len(send_ms)),
        "sent_late": num_late / max(1, len(send_ms)),
    }


def quantiles(values: Sequence[float]) -> Row:
    cut = statistics.quantiles(values, n=100)
    return {"mean": statistics.mean(values), "p50": cut[49], "p90": cut[89], "p99": cut[98]}


def steps(log: EventLog) -> list[Row]:
    """By what they computed: how often, as long as they were, and as priced; milliseconds."""
    pricer = Pricer(read_setup(log.header.setup))
    groups: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    plans: dict[int, Planned] = {}
    free_at = 0.0
    for event in log.events:
        if isinstance(event, Planned) and event.plan.scheduled:
            plans[event.plan.step_id] = event
        elif isinstance(event, Collected):
            planned = plans.pop(event.step_id)
            took = event.now - max(free_at, planned.now)
            was_free = planned.now > free_at
            free_at = event.now
            prompts = sum(e.num_tokens for e in planned.plan.scheduled if e.num_tokens > 1)
            name = "decode" if not prompts else f"prompts of {-(-prompts // 64) * 64} tokens"
            name += ", nothing before it" if was_free else ""
            priced = pricer.seconds(planned.plan.shape)
            groups[name].append((took, priced, len(planned.plan.scheduled)))
    return [
        {
            "steps": name,
            "number": len(rows),
            "rows": statistics.mean(n for _, _, n in rows),
            "ms": 1e3 * statistics.mean(took for took, _, _ in rows),
            "ms_p50": 1e3 * statistics.median(took for took, _, _ in rows),
            "priced_ms": 1e3 * statistics.mean(priced for _, priced, _ in rows),
        }
        for name, rows in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]


# ---------------------------------------------------------------------- one row


def cpu_times(processes: Mapping[str, psutil.Process]) -> dict[str, float]:
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def family() -> dict[str, psutil.Process]:
    """Client, HTTP and engine."""
    me = psutil.Process(os.getpid())
    http = next(p for p in me.children() if "serve" in p.cmdline())
    engine = next(p for p in http.children() if any("engine_process" in w for w in p.cmdline()))
    return {"client": me, "http": http, "engine": engine}


def measured(
    work: ModuleType, url: str, args: argparse.Namespace, log_file: Path, seed: int, began: float
) -> Row:
    people = family()
    before, started = cpu_times(people), time.monotonic()
    calls = asyncio.run(load(work, url, args.serve, args.serve_sizes, seed))
    wall = time.monotonic() - started
    used = {name: (now - before[name]) / wall for name, now in cpu_times(people).items()}
    time.sleep(0.5)
    log = since(read_event_log(log_file), began)
    found, looks = looked_at(log)
    rows = [parts(call, found[tuple(call.prompt)], looks) for call in calls]
    ttft = [1e3 * (call.line_s[0] - call.sent_s) for call in calls]
    itl = [1e3 * (b - a) for call in calls for a, b in pairwise(call.line_s)]
    return {
        "seed": seed,
        "ttft_ms": spread(work, ttft),
        "itl_ms": spread(work, itl),
        "parts_ms": {name: spread(work, [row[name] for row in rows]) for name in PARTS},
        "slowest": slowest(rows, ttft),
        "steps": steps(log),
        "host": host(log),
        "plans_ahead_s": plans_ahead_s(log),
        "num_mixed_tokens": log.header.max_num_mixed_tokens,
        "predicted_over_measured": simulate(log).errors(),
        "cpu_cores_used": used,
        "requests": [[round(row[name], 3) for name in PARTS] for row in rows],
    }


def since(log: EventLog, began: float) -> EventLog:
    """What happened after `began`, when nothing was in flight."""
    return EventLog(log.header, [event for event in log.events if event.now >= began])


def spread(work: ModuleType, values: Sequence[float]) -> Row:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    figures = {name: work.pct(values, share) for name, share in shares.items()}
    return {"mean": statistics.mean(values)} | figures


def slowest(rows: Sequence[Mapping[str, float]], ttft: Sequence[float]) -> Row:
    """The means of the parts among the slowest twentieth."""
    order = sorted(range(len(rows)), key=lambda i: -ttft[i])[: max(1, len(rows) // 20)]
    return {name: statistics.mean(rows[i][name] for i in order) for name in PARTS}


def say(row: Row) -> None:
    print(f"seed {row['seed']}")
    for name in ("ttft_ms", "itl_ms"):
        print(f"  {name:9} {' '.join(f'{k} {v:6.2f}' for k, v in row[name].items())}")
    for name, values in row["parts_ms"].items():
        figures = " ".join(f"{k} {v:6.2f}" for k, v in values.items())
        print(f"  {name:9} {figures}   slowest {row['slowest'][name]:6.2f}")
    for step in row["steps"][:10]:
        print(
            f"  {step['number']:5} x {step['rows']:5.1f} rows {step['ms']:7.3f} ms "
            f"(p50 {step['ms_p50']:.3f}), priced {step['priced_ms']:7.3f}: {step['steps']}"
        )
    for name, values in row["host"].items():
        print(f"  {name}: {values}")
    print(f"  steps with prompts bounded at {row['num_mixed_tokens']} tokens")
    print(f"  plans before the step ahead is over, s: {row['plans_ahead_s']}")
    errors = ", ".join(f"{k} {v:+.2f}" for k, v in row["predicted_over_measured"].items())
    print(f"  simulated over measured: {errors}")
    print("  cores used: " + ", ".join(f"{k} {v:.2f}" for k, v in row["cpu_cores_used"].items()))


def parser() -> argparse.ArgumentParser:
    found = command(__doc__)
    add = found.add_argument
    add("--serve", type=float, required=True, metavar="RATE")
    add("--serve-sizes", type=numbers, default=[512, 512, 128], help="requests, prompt, output")
    add("--seeds", type=numbers, default=[7, 8], help="of arrivals, a load each; the first is cold")
    add_engine(found.add_argument_group("engine, as of EngineConfig"))
    return found


def main() -> None:
    args = parser().parse_args()
    args.mixed_sizes, args.prefix_sizes = [1, 1, 1], [1, 1, 1, 1]  # of other workloads
    work = load_workloads(args)
    about = apart(environment) | {"model": Path(args.model).resolve().name, "rate": args.serve}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        log_file = Path(folder) / "log"
        with served(args.model, engine_options(args) | {"event_log": log_file}) as url:
            for seed in args.seeds:
                rows.append(measured(work, url, args, log_file, seed, time.monotonic()))
                say(rows[-1])
                Path(args.out).write_text(json.dumps(about | {"rows": rows}) + "\n")


if __name__ == "__main__":
    main()
