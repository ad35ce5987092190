"""A rank is killed, stopped or raises, at start and in a step: who is told, and what is left?"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams, build_ranks
from ridgeline.distributed import launch_local, links
from ridgeline.errors import EngineLost, RidgelineError
from tests.distributed.processes import children_of
from tests.tiny_model import make_tiny_model

OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "speculate": "off", "tp": 2}
PATIENCE_S = 60.0  # on a busy machine


def children() -> set[int]:
    """Processes of ours that are ranks."""
    ranks = set()
    for pid in children_of(os.getpid()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"worker" in words:
            ranks.add(pid)
    return ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = children(), set(threading.enumerate())
    yield
    until = time.monotonic() + PATIENCE_S
    while children() - before[0] or set(threading.enumerate()) - before[1]:
        assert time.monotonic() < until, (children(), threading.enumerate())
        time.sleep(0.01)


def spoil(monkeypatch: pytest.MonkeyPatch, phase: str, act: str) -> None:
    words = (sys.executable, "-m", "tests.distributed.bad_worker", phase, act)
    monkeypatch.setattr(launch_local, "WORKER", words)


AT_START = {
    ("hello", "kill"): r"rank 1 has ended \(exit code -9\)",
    ("hello", "stop"): r"rank 1 of 2 did not report within 3 s",
    ("hello", "raise"): r"rank 1 has ended \(exit code 1: RuntimeError: broken on purpose\)",
    ("load", "kill"): r"rank 1 \(host .*, pid \d+\) has ended \(exit code -9\)",
    ("load", "stop"): r"rank 1 \(host .*, pid \d+\) does not answer while it starts",
    ("load", "raise"): r"rank 1 \(host .*, pid \d+\): RuntimeError: broken on purpose",
}


@pytest.mark.every_value
@pytest.mark.parametrize("act", ["kill", "stop", "raise"])
@pytest.mark.parametrize("phase", ["hello", "load"])
def test_at_start(folder: Path, monkeypatch: pytest.MonkeyPatch, phase: str, act: str) -> None:
    spoil(monkeypatch, phase, act)
    is_silent = (phase, act) == ("load", "stop")
    # How long the thread waits for the others that opens what they talk through.
    monkeypatch.setattr(build_ranks, "COLLECTIVE_S", 8.0 if is_silent else 3.0)
    if act == "stop" and phase == "hello":
        monkeypatch.setattr(launch_local.LocalProcesses, "wait_s", 3.0)
    monkeypatch.setattr(links, "START_ANSWER_S", 3.0 if is_silent else 15.0)
    with pytest.raises(RidgelineError, match=AT_START[phase, act]):
        LLM(folder, **OPTIONS)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("kill", r"rank 1 \(host .*, pid \d+\) has ended \(exit code -9\); rank 0 is at step 4"),
        ("stop", r"rank 1 \(host .*, pid \d+\) does not answer; rank 0 has been at step 4, last"),
        ("raise", r"rank 1 \(host .*\): step 4 failed: RuntimeError: broken on purpose"),
    ],
)
def test_in_a_step(folder: Path, monkeypatch: pytest.MonkeyPatch, act: str, words: str) -> None:
    spoil(monkeypatch, "step", act)
    with LLM(folder, **OPTIONS) as llm:
        assert llm.built.ranks is not None
        llm.built.ranks.overdue_s = 1.0
        prompt, sampling = [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True)
        with pytest.raises(EngineLost, match=words):
            llm.generate([prompt], sampling)
        assert not children()
        with pytest.raises(EngineLost, match=words):
            llm.generate([prompt], sampling)
