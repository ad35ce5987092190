"""Does a server of several ranks answer, start them again when one is gone, and leave nothing?"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import httpx
import pytest
from msgspec import structs

from ridgeline import LLM, SamplingParams
from ridgeline.config import EngineConfig
from ridgeline.distributed.links import SECRET_VARIABLE
from ridgeline.server import Limits, ServeConfig
from tests.distributed.bad_worker import SPOIL
from tests.distributed.processes import children_of
from tests.distributed.test_failures import Scene, free_address
from tests.server.running import PATIENCE_S, ROOT, Running, running, until
from tests.tiny_model import make_tiny_model

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def config(folder: Path, **options: object) -> ServeConfig:
    asked = {"device": "cpu", "threads": 1, "speculate": "off", "tp": 2, **options}
    engine = EngineConfig(model=str(folder), **asked)  # type: ignore[arg-type]
    return ServeConfig(engine=engine, port=0, limits=Limits(step_overdue_s=1.0))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(config(folder), tmp_path_factory.mktemp("server")) as started:
        yield started
        ranks = ranks_of(started)
    until(lambda: not any(map(lives, ranks)), "the ranks to go")


def ranks_of(server: Running) -> list[int]:
    return sorted(children_of(server.engine_pid))


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def answer(server: Running, max_tokens: int = 8) -> httpx.Response:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
    with server.http as http:
        body["model"] = http.get("/v1/models").json()["data"][0]["id"]
        return http.post("/v1/completions", json=body | {"ignore_eos": True})


def text_of_one(folder: Path) -> str:
    with LLM(folder, device="cpu", threads=1, speculate="off") as llm:
        sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        return llm.generate([PROMPT], sampling)[0].text


@pytest.mark.parametrize(
    ("sent", "words"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "does not answer")]
)
def test_a_rank_that_is_gone_or_stuck_is_replaced(
    server: Running, folder: Path, sent: signal.Signals, words: str
) -> None:
    (rank,) = ranks_of(server)
    engine = server.engine_pid
    want = text_of_one(folder)
    assert answer(server).json()["choices"][0]["text"] == want
    os.kill(rank, sent)
    if sent is signal.SIGSTOP:
        failed = answer(server, 400)
        assert failed.status_code == 503
        assert failed.json()["error"]["code"] == "engine_unavailable"
    until(lambda: server.engine_pid not in (engine, 0), "another engine")
    server.wait_until_ready()
    assert not lives(rank)
    assert answer(server).json()["choices"][0]["text"] == want
    assert f"rank 1 (host {os.uname().nodename}, pid {rank}) {words}" in server.log.read_text()


def test_each_rank_is_seen(server: Running) -> None:
    """Asked once a second: what each has done, and what it holds."""

    def page() -> dict[tuple[str, ...], float]:
        answer(server)
        with server.http as http:
            rows = re.findall(
                r'^ridgeline_rank_(\w+)\{.*rank="(\d)"(?:,collective="(\w+)")?\} (\S+)$',
                http.get("/metrics").text,
                re.MULTILINE,
            )
        return {(name, rank): float(value) for name, rank, _, value in rows}

    names = "steps_total", "collectives_total", "waiting_seconds_total", "memory_bytes"
    wanted = {(name, rank) for name in (*names, "last_collective") for rank in "01"}
    until(lambda: page().keys() == wanted, "all of it")
    until(lambda: all(page()[name, "1"] for name in (names[0], names[1], names[3])), "its steps")
    with server.http as http:
        ranks = http.get("/explain").json()["server"]["ranks"]
    assert [one["rank"] for one in ranks] == [0, 1]
    assert {one["host"] for one in ranks} == {os.uname().nodename}


@pytest.fixture(scope="module", params=["local", "join"])
def spoilt(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A server whose rank 1 comes to grief where it is told; with launcher join somebody starts it
    again whenever it ends."""
    os.environ[SPOIL] = str(tmp_path_factory.mktemp("spoil"))
    os.environ[SECRET_VARIABLE] = "5a" * 32
    address, is_over = free_address(), Event()
    command = [sys.executable, "-m", "tests.distributed.bad_worker", "--join", address]

    def keep() -> None:
        while not is_over.is_set():
            worker = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
            while worker.poll() is None and not is_over.wait(0.05):
                pass
            worker.kill()
            worker.wait()

    asked = {"launcher": request.param}
    if request.param == "join":
        asked["join_address"] = address
    started = structs.replace(config(folder, **asked), builder="tests.distributed.bad_worker:build")
    keeper = Thread(target=keep)
    try:
        if request.param == "join":
            keeper.start()
        with running(started, tmp_path_factory.mktemp("server")) as server:
            yield server
    finally:
        is_over.set()
        if request.param == "join":
            keeper.join()
        del os.environ[SPOIL], os.environ[SECRET_VARIABLE]


@pytest.mark.slow
@pytest.mark.parametrize("act", ["kill", "stop", "raise"])
@pytest.mark.parametrize("phase", ["idle", "step", "collective"])
def test_clients_are_told_to_try_again_and_the_group_comes_back(
    spoilt: Running,
    folder: Path,
    phase: str,
    act: str,
    record_property: Callable[[str, object], None],
) -> None:
    engine, scene = spoilt.engine_pid, Scene(Path(os.environ[SPOIL]))
    want = text_of_one(folder)
    assert answer(spoilt).json()["choices"][0]["text"] == want
    scene.arm(phase, act)
    if phase == "idle":
        until(scene.has_happened, "the rank to come to grief between steps")
    else:
        failed = answer(spoilt, 400)
        moment, pid = scene.when_and_who()
        record_property("told_s", round(time.monotonic() - moment, 3))
        assert failed.status_code == 503
        assert failed.json()["error"]["code"] == "engine_unavailable"
    moment, pid = scene.when_and_who()
    until(lambda: spoilt.engine_pid not in (engine, 0), "another engine")
    record_property("replaced_s", round(time.monotonic() - moment, 3))
    if act == "stop" and spoilt.child_pid("engine_process"):
        with suppress(ProcessLookupError):  # nobody of ours may end a rank that joined
            os.kill(pid, signal.SIGCONT)
    spoilt.wait_until_ready()
    record_property("ready_s", round(time.monotonic() - moment, 3))
    until(lambda: not lives(pid), "the rank to go")
    assert answer(spoilt).json()["choices"][0]["text"] == want


def test_ranks_go_with_the_server(folder: Path, tmp_path: Path) -> None:
    with running(config(folder), tmp_path) as started:
        engine, ranks = started.engine_pid, ranks_of(started)
        os.kill(ranks[0], signal.SIGSTOP)
        os.kill(started.process.pid, signal.SIGKILL)
        until(lambda: not any(map(lives, (engine, *ranks))), "all of them to go")


def test_a_rank_may_come_before_its_driver(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = free_address()
    monkeypatch.setenv(SECRET_VARIABLE, "5a" * 32)
    command = [sys.executable, "-m", "ridgeline", "worker", "--join", address]
    worker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert worker.stderr is not None
        assert "waiting for the driver" in worker.stderr.readline()
        with running(config(folder, launcher="join", join_address=address), tmp_path) as started:
            assert answer(started).json()["choices"][0]["text"] == text_of_one(folder)
            assert started.stop() == 0
            assert worker.wait(PATIENCE_S) == 0
    finally:
        worker.kill()
        worker.communicate()
