"""Where do figures of a CPU stand that are still true? One list of rows in one file.

A row is {workload, metric, value, peer, peer_value, goal, date, device, commit, low, high}; a new
one takes the place of the one with its workload and metric, all others stay.
"""

from __future__ import annotations

import gzip
import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

LATEST = Path(__file__).parent / "results" / "latest.json"
Row = dict[str, Any]


def row(
    workload: str,
    metric: str,
    values: Sequence[float],
    *,
    commit: str,
    peer: str | None = None,
    peer_values: Sequence[float] = (),
    goal: float | None = None,
) -> Row:
    """Medians of what was taken in turns."""
    return {
        "workload": workload,
        "metric": metric,
        "value": statistics.median(values),
        "peer": peer if peer_values else None,
        "peer_value": statistics.median(peer_values) if peer_values else None,
        "goal": goal,
        "date": datetime.now(UTC).date().isoformat(),
        "device": device(),
        "commit": commit,
        "low": min(values),
        "high": max(values),
    }


def merge(rows: Sequence[Row], path: Path = LATEST) -> None:
    """Put the rows into the file, each in the place of the one that it renews."""
    found: list[Row] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    new = {(r["workload"], r["metric"]): r for r in rows}
    kept = [new.pop((r["workload"], r["metric"]), r) for r in found]
    text = json.dumps([*kept, *new.values()], indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def show(rows: Sequence[Row]) -> None:
    print("| workload | value | low to high | peer | goal |\n|---|---|---|---|---|")
    for r in rows:
        peer = f"{r['peer']} {r['peer_value']:.4g}" if r["peer"] else ""
        goal = "" if r["goal"] is None else f"{r['goal']:.4g}"
        told = f"{r['value']:.4g} {r['metric']} | {r['low']:.4g} to {r['high']:.4g}"
        print(f"| {r['workload']} | {told} | {peer} | {goal} |")


def write_raw(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One JSON object a line, packed."""
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def device() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, 2 threads"
    return f"{platform.machine()}, 2 threads"
