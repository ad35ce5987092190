"""One rank of a group is killed, stopped or raises, in each phase of its life and whoever started
it: is it named in time, are those who wait told, and is nothing left? The table.

How long it took is a property of each test (`--junitxml`): `noticed_s` until the driver knew,
`told_s` until who waited had its error.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams, build
from ridgeline.distributed import launch_local, launch_ray, links
from ridgeline.distributed.agreement import PERIOD
from ridgeline.distributed.links import SECRET_VARIABLE, Processes, Ranks
from ridgeline.errors import EngineLost, RidgelineError
from tests.distributed.bad_worker import PHASES, SPOIL, BadActor
from tests.distributed.processes import children_of
from tests.server.running import PATIENCE_S, ROOT, until
from tests.tiny_model import make_tiny_model

OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "speculate": "off"}
LAUNCHERS = ("local", "join", "ray")
ACTS = ("kill", "stop", "raise")
FLOOR_S = 1.0  # a rank that is silent for so long is stuck
MISSING_S = 3.0  # one that has not come for so long is missed
BEFORE_IT_IS_KNOWN = ("start", "hello")
AT_START = (*BEFORE_IT_IS_KNOWN, "open", "meet", "load", "warm-up")
STEPPING = ("step", "collective")
WORKER = (sys.executable, "-m", "tests.distributed.bad_worker")
SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)


def expected(launcher: str, phase: str, act: str) -> str:
    """What is said of it."""
    who = r"rank 1 \(host [^,]+, pid \d+\)"
    if phase in BEFORE_IT_IS_KNOWN:
        if act == "stop" or launcher == "join":
            return rf"rank 1 of 2 did not report within {MISSING_S:g} s"
        how = {"local": "rank 1 has ended", "ray": "ranks cannot be had: rank 1: "}[launcher]
        return how + ".*broken on purpose" * (act == "raise")
    if act == "raise":
        return rf"{who}: .*RuntimeError: broken on purpose"
    if act == "kill":
        how = {"local": r" \(exit code -9\)", "join": "", "ray": r" \(.+\)"}[launcher]
        at = r"; rank 0 is at step \d+, last collective \w+ number \d+"
        return f"{who} has ended{how}" + at * (phase in STEPPING)
    if phase in AT_START:
        return f"{who} does not answer while it starts"
    if phase == "idle":
        return f"{who} does not answer"
    return rf"{who} does not answer; rank 0 has been at step \d+, last collective \w+ number \d+"


def sockets() -> set[str]:
    """Of ours that are listened on."""
    own = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(path))
    rows = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    listening = {f"socket:[{row.split()[9]}]": row.split()[1] for row in rows if " 0A " in row}
    return {where for name, where in listening.items() if name in own}


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def what_is_held() -> dict[str, set[Any]]:
    memory = Path("/proc/self/maps").read_text()
    return {
        "processes": children_of(os.getpid()),
        "threads": set(threading.enumerate()),
        "shared memory": set(os.listdir("/dev/shm"))
        | set(re.findall(r"^\S+(?=.*memfd:ridgeline)", memory, re.MULTILINE)),
        "ports": sockets(),
    }


@dataclass
class Scene:
    """Where one rank comes to grief, and what is known of it."""

    folder: Path
    noticed: float | None = None
    joining: list[subprocess.Popen[bytes]] = field(default_factory=list)
    waits_for_another: bool = False  # driver: it has not met one yet

    def arm(self, phase: str, act: str) -> None:
        for name in ("spoil", "at"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "spoil").write_text(f"{phase} {act}")

    def has_happened(self) -> bool:
        return (self.folder / "at").exists()

    def when_and_who(self) -> tuple[float, int]:
        moment, pid = (self.folder / "at").read_text().split()
        return float(moment), int(pid)


@pytest.fixture(scope="module")
def spoil_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One for all: processes of Ray's get their environment when that is started."""
    os.environ[SPOIL] = str(folder := tmp_path_factory.mktemp("spoil"))
    yield folder
    del os.environ[SPOIL]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster(spoil_folder: Path) -> Iterator[launch_ray.Cluster]:
    pytest.importorskip("ray", reason="needs ridgeline[ray]")
    started = launch_ray.Cluster(4)
    yield started
    started.close()


