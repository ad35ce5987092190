"""How fast and at what power does the card run while something is measured?

`nvidia-smi` is asked every 20 ms; it only reads. A card that reaches its power limit lowers the
clock of its multiprocessors, so that products take longer than their operations at full clock say.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import Any

EVERY_MS = 20
FIELDS = "clocks.sm,clocks.mem,power.draw.instant,temperature.gpu,clocks_event_reasons.active"
IDLE, POWER_LIMIT = 0x1, 0x4  # bits of why the clock is what it is (NVML)


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """Fills the dictionary, at the end, with `figures` of what was seen; empty without the tool."""
    seen: dict[str, Any] = {}
    if shutil.which("nvidia-smi") is None:
        yield seen
        return
    asked = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits", "--id=0"]
    with TemporaryFile("w+") as told:  # a pipe that nobody reads would be full after 20 s
        process = subprocess.Popen([*asked, f"--loop-ms={EVERY_MS}"], stdout=told)
        try:
            yield seen
        finally:
            process.terminate()
            process.wait()
            told.seek(0)
            seen.update(figures(told))


def figures(lines: Iterable[str]) -> dict[str, Any]:
    """Of samples while the card had work: tenth, half and nine tenths of clock and power, and the
    share of them in which the power limit held the clock down. Half-written lines are left out."""
    samples = []
    for line in lines:
        parts = [part.strip() for part in line.split(",")]
        try:
            mhz, memory_mhz, watts, celsius = (float(part) for part in parts[:4])
            why = int(parts[4], 16)
        except (ValueError, IndexError):
            continue
        if not why & IDLE:
            samples.append((mhz, memory_mhz, watts, celsius, bool(why & POWER_LIMIT)))
    if len(samples) < 2:
        return {"samples": len(samples)}
    clocks, memory, watts_, heat, limited = zip(*samples, strict=True)
    return {
        "samples": len(samples),
        "sm_mhz": tenths(clocks),
        "memory_mhz": statistics.median(memory),
        "watts": tenths(watts_),
        "celsius": max(heat),
        "power_limited": sum(limited) / len(limited),
    }


def tenths(values: Iterable[float]) -> list[float]:
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return [cuts[0], cuts[4], cuts[8]]


def sentence(seen: Mapping[str, Any]) -> str:
    """The middle of it, for people; empty where too little was seen."""
    if "sm_mhz" not in seen:
        return ""
    mhz, watts, limited = seen["sm_mhz"][1], seen["watts"][1], seen["power_limited"]
    return f", {mhz:.0f} MHz, {watts:.0f} W ({limited:.0%} of the time at the limit)"
