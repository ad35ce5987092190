"""Did anybody else use the machine while it was measured, and was it held back?"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import torch

from ridgeline.devices.gpu_state import GpuReader, GpuState
from ridgeline.figures import number, percent

STAT = Path("/proc/stat")
NOT_BUSY = (3, 4)  # columns of it: idle, and idle while a disk works
LOOK_S = 0.5  # before anything is measured
EVERY_S = 1.0  # between two readings of a GPU
OTHERS = 0.1  # of the processors, or of a GPU before its work begins: more is called busy
HELD = 0.5  # of the readings of a GPU's clock at work: more is called held down
SPREAD = 0.25  # of the median repeat over the undisturbed one: more is called unsteady


@dataclass(frozen=True, slots=True)
class Processors:
    """Seconds since the machine and this process began: of all processors, of them busy, and of
    them for this process and its children."""

    all_s: float
    busy_s: float
    own_s: float


def read_processors(stat: Path = STAT) -> Processors | None:
    """None where the system does not say."""
    try:
        words = stat.read_text(encoding="utf-8").split("\n", 1)[0].split()
        ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in words[1:9]]
    except (OSError, ValueError):
        return None
    own = os.times()
    waiting = sum(ticks[i] for i in NOT_BUSY)
    return Processors(sum(ticks), sum(ticks) - waiting, sum(own[:4]))


@dataclass(frozen=True, slots=True)
class Disturbance:
    """`others`: share of the processors that others used; None: not known. `num_processors` there
    are. `spread`: how much longer the median repeat of a measurement took than an undisturbed one.
    Of a GPU: how many other processes computed on it, how busy it was before the work began, and
    in which share of the readings its clock was held down, mostly by `held_by`."""

    others: float | None = None
    num_processors: int = 0
    spread: float = 0.0
    gpu_processes: int = 0
    gpu_busy: float = 0.0
    held: float = 0.0
    held_by: str = ""
    lowest_mhz: int = 0
    max_mhz: int = 0

    def reasons(self) -> tuple[str, ...]:
        """What disturbed, for a person; () where nothing did."""
        found = []
        if self.others is not None and self.others > OTHERS:
            used = number(self.others * self.num_processors)
            found.append(f"other programs used {used} of {self.num_processors} processors")
        if self.gpu_processes:
            many = "es" if self.gpu_processes > 1 else ""
            found.append(f"{self.gpu_processes} other process{many} computed on the GPU")
        elif self.gpu_busy > OTHERS:
            found.append(f"others kept the GPU busy {percent(self.gpu_busy, 0)} of the time")
        if self.held > HELD:
            found.append(
                f"{self.held_by} held the GPU's clock down in {percent(self.held, 0)} of the "
                f"readings, to {self.lowest_mhz} of {self.max_mhz} MHz"
            )
        if self.spread > SPREAD:
            found.append(
                f"the median repeat of a measurement took {percent(self.spread, 0)} longer"
            )
        return tuple(found)

    def caveat(self) -> str:
        """What later commands say of a calibration that was made so."""
        reasons = self.reasons()
        return f"calibrated on a busy machine: {'; '.join(reasons)}" if reasons else ""


class Watcher:
    """Watches from when it is made until `done`."""

    def __init__(
        self, gpu: GpuReader | None = None, read: Callable[[], Processors | None] | None = None
    ) -> None:
        self._read, self._gpu = read or read_processors, gpu
        self._begun = self._read()
        self._before = gpu.read() if gpu is not None else None
        self._states: list[GpuState] = []
        self._over = Event()
        self._thread = Thread(target=self._look, name="watch", daemon=True)
        if self._before is not None:
            self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(EVERY_S):
            if self._gpu is not None and (state := self._gpu.read()) is not None:
                self._states.append(state)

    def done(self, spread: float = 0.0) -> Disturbance:
        self.stop()
        others, number_of = self._others()
        worked = [state for state in self._states if not state.is_idle]
        held = Counter(state.held_by for state in worked if state.held_by)
        return Disturbance(
            others,
            number_of,
            spread,
            max((state.num_processes - 1 for state in self._states), default=0),
            self._before.busy_share if self._before is not None else 0.0,
            sum(held.values()) / len(worked) if worked else 0.0,
            held.most_common(1)[0][0] if held else "",
            min((state.clock_mhz for state in worked), default=0),
            max((state.max_clock_mhz for state in worked), default=0),
        )

    def stop(self) -> None:
        """Look no more; a second time this does nothing."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _others(self) -> tuple[float | None, int]:
        now, begun = self._read(), self._begun
        if now is None or begun is None or now.all_s <= begun.all_s:
            return None, 0
        busy_s, own_s = now.busy_s - begun.busy_s, now.own_s - begun.own_s
        share = max(0.0, busy_s - own_s) / (now.all_s - begun.all_s)
        return share, os.cpu_count() or 1


def watch(device: torch.device) -> Watcher:
    """Watches the host, and the GPU where `device` is one."""
    if device.type != "cuda":
        return Watcher()
    return Watcher(GpuReader(f"GPU-{torch.cuda.get_device_properties(device).uuid}"))


def look_around() -> tuple[str, ...]:
    """A moment, before anything is measured: why the machine is busy; () where it is not."""
    watcher = Watcher()
    time.sleep(LOOK_S)
    return watcher.done().reasons()
