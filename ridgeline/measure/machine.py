"""What is the machine one stands on, in the words of the catalogue; how fast is its memory?

A GPU that the catalogue knows keeps its data sheet, so that a calibration made here serves wherever
that name is asked for. Everything else gets figures that were measured: the fastest product and the
fastest pass over memory that anybody has seen on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ridgeline.cost.hardware import Device, catalogue
from ridgeline.cost.setup import DTYPE_BYTES, SHORT
from ridgeline.costing import device_key
from ridgeline.devices import Device as OpenDevice
from ridgeline.devices import open_device
from ridgeline.kernels.cpu.native import level
from ridgeline.measure.stopwatch import open_stopwatch

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


CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
CPU_CACHE_BYTES = 32 << 20  # where the system does not say
GPU_CACHE_BYTES = 50 << 20
PROBE_SIZE = {"cpu": 1024, "cuda": 8192}  # rows and columns of the product that shows the peak
PROBE_S = 0.15
PCIE_BYTES_PER_S = 25e9  # of a GPU that nobody knows


def figures(
    device: OpenDevice, name: str, threads: int, peaks: Mapping[str, float], bytes_per_s: float
) -> Device:
    """The device with what was measured of it: FLOP/s by dtype ("bf16"), bytes read a second."""
    key = device_key(device, name, threads)
    if (known := catalogue().get(key)) is not None:
        return replace(known, memory_bytes=device.memory_total(), measured=True)
    is_cpu = device.torch_device.type == "cpu"
    says = "measured here by ridgeline calibrate"
    host = bytes_per_s if is_cpu else PCIE_BYTES_PER_S
    return Device(
        name=key,
        label=f"{name}, {threads} threads" if is_cpu else name,
        kind="cpu" if is_cpu else "gpu",
        peak_flops=dict(peaks),
        memory_bytes=device.memory_total(),
        bandwidth=bytes_per_s,
        l2_bytes=last_cache_bytes(device),
        link=None,
        host_link_bytes_per_s=host,
        network_bytes_per_s=1.25e9,
        watts=0.0,
        all_in_kw=None,
        prices=(),
        sources={
            "peak_flops": f"{says}: the fastest product",
            "bandwidth": f"{says}: the fastest pass over memory",
            "memory_bytes": "what the system reports",
            "l2_bytes": "what the system reports",
            "link": "none assumed",
            "host_link_bytes_per_s": "the same memory" if is_cpu else "assumed",
            "network_bytes_per_s": "assumed: one 10 GbE port",
            "watts": "not known",
        },
        vendor="unknown",
        measured=True,
    )


def key_here(device: str = "auto", threads: int | None = None) -> str:
    """What the records of this machine's device are called."""
    opened = open_device(device)
    name = opened.describe()
    return device_key(opened, name, threads or torch.get_num_threads())


def measured_here(device: str = "auto", threads: int | None = None) -> Device:
    """The machine one stands on, measured in seconds."""
    opened = open_device(device)
    name = opened.describe()
    return quick_figures(opened, name, threads or torch.get_num_threads())


def quick_figures(device: OpenDevice, name: str, threads: int) -> Device:
    """The device after a second or two of measuring; for those who have not calibrated."""
    peaks = {SHORT[dtype]: peak_flops(device, dtype) for dtype in DTYPE_BYTES}
    if device.torch_device.type == "cpu" and level() != "none":
        # The native kernels multiply bfloat16 as float32 where PyTorch has nothing faster.
        peaks["bf16"] = max(peaks["bf16"], peaks["fp32"])
    bandwidth = measure_bandwidth(device.torch_device)
    return figures(device, name, threads, peaks, bandwidth.read_bytes_per_s)


def peak_flops(device: OpenDevice, dtype: str) -> float:
    """FLOP/s of a large square product, the fastest of a few. The second matrix is transposed, as
    weights are: on processors without bfloat16 PyTorch is 20 times slower the other way."""
    there = device.torch_device
    size = PROBE_SIZE[there.type]
    if (there.type, dtype) == ("cpu", "float16"):
        size //= 4  # most processors have no unit for it and are a hundred times slower
    a, b = (
        torch.empty(size, size, dtype=getattr(torch, dtype), device=there).uniform_(-0.1, 0.1)
        for _ in range(2)
    )
    with torch.inference_mode():
        times = open_stopwatch(there, torch.get_num_threads()).times(
            lambda _: torch.nn.functional.linear(a, b), PROBE_S
        )
    return float(2 * size**3 / min(times))


def last_cache_bytes(device: OpenDevice) -> int:
    """The cache before memory, as the system reports it."""
    if device.torch_device.type == "cuda":
        properties = torch.cuda.get_device_properties(device.torch_device)
        return int(getattr(properties, "L2_cache_size", GPU_CACHE_BYTES))
    sizes = []
    for path in CPU_CACHES.glob("index*/size"):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text[:-1].isdigit() and text[-1] in "KM":
            sizes.append(int(text[:-1]) << (10 if text[-1] == "K" else 20))
    return max(sizes, default=CPU_CACHE_BYTES)
