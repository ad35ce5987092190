"""What is read of a card while something runs on it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from bench.gpu import card

BUSY, LIMITED, IDLE = "0x0000000000000000", "0x0000000000000004", "0x0000000000000001"


def line(mhz: float, watts: float, why: str) -> str:
    return f"{mhz:.0f}, 3201, {watts:.2f}, 61, {why}"


def test_tenths_of_clock_and_power_while_there_was_work() -> None:
    lines = [line(1000 + 100 * i, 600 + i, LIMITED if i < 3 else BUSY) for i in range(11)]
    idle = [line(345, 75, IDLE)] * 20
    found = card.figures([*idle, *lines, *idle])
    assert found["samples"] == 11
    assert found["sm_mhz"] == pytest.approx([1100, 1500, 1900])
    assert found["watts"] == pytest.approx([601, 605, 609])
    assert found["memory_mhz"] == 3201
    assert found["celsius"] == 61
    assert found["power_limited"] == pytest.approx(3 / 11)
    assert card.sentence(found) == ", 1500 MHz, 605 W (27% of the time at the limit)"
    assert card.sentence({"samples": 1}) == ""


def test_lines_that_say_nothing_are_left_out() -> None:
    half = ["", "1980, 3201, 61", "[N/A], 3201, 600, 61, 0x0", "1980, 3201, 600, 61, [N/A]"]
    assert card.figures([*half, line(1980, 600, BUSY)]) == {"samples": 1}
    assert card.figures(half) == {"samples": 0}


def test_without_the_tool_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with card.watched() as seen:
        pass
    assert seen == {}


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """A tool of that name that is found first."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!{sys.executable}\nimport os, sys, time\n{script}")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 30.0
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.read_text()


def test_the_tool_is_asked_until_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = tmp_path / "said"
    script = (
        f"for _ in range(5000): print({line(1500, 698, LIMITED)!r}, flush=True)\n"
        f"open({str(said)!r} + '.part', 'w').write(' '.join(sys.argv))\n"
        f"os.rename({str(said)!r} + '.part', {str(said)!r})\n"
        "time.sleep(600)\n"
    )
    stand_in(monkeypatch, tmp_path, script)
    with card.watched() as seen:
        assert "--loop-ms=20" in wait_for(said)
    assert seen["samples"] == 5000  # minutes of them
    assert seen["sm_mhz"] == [1500, 1500, 1500]
    assert seen["power_limited"] == 1.0


def test_the_tool_ends_when_what_is_measured_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    script = (
        f"open({str(said)!r} + '.part', 'w').write(str(os.getpid()))\n"
        f"os.rename({str(said)!r} + '.part', {str(said)!r})\n"
        "time.sleep(600)\n"
    )
    stand_in(monkeypatch, tmp_path, script)
    with pytest.raises(ZeroDivisionError), card.watched() as seen:
        raise ZeroDivisionError(wait_for(said))
    assert seen == {"samples": 0}
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.read_text()), 0)
