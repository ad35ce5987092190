"""How fast is this machine really? Measures, fits and writes down; minutes, not hours."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ridgeline.benchmark.environment import environment
from ridgeline.cost.constants import HostConstants
from ridgeline.cost.fit import Fit, Point, fit
from ridgeline.cost.hardware import Device
from ridgeline.cost.setup import DTYPE_BYTES
from ridgeline.devices import Device as OpenDevice
from ridgeline.devices import open_device
from ridgeline.errors import ConfigError
from ridgeline.kernels import nvrtc
from ridgeline.kernels.launching import has_warpgroup_products
from ridgeline.kernels.tiles import own_products
from ridgeline.kernels.untuned_tiles import LEAST
from ridgeline.measure.disturbance import Disturbance, watch
from ridgeline.measure.host import draft_seconds, host_seconds, line_through
from ridgeline.measure.machine import Bandwidth, figures, last_cache_bytes, measure_bandwidth
from ridgeline.measure.models import Grid, grid_for
from ridgeline.measure.points import Effort, Progress, Session
from ridgeline.measure.stopwatch import open_stopwatch, typical
from ridgeline.records import record_of

OPERATOR_S = {"cpu": 0.12, "cuda": 0.03}  # of measuring one point, both rounds
QUICK_OPERATOR_S = {"cpu": 0.04, "cuda": 0.02}
COLD_CACHES = 4  # last caches' worth of other weights between two uses of one
LAUNCHES = 1000


@dataclass(frozen=True, slots=True)
class Question:
    """What to calibrate: a device name, dtypes (none: what the engine uses there), threads."""

    device: str = "auto"
    dtypes: tuple[str, ...] = ()
    threads: int | None = None
    is_quick: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """`record` is what is written down; `device`, `fit` and `disturbance` are what it says."""

    device: Device
    fit: Fit
    record: dict[str, Any]
    disturbance: Disturbance


def calibrate(question: Question, progress: Progress) -> Answer:
    """Measure the machine. Raises ConfigError for a device or dtype that is not there."""
    opened = open_device(question.device)
    grid = grid_for(opened.torch_device.type, is_quick=question.is_quick)
    return calibrate_on(opened, grid, question, progress)


def calibrate_on(opened: OpenDevice, grid: Grid, question: Question, progress: Progress) -> Answer:
    """The same over any grid."""
    there = opened.torch_device
    dtypes = _dtypes(question, opened)
    before = torch.get_num_threads()
    threads = question.threads or before
    torch.set_num_threads(threads)
    watcher = watch(there)
    try:
        first = measure_bandwidth(there)
        session = _session(opened, grid, question, dtypes, threads, progress)
        session.run()
        bandwidth = _better(first, measure_bandwidth(there))
        launch_s = launch_seconds(there)
        hosts = _hosts(grid.hosts, progress)
        choice_s, token_s = draft_seconds()
        disturbance = watcher.done(session.spread)
    finally:
        watcher.stop()
        torch.set_num_threads(before)
    place = environment(there)
    device = figures(
        opened,
        place.device_name,
        threads,
        _peaks(session.points),
        max(bandwidth.read_bytes_per_s, _fastest_pass(session.points)),
    )
    progress("fitting", 0, 1)
    c0_s, c1_s = line_through(hosts)
    is_cuda = there.type == "cuda"
    host = HostConstants(
        c0_s,
        c1_s,
        overlapped=is_cuda,
        choice_s=choice_s if session.choice_s is None else session.choice_s,
        token_s=token_s,
        begin_s=session.begin_s,
        look_s=session.look_s,
    )
    found = fit(session.points, device, host)
    progress("fitting", 1, 1)
    known = replace(
        found.calibration,
        own_products=session.own_products,
        own_least=session.own_least,
        caveat=disturbance.caveat(),
    )
    found = replace(found, calibration=known)
    found = _dated(found, place.packages | {"ridgeline": place.ridgeline}, place.date)
    about = {
        "device_name": place.device_name,
        "system": place.system,
        "python": place.python,
        "commit": place.commit,
        "threads": threads,
        "quick": question.is_quick,
        "read_bytes_per_s": bandwidth.read_bytes_per_s,
        "copy_bytes_per_s": bandwidth.copy_bytes_per_s,
        "launch_s": launch_s,
        "host_step_s": {str(rows): seconds for rows, seconds in hosts},
        "disturbance": asdict(disturbance),
    }
    return Answer(device, found, record_of(found, device, about), disturbance)


def _session(
    opened: OpenDevice,
    grid: Grid,
    question: Question,
    dtypes: tuple[str, ...],
    threads: int,
    progress: Progress,
) -> Session:
    kind = opened.torch_device.type
    seconds = (QUICK_OPERATOR_S if question.is_quick else OPERATOR_S)[kind]
    return Session(
        opened,
        open_stopwatch(opened.torch_device, threads),
        Effort(grid, dtypes, seconds),
        COLD_CACHES * last_cache_bytes(opened),
        threads,
        progress,
        _own_products(opened, dtypes),
        LEAST if has_warpgroup_products(opened.torch_device) and nvrtc.available() else 0,
        last_cache_bytes(opened) if kind == "cuda" else 0,
    )


def _own_products(opened: OpenDevice, dtypes: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    if opened.torch_device.type != "cuda":
        return ()
    name = torch.cuda.get_device_name(opened.torch_device)
    found = {sizes for dtype in dtypes for sizes in own_products(name, dtype)}
    return tuple(sorted(found))


def _dtypes(question: Question, opened: OpenDevice) -> tuple[str, ...]:
    for dtype in question.dtypes:
        if dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise ConfigError(f"unknown dtype {dtype!r}; choose among {known}")
    if question.dtypes:
        return tuple(dict.fromkeys(question.dtypes))
    if opened.torch_device.type == "cpu":
        return ("float32", "bfloat16")
    return (opened.best_dtype,)


def _hosts(batches: Sequence[int], progress: Progress) -> list[tuple[int, float]]:
    found = []
    for done, batch in enumerate(batches):
        progress("the engine without its device", done, len(batches))
        found.append((batch, host_seconds(batch)))
    progress("the engine without its device", 1, 1)
    return found


def _better(one: Bandwidth, other: Bandwidth) -> Bandwidth:
    """Whoever disturbs makes it slower."""
    return one if one.read_bytes_per_s > other.read_bytes_per_s else other


def _peaks(points: Sequence[Point]) -> dict[str, float]:
    """The fastest product of each dtype, FLOP/s."""
    peaks: dict[str, float] = {}
    for point in points:
        if point.what == "matmul":
            rate = point.ops[0].flops / point.seconds
            peaks[point.dtype] = max(peaks.get(point.dtype, 0.0), rate)
    return peaks


def _fastest_pass(points: Sequence[Point]) -> float:
    """Bytes per second of the product with one row that reads its weights fastest."""
    single = [p for p in points if p.what == "matmul" and p.ops[0].m == 1]
    return max((p.ops[0].weight_bytes / p.seconds for p in single), default=0.0)


def launch_seconds(device: torch.device) -> float:
    """What the host spends to send off one small operator."""
    x = torch.zeros(8, device=device)
    rounds = []
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(LAUNCHES // 5):
            x.add_(1.0)
        rounds.append((time.perf_counter() - started) / (LAUNCHES // 5))
    return typical(rounds)


def _dated(found: Fit, versions: dict[str, str], date: str) -> Fit:
    calibration = replace(found.calibration, versions=versions, date=date)
    return replace(found, calibration=calibration)
