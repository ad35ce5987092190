"""Is a busy machine told from a quiet one, by what the system and the driver say?"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ridgeline.devices.gpu_state import IDLE, LIBRARY, GpuReader, GpuState
from ridgeline.measure import disturbance
from ridgeline.measure.disturbance import Disturbance, Processors, Watcher, read_processors


def seen(others_s: float, own_s: float) -> Disturbance:
    """Of ten seconds of two processors."""
    readings = iter([Processors(50.0, 9.0, 5.0), Processors(70.0, 9 + others_s + own_s, 5 + own_s)])
    return Watcher(read=lambda: next(readings)).done()


def test_what_this_process_computes_is_no_disturbance() -> None:
    assert seen(others_s=0.5, own_s=19.5).reasons() == ()
    busy = seen(others_s=12.0, own_s=8.0)
    assert busy.others == pytest.approx(0.6)
    assert busy.caveat().startswith("calibrated on a busy machine: other programs used ")


def test_a_system_that_does_not_say() -> None:
    found = Watcher(read=lambda: None).done()
    assert (found.others, found.reasons(), found.caveat()) == (None, (), "")
    assert Watcher(read=lambda: None).done(0.4).reasons() == (
        "the median repeat of a measurement took 40 % longer",
    )


def test_the_system_is_read(tmp_path: Path) -> None:
    stat, tick = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    stat.write_text("cpu  300 100 50 1000 40 0 5 5 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    found = read_processors(stat)
    assert found is not None
    assert (found.all_s * tick, found.busy_s * tick) == pytest.approx((1500, 460))
    assert found.own_s > 0
    stat.write_text("cpu  a lot\n")
    assert read_processors(stat) is None
    assert read_processors(tmp_path / "none") is None


# ---------------------------------------------------------------------- a GPU


class FakeLibrary:
    """One GPU; `reasons` as the driver's bits."""

    def __init__(self, reasons: int = 0, processes: int = 1) -> None:
        self.reasons, self.processes = reasons, processes

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetUtilizationRates(self, handle: Any, used: Any) -> int:
        used._obj.gpu = 25
        return 0

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int, clock: Any) -> int:
        clock._obj.value = 1305
        return 0

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: int, clock: Any) -> int:
        clock._obj.value = 1980
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, reasons: Any) -> int:
        reasons._obj.value = self.reasons
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, number: Any, all: Any) -> int:
        number._obj.value = self.processes
        return 7


def test_the_driver_is_read() -> None:
    found = GpuReader("GPU-1", FakeLibrary(reasons=0x4, processes=2)).read()
    assert found == GpuState(0.25, 2, 1305, 1980, "the power limit", is_idle=False)
    idle = GpuReader("GPU-1", FakeLibrary(IDLE)).read()
    assert idle is not None
    assert (idle.held_by, idle.is_idle) == ("", True)
    assert GpuReader("GPU-2", FakeLibrary()).read() is None
    assert GpuReader("GPU-1", object()).read() is None


def test_without_a_driver_there_is_nothing_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> ctypes.CDLL:
        assert name == LIBRARY
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", none)
    assert GpuReader("GPU-1").read() is None


class Readings(GpuReader):
    """These states, one after the other; waits for nobody."""

    def __init__(self, states: list[GpuState]) -> None:
        self._states: Iterator[GpuState] = iter(states)

    def read(self) -> GpuState | None:
        return next(self._states, None)


def test_others_on_a_gpu_and_a_clock_that_is_held_down(monkeypatch: pytest.MonkeyPatch) -> None:
    free = GpuState(0.0, 1, 1980, 1980, "", is_idle=False)
    held = GpuState(0.9, 1, 1305, 1980, "the power limit", is_idle=False)
    idle = GpuState(0.0, 1, 345, 1980, "", is_idle=True)

    def words(*states: GpuState) -> tuple[str, ...]:
        watcher = Watcher(Readings([states[0]]), lambda: None)
        watcher.stop()
        watcher._states += states[1:]
        return watcher.done().reasons()

    monkeypatch.setattr(disturbance, "EVERY_S", 60.0)
    assert words(free, free, free, held, idle, idle) == ()
    assert words(free, held, held, free, idle) == (
        "the power limit held the GPU's clock down in 67 % of the readings, to 1305 of 1980 MHz",
    )
    assert words(GpuState(0.5, 0, 1980, 1980, "", is_idle=False), free) == (
        "others kept the GPU busy 50 % of the time",
    )
    assert words(free, GpuState(0.0, 3, 1980, 1980, "", is_idle=False)) == (
        "2 other processes computed on the GPU",
    )
