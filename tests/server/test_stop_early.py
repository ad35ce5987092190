"""Does a server that is told to stop while it starts end at once, cleanly and with its engine?"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.server.running import PATIENCE_S, ROOT, fake_config, running, until
from tests.server.test_lifecycle import gone

SOME = (0.0, 0.7, 2.0)
ALL = tuple(0.15 * i for i in range(1, 21))


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal."""
    mask = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(mask, 16) >> (number - 1) & 1)


def children(pid: int) -> list[int]:
    with suppress(FileNotFoundError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "delay_s", [*SOME, *(pytest.param(delay, marks=pytest.mark.slow) for delay in ALL)]
)
def test_a_signal_at_any_moment_of_the_start(
    delay_s: float, name: signal.Signals, tmp_path: Path
) -> None:
    """From the first lines of ours on; Python itself takes some milliseconds before."""
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "ridgeline", "serve", "demo:draft", "--port=0", "--device=cpu"],
            stdout=subprocess.DEVNULL, stderr=stderr, cwd=ROOT,
        )  # fmt: skip
    try:
        until(lambda: catches(process.pid, signal.SIGTERM), "our code to run")
        time.sleep(delay_s)  # what is tested is where this happens to end
        engines = children(process.pid)
        process.send_signal(name)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
    for engine in engines:
        until(partial(gone, engine), "the engine to go", 5)
    text = log.read_text()
    assert "Traceback" not in text
    assert "ERROR" not in text


def test_what_a_server_makes_is_for_its_owner_alone(fake_model: Path, tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        events = tmp_path / "events"
        config = fake_config(fake_model, engine={"event_log": str(events)})
        with running(config, tmp_path) as server:
            for pid in (server.process.pid, server.engine_pid):
                assert "Umask:\t0077" in Path(f"/proc/{pid}/status").read_text()
            assert stat.S_IMODE(events.stat().st_mode) == 0o600
    finally:
        os.umask(mask)
