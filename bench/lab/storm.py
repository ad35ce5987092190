"""What do readers who ask the lab without pause cost the engine beside it?

python -m bench.lab.storm [--tabs 64] [--seconds 30] [--out FILE]

One request after the other is streamed from `ridgeline serve --lab`, whose engine has one thread,
without and with the tabs, in turn. Told are the times between two pieces of it (a step may give
several tokens, as it verifies drafts), what the tabs got, and the share of a processor that the
server's process took. Tabs are a process of their own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import httpx

from bench.lab.pages import BODY, started

TURNS = 2  # without and with tabs, in turn
LONG = ("serving", "design_challenges")  # pages whose answers take seconds
SHORT = ("memory_wall", "kv_growth", "attention_variants", "estimator")
TABS = """
import asyncio, collections, json, sys, time, httpx
url, num, seconds, pages = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4].split(",")
async def tab(http, i, seen):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            reply = await http.post(f"/lab/api/{pages[i % len(pages)]}", json={})
            seen[str(reply.status_code)] += 1
        except httpx.HTTPError as fault:
            seen[type(fault).__name__] += 1
async def main():
    seen = collections.Counter()
    async with httpx.AsyncClient(base_url=url, timeout=10, limits=httpx.Limits()) as http:
        await asyncio.gather(*(tab(http, i, seen) for i in range(num)))
    print(json.dumps(seen))
asyncio.run(main())
"""


def gaps_ms(url: str, seconds: float) -> list[float]:
    """Between two pieces of text of a client that asks again as soon as it has its answer."""
    until, found = time.perf_counter() + seconds, list[float]()
    while time.perf_counter() < until:
        said = [{"role": "user", "content": "Tell me a story"}]
        body = BODY | {"messages": said, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as reply:
            times = [time.perf_counter() for line in reply.iter_lines() if '"content"' in line]
        found += [1e3 * (late - early) for early, late in itertools.pairwise(times)]
    return found


def cpu_s(url: str) -> float:
    """That the process of the HTTP side has taken."""
    told = httpx.get(f"{url}/metrics").text
    (line,) = re.findall(r'process_cpu_seconds_total\{.*process="server".*\} (\S+)', told)
    return float(line)


def turn(url: str, num_tabs: int, seconds: float) -> dict[str, Any]:
    words = [sys.executable, "-c", TABS, url, str(num_tabs), str(seconds), ",".join(LONG + SHORT)]
    began, cpu = time.perf_counter(), cpu_s(url)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as tabs:
        found = gaps_ms(url, seconds)
        took, used = time.perf_counter() - began, cpu_s(url) - cpu
        replies = json.loads(tabs.communicate()[0])
    return {
        "tabs": num_tabs,
        "pieces": len(found),
        "median_ms": round(statistics.median(found), 2),
        "p99_ms": round(statistics.quantiles(found, n=100)[-1], 2),
        "server_cpu_share": round(used / took, 3),
        "replies": replies,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tabs", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with started("serve", "--lab", "--port", "0", "--threads", "1") as url:
        while httpx.get(f"{url}/health/ready").status_code != 200:
            time.sleep(0.2)
        gaps_ms(url, 2)
        turns = []
        for num_tabs in (0, args.tabs) * TURNS:
            turns.append(turn(url, num_tabs, args.seconds))
            print(json.dumps(turns[-1]), flush=True)
    told = {"date": str(date.today()), "processors": os.cpu_count(), "load_before": round(load, 1)}
    if args.out:
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(json.dumps(told | {"turns": turns}, indent=2) + "\n")


if __name__ == "__main__":
    main()
