"""How fast does this device really read its memory? The ceiling that decoding is held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

CPU_BYTES = 256 << 20  # well above any cache
CUDA_BYTES = 2 << 30
REPEATS = 7


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second; a copy counts what it reads and what it writes."""

    device: str
    read_bytes_per_s: float
    copy_bytes_per_s: float
    buffer_bytes: int
    threads: int


def measure_bandwidth(device: torch.device, num_bytes: int | None = None) -> Bandwidth:
    """Best of a few passes over `num_bytes` of memory, in well under a second per pass.

    Reading is the faster of a sum and a maximum over the buffer; each touches every byte once.
    """
    size = num_bytes or (CUDA_BYTES if device.type == "cuda" else CPU_BYTES)
    source = torch.zeros(size // 4, dtype=torch.float32, device=device)
    source.uniform_()  # pages that were never written to may all be one page
    target = torch.empty_like(source)
    read = min(_best(device, source.sum), _best(device, source.amax))
    copy = _best(device, lambda: target.copy_(source))
    used = source.numel() * 4
    return Bandwidth(str(device), used / read, 2 * used / copy, used, torch.get_num_threads())


def _best(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of the fastest of several passes."""
    work()
    return min(_timed(device, work) for _ in range(REPEATS))


def _timed(device: torch.device, work: Callable[[], object]) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1e3
