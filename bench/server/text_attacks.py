"""What do another tenant's template and tokenizer bombs cost a bystander?

    python -m bench.server.text_attacks [--seconds 10] [--attackers 8] [--json]

Two servers, one whose chat template and one whose tokenizer is hostile (tests/server/bombs.py), on
the tests' fake device, so that the times are those of the HTTP side and of the text processes. The
bystander asks one short question after the other, and between them /health/live; the attackers come
from another address, so they are another tenant. The same seconds without and with them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from ridgeline.benchmark.run import percentile
from tests.server.bombs import (
    GROWTH,
    SLOW,
    TEMPLATES,
    write_template_bombs,
    write_tokenizer_bombs,
)
from tests.server.running import PATIENCE_S, Running, fake_config, running

ENGINE = {"max_model_len": 4096, "num_blocks": 2048}
CASES: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "template": (write_template_bombs, tuple(TEMPLATES)),
    "tokenizer": (write_tokenizer_bombs, (GROWTH, SLOW)),
}
PATHS = ("/health/live", "first token")


def client(server: Running, address: str) -> httpx.Client:
    transport = httpx.HTTPTransport(local_address=address)
    return httpx.Client(base_url=server.url, transport=transport, timeout=PATIENCE_S)


def first_token_s(http: httpx.Client) -> float:
    body = {"messages": [{"role": "user", "content": "how are you"}], "max_tokens": 4}
    began = time.monotonic()
    asked = {"model": "fake", "stream": True} | body
    with http.stream("POST", "/v1/chat/completions", json=asked) as reply:
        times = [
            time.monotonic() - began
            for line in reply.iter_lines()
            if '"content":"' in line and '"content":""' not in line
        ]
    if not times:
        raise SystemExit(f"no token came: {reply.status_code}")
    return times[0]


def watch(server: Running, seconds: float) -> dict[str, list[float]]:
    """What the bystander waits, in seconds."""
    waits: dict[str, list[float]] = {path: [] for path in PATHS}
    end = time.monotonic() + seconds
    with client(server, "127.0.0.2") as http:
        while time.monotonic() < end:
            began = time.monotonic()
            http.get("/health/live").raise_for_status()
            waits["/health/live"].append(time.monotonic() - began)
            waits["first token"].append(first_token_s(http))
    return waits


@contextmanager
def flood(server: Running, bombs: tuple[str, ...], attackers: int) -> Iterator[list[int]]:
    """Statuses of the bombs, while the block runs."""
    statuses: list[int] = []
    done, numbers = threading.Event(), count()

    def attack() -> None:
        with client(server, "127.0.0.3") as http:
            while not done.is_set():
                words = bombs[next(numbers) % len(bombs)]
                body = {"model": "fake", "messages": [{"role": "user", "content": words}]}
                statuses.append(http.post("/v1/chat/completions", json=body).status_code)

    threads = [threading.Thread(target=attack) for _ in range(attackers)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        done.set()
        for thread in threads:
            thread.join(PATIENCE_S)


def processes(server: Running) -> tuple[int, int]:
    """Text workers, and open files of the HTTP process."""
    fork_server = server.child_pid("text_process")
    children = Path(f"/proc/{fork_server}/task/{fork_server}/children").read_text().split()
    return len(children), server.num_fds()


def measure(name: str, seconds: float, attackers: int, folder: Path) -> dict[str, Any]:
    write, bombs = CASES[name]
    with running(fake_config(write(folder / name), {}, ENGINE), folder) as server:
        watch(server, 1.0)
        before = processes(server)
        quiet = watch(server, seconds)
        with flood(server, bombs, attackers) as statuses:
            loud = watch(server, seconds)
        time.sleep(1.0)
        after = processes(server)
    return {
        "bombs": len(statuses),
        "statuses": sorted(set(statuses)),
        "workers_and_files_before_and_after": [before, after],
        "ms": {
            path: {
                when: {f"p{p}": 1e3 * percentile(waits[path], p / 100) for p in (50, 99)}
                for when, waits in (("quiet", quiet), ("flood", loud))
            }
            for path in PATHS
        },
    }


def show(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: {found['bombs']} bombs, all answered {found['statuses']}; workers and files")
    print(f"  before and after: {found['workers_and_files_before_and_after']}")
    print(f"  {'ms':<14} {'quiet p50':>10} {'p99':>8} {'flood p50':>10} {'p99':>8} {'p99 more':>9}")
    for path, when in found["ms"].items():
        quiet, loud = when["quiet"], when["flood"]
        print(
            f"  {path:<14} {quiet['p50']:10.1f} {quiet['p99']:8.1f} {loud['p50']:10.1f}"
            f" {loud['p99']:8.1f} {loud['p99'] - quiet['p99']:9.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--attackers", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {n: measure(n, args.seconds, args.attackers, Path(folder)) for n in CASES}
    if args.json:
        print(json.dumps({"load": os.getloadavg(), "cases": found}, indent=2))
        return
    for name, row in found.items():
        show(name, row)


if __name__ == "__main__":
    main()
