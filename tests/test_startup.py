"""Do the named seconds of a start add up to all of it?"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.build import build
from ridgeline.clock import VirtualClock
from ridgeline.config import EngineConfig
from ridgeline.startup import (
    OTHER,
    Phase,
    Started,
    StartUp,
    process_age_s,
    say_first_token,
    say_phases,
    total_s,
)


def test_phases_and_the_rest_are_the_whole() -> None:
    clock = VirtualClock()
    start = StartUp(clock)
    with start.phase("one") as opened:
        clock.advance_to(2.0)
        opened.detail = "of two"
    clock.advance_to(2.5)
    with start.phase("two"):
        clock.advance_to(6.0)
    clock.advance_to(7.0)
    assert start.report() == (Phase("one", 2.0, "of two"), Phase("two", 3.5), Phase(OTHER, 1.5))
    assert total_s(start.report()) == start.elapsed_s() == 7.0


def test_a_phase_that_fails_counts() -> None:
    clock = VirtualClock()
    start = StartUp(clock)

    def fail() -> None:
        with start.phase("one"):
            clock.advance_to(2.0)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert start.report()[0] == Phase("one", 2.0)


def test_what_others_measured_is_taken_without_their_rest() -> None:
    clock = VirtualClock()
    start = StartUp(clock, begun=-3.0)
    start.add(Phase("Python", 3.0))
    inner = StartUp(clock)
    with inner.phase("weights"):
        clock.advance_to(4.0)
    clock.advance_to(5.0)
    start.take(inner.report())
    clock.advance_to(6.0)
    assert start.report() == (Phase("Python", 3.0), Phase("weights", 4.0), Phase(OTHER, 2.0))


def test_the_age_of_a_process_counts_from_before_its_imports() -> None:
    """A fresh process that waits for half a second is older than what its own clock can tell."""
    code = """
import time
begun = time.monotonic()
while time.monotonic() - begun < 0.5:
    pass
from ridgeline.startup import process_age_s
print(process_age_s())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert 0.5 <= float(done.stdout) < 60
    assert process_age_s() >= 0


def test_a_process_starts_with_its_age() -> None:
    start = StartUp.of_process("Python")
    [python, other] = start.report()
    assert python.name == "Python"
    assert total_s((python, other)) == pytest.approx(process_age_s(), abs=1.0)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_collections_are_left_as_they_were(was_enabled: bool) -> None:
    """In a process of its own: what is there at the end is not looked at again."""
    code = f"""
import gc
from ridgeline.startup import without_collections
(gc.enable if {was_enabled} else gc.disable)()
try:
    with without_collections():
        within, before = gc.isenabled(), gc.get_freeze_count()
        raise ImportError
except ImportError:
    print(within, gc.isenabled(), before < gc.get_freeze_count())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["False", str(was_enabled), "True"]


def test_an_engine_says_where_its_start_went(tmp_path: Path) -> None:
    built = build(EngineConfig(model="demo:draft", device="cpu", num_blocks=16))
    assert isinstance(built, Started)
    assert built.kernels is None
    names = [phase.name for phase in built.startup]
    assert names[-1] == OTHER
    assert {"config", "tokenizer", "headers", "device", "allocation", "weights"} <= set(names)
    weights = next(phase for phase in built.startup if phase.name == "weights")
    assert "B/s" in weights.detail
    assert all(phase.seconds >= 0 for phase in built.startup)
    assert len(set(names)) == len(names)


def test_the_lines_that_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Counts:
        def text(self) -> str:
            return "2 kernels compiled"

    rows = (Phase("Python", 0.5), Phase("weights", 1.25, "16.1 GB"))
    with caplog.at_level(logging.INFO, "ridgeline.startup"):
        say_phases(rows)
        say_first_token(None)
        say_first_token(Counts())
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == 'start-up total_s=1.75 phases="Python 0.50 s, weights 1.25 s (16.1 GB)"'
    assert said[1].endswith("kernels=none")
    assert said[2].endswith('kernels="2 kernels compiled"')
