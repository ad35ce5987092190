"""Do replicas that Ray places follow the load, and is anything lost or left when they come and go?
By one command, on a Ray cluster that it starts on this machine."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs ridgeline[ray]")

from ridgeline.distributed.launch_ray import PREFIX
from tests.distributed.test_ray import descendants
from tests.server.running import PATIENCE_S, ROOT, until
from tests.server.test_replicas import NUM_CLIENTS, Served

START_S = 4 * PATIENCE_S
FLAGS = (
    *("--launcher", "ray", "--replicas", "1:2", "--threads", "1"),
    *(
        "--need-window-s",
        "8",
        "--max-num-seqs",
        "4",
        "--max-model-len",
        "256",
        "--dtype",
        "float32",
    ),
)


class Loaded:
    """Clients that ask until the end of the context; then all answers are looked at."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._over = threading.Event()
        self.found: list[tuple[int, int, str]] = []

    def __enter__(self) -> Loaded:
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)
        self._clients = [self._pool.submit(self._keep_asking, n) for n in range(NUM_CLIENTS)]
        return self

    def _keep_asking(self, first: int) -> None:
        for number in itertools.count(first, NUM_CLIENTS):
            self.found.append((number, *self._served.ask(number)))
            if self._over.is_set():
                return

    def __exit__(self, *failure: object) -> None:
        self._over.set()
        for client in self._clients:
            client.result()
        self._pool.shutdown()

    def broken(self) -> list[int]:
        return [number for number, _, text in self.found if text == "broken"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("ray") / "log"
    before = set(Path("/tmp").glob(PREFIX + "*"))
    env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": "/tmp"}
    env.pop("RIDGELINE_API_KEY", None)
    command = (sys.executable, "-m", "ridgeline", "serve", "demo:draft", "--port", "0")
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *FLAGS], stdout=subprocess.PIPE, stderr=file, text=True, cwd=ROOT, env=env
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().rpartition(" ")[2].strip()
        assert url.startswith("http://"), log.read_text()
        found = Served(process, url, log)
        until(lambda: found.num_ready() == 1, "the least number to be ready", START_S)
        yield found
        assert set(Path("/tmp").glob(PREFIX + "*")) <= before
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def actors(served: Served) -> set[int]:
    """The processes of Ray that run servers."""
    found = set()
    for pid in descendants(served.process.pid):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::ServerActor"):
            found.add(pid)
    return found


def test_replicas_come_and_go_with_the_load_and_nothing_is_lost(served: Served) -> None:
    with Loaded(served) as load:
        until(lambda: served.num_ready() == 2, "a second one to be wanted and ready", START_S)
        before = actors(served)
        assert len(before) == 2
        killed = max(before)
        os.kill(killed, signal.SIGKILL)
        until(lambda: served.num_ready() == 1, "the end of one to be known")
        until(lambda: served.num_ready() == 2, "the replica to be back", START_S)
        assert len(actors(served) - before) == 1
        num_broken = len(load.broken())
        before = actors(served)
        served.process.send_signal(signal.SIGHUP)
        until(lambda: served.num_ready() == 2 and not actors(served) & before, "new ones", START_S)
    assert {status for _, status, _ in load.found} == {200}
    assert all(number % 2 == 0 for number in load.broken()), "these had not sent a byte"
    assert num_broken == len(load.broken()) <= NUM_CLIENTS, "an update breaks nothing off"
    assert "ridgeline_router_replicas_wanted" in served.get("/metrics").text
    until(lambda: served.num_ready() == 1, "one to be given up without load", START_S)
    assert served.ask(1)[0] == 200


def test_everything_ends_together(served: Served) -> None:
    before = descendants(served.process.pid)
    assert len(before) > 4
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(START_S) == 0
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in before), "none to be left")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--replicas", "1:2"), "--replicas 1:2 needs launcher ray; else give one number"),
        (("--replicas", "3:2", "--launcher", "ray"), "--replicas is '3:2'; write a number"),
        (("--launcher", "ray", "--lab"), "--lab is of one engine"),
    ],
)
def test_what_cannot_be_had_is_said(flags: tuple[str, ...], words: str) -> None:
    command = (sys.executable, "-m", "ridgeline", "serve", "--port", "0", *flags)
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert words in done.stderr