@pytest.fixture
def scene(
    spoil_folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Scene]:
    """With short patience, and a look at what is left."""
    if "[ray" in request.node.name:
        request.getfixturevalue("cluster")
    found, before, lose = Scene(spoil_folder), what_is_held(), Ranks._lose

    def noted(ranks: Ranks, what: RidgelineError) -> None:
        if found.noticed is None and found.has_happened():
            found.noticed = time.monotonic()
        lose(ranks, what)

    monkeypatch.setattr(Ranks, "_lose", noted)
    monkeypatch.setattr(launch_local, "WORKER", WORKER)
    monkeypatch.setattr(launch_ray, "RankActor", BadActor)
    yield found
    for process in found.joining:  # nobody of ours may end them: they end by themselves
        process.send_signal(signal.SIGCONT)
        if found.waits_for_another:
            process.kill()
        process.wait(PATIENCE_S)

    def nothing_is_left() -> bool:
        gc.collect()
        held = what_is_held()
        return all(held[name] <= before[name] for name in before)

    until(nothing_is_left, f"what was there before, {before}", 20.0)


@pytest.mark.every_value
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_comes_to_grief(
    launcher: str,
    phase: str,
    act: str,
    model: Path,
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    words, options = expected(launcher, phase, act), OPTIONS | {"launcher": launcher, "tp": 2}
    if act == "stop" and phase in AT_START:
        monkeypatch.setattr(links, "START_ANSWER_S", 6.0)
    if "did not report" in words:
        for kind in (Processes, launch_local.LocalProcesses, launch_ray.RayProcesses):
            monkeypatch.setattr(kind, "wait_s", MISSING_S)
    if phase == "warm-up":
        warm_up = build._warm_up
        monkeypatch.setattr(
            build, "_warm_up", lambda one, *more: warm_up(replace(one, warm_up=True), *more)
        )
    if (phase, act) == ("idle", "stop"):
        monkeypatch.setattr(links, "IDLE_ANSWER_S", FLOOR_S)
    if launcher == "join":
        options["join_address"] = address = free_address()
        monkeypatch.setenv(SECRET_VARIABLE, "5a" * links.SECRET_BYTES)
    if phase in AT_START or phase == "shutdown":
        scene.arm(phase, act)
    if launcher == "join":
        scene.waits_for_another = phase == "start"
        scene.joining = [subprocess.Popen([*WORKER, "--join", address], cwd=ROOT)]
    with ExitStack() as stack:
        if phase in AT_START:
            with pytest.raises(RidgelineError, match=words):
                stack.enter_context(LLM(model, **options))
        else:
            llm = stack.enter_context(LLM(model, **options))
            ranks = llm.built.ranks
            assert ranks is not None
            ranks.overdue_s = FLOOR_S
            if phase != "shutdown":
                llm.generate([[5, 6, 7]], SAMPLING, progress=False)
                scene.arm(phase, act)
                with pytest.raises(EngineLost, match=words):
                    serve(llm, scene, phase)
                with pytest.raises(EngineLost, match=words):  # and every time after that
                    llm.generate([[5, 6, 7]], SAMPLING, progress=False)
            stack.close()
            assert (ranks.lost is None) == (phase == "shutdown")
    told = time.monotonic()
    if phase == "shutdown" and launcher != "join":
        return  # it is killed at once, and seldom too late
    until(scene.has_happened, "the phase to be reached")
    moment, pid = scene.when_and_who()
    record_property("told_s", round(told - moment, 3))
    if scene.noticed is not None:
        record_property("noticed_s", round(scene.noticed - moment, 3))
    if launcher != "join":
        until(lambda: is_gone(pid), "the rank to be gone")


def test_a_rank_that_samples_otherwise_is_named(model: Path, scene: Scene) -> None:
    """Nothing fails on it: what it has drawn is other numbers."""
    prompts, sampling = [[5, 6, 7]], SamplingParams(max_tokens=PERIOD + 8, seed=1, ignore_eos=True)
    with LLM(model, tp=2, launcher="local", **OPTIONS) as llm:
        scene.arm("new", "diverge")
        with pytest.raises(
            EngineLost,
            match=r"rank 0 .* and rank 1 .* have sampled other tokens in steps \d+ to \d+",
        ):
            llm.generate(prompts, sampling, progress=False)


def serve(llm: LLM, scene: Scene, phase: str) -> None:
    """Until the rank has come to grief and that is known."""
    ranks = llm.built.ranks
    assert ranks is not None
    if phase == "idle":
        until(scene.has_happened, "the rank to come to grief between steps")
        until(lambda: ranks.lost is not None, "that to be known")
        ranks.check()
    llm.generate([[5, 6, 7, 8, 9]], SAMPLING, progress=False)


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"
