"""Is the time of a step on the device alone that of the device, whatever the host does?"""

from __future__ import annotations

import pytest
import torch

from ridgeline.measure.stopwatch import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    DeviceTimer,
    open_device_timer,
)
from tests.measure.timeline import Timeline


def test_a_slow_host_is_not_seen() -> None:
    there = Timeline()
    timer = DeviceTimer(there)
    for host_s in (1e-6, 1e-5, 3e-5):  # without a pause the device would wait for the last two
        assert timer.send(lambda h=host_s: there.send(50, h, 3e-6)) is None  # type: ignore[misc]
        assert timer.take() == pytest.approx(150e-6)
        assert there.now >= there.busy_until  # it was waited for
    assert there.pauses == [FIRST_PAUSE_S] * 3


def test_what_was_sent_too_late_has_no_time_and_the_next_pause_is_longer() -> None:
    there = Timeline()
    timer = DeviceTimer(there)
    found = []
    for _ in range(4):
        timer.send(lambda: there.send(50, 1.2 * 2 * FIRST_PAUSE_S / 50, 3e-6))
        found.append(timer.take())
        there.now += 1.0
    assert found[:2] == [None, None]
    assert found[2:] == pytest.approx([150e-6] * 2)
    assert there.pauses == [FIRST_PAUSE_S * n for n in (1, 2, 4, 4)]


def test_a_hopeless_host_does_not_make_pauses_endless() -> None:
    there = Timeline()
    timer = DeviceTimer(there)
    for _ in range(20):
        timer.send(lambda: there.send(1, 1.0, 1e-6))
        assert timer.take() is None
    assert max(there.pauses) == LONGEST_PAUSE_S


def test_the_answer_is_handed_on_and_a_time_is_taken_once() -> None:
    there = Timeline()
    timer = DeviceTimer(there)
    assert timer.take() is None
    assert timer.send(lambda: "tokens") == "tokens"
    assert timer.take() == pytest.approx(0.0)
    assert timer.take() is None


def test_a_cpu_has_no_clock_of_its_own() -> None:
    assert open_device_timer(torch.device("cpu")) is None
