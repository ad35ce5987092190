"""Two real servers behind a real router, by one command: one is killed under load."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server.running import PATIENCE_S, ROOT, until

NUM_CLIENTS = 12


class Served:
    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE_S, trust_env=False)

    def num_ready(self) -> int:
        page = self.get("/metrics").text
        return len(re.findall(r"^ridgeline_router_backend_ready\{.*\} 1.0$", page, re.MULTILINE))

    def num_retries(self) -> float:
        page = self.get("/metrics").text
        found = re.findall(r"^ridgeline_router_retries_total\{.*\} (\S+)$", page, re.MULTILINE)
        return sum(map(float, found))

    def replica_pids(self) -> list[int]:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children]

    def ask(self, number: int) -> tuple[int, str]:
        """An answer, every other one as a stream: its status and all of its bytes. One that broke
        after its first byte is "broken"."""
        body = {
            "model": "demo:draft",
            "prompt": f"{number} times upon a time",
            "max_tokens": 200,
            "min_tokens": 200,
            "stream": number % 2 == 0,
        }
        with httpx.Client(trust_env=False, timeout=PATIENCE_S) as http:
            got = http.post(self.url + "/v1/completions", json=body)
        is_broken = '"error"' in got.text and got.status_code == 200
        return got.status_code, "broken" if is_broken else got.text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("replicas") / "log"
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    env.pop("RIDGELINE_API_KEY", None)
    command = (sys.executable, "-m", "ridgeline", "serve", "demo:draft", "--port", "0")
    limits = ("--replicas", "2", "--max-num-seqs", "8", "--max-model-len", "256")
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *limits], stdout=subprocess.PIPE, stderr=file, text=True, cwd=ROOT, env=env
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().rpartition(" ")[2].strip()
        assert url.startswith("http://"), log.read_text()
        found = Served(process, url, log)
        until(lambda: found.num_ready() == 2, "two replicas to be ready", 3 * PATIENCE_S)
        yield found
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_of_a_killed_replica_no_request_is_lost_that_had_not_sent_a_byte(served: Served) -> None:
    assert served.get("/v1/models").json()["data"][0]["id"] == "demo:draft"
    before, over = served.replica_pids(), threading.Event()
    survivor = before[1]
    found: list[tuple[int, int, str]] = []

    def keep_asking(first: int) -> None:
        for number in itertools.count(first, NUM_CLIENTS):
            found.append((number, *served.ask(number)))
            if over.is_set():
                return

    def kill_the_other() -> bool:
        """Whether it had something open: by chance there may be nothing at that moment."""
        until(lambda: served.num_ready() == 2, "two to be ready", 3 * PATIENCE_S)
        (other,) = set(served.replica_pids()) - {survivor}
        os.killpg(other, signal.SIGKILL)
        until(lambda: served.num_ready() == 1, "the end of one to be known")
        return served.num_retries() > 0 or any(text == "broken" for *_, text in found)

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(keep_asking, first) for first in range(NUM_CLIENTS)]
        try:
            until(lambda: len(found) >= NUM_CLIENTS, "some to be answered")
            until(kill_the_other, "it to be at work when it is killed")
        finally:
            over.set()
    for client in clients:
        client.result()
    assert {status for _, status, _ in found} == {200}
    broken = [number for number, _, text in found if text == "broken"]
    assert all(number % 2 == 0 for number in broken), "what is not streamed had not sent a byte"
    assert len(broken) <= NUM_CLIENTS
    until(lambda: served.num_ready() == 2, "the replica to be back", 3 * PATIENCE_S)
    assert len(set(served.replica_pids()) - set(before)) == 1


def test_everything_ends_together(served: Served) -> None:
    replicas = served.replica_pids()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(PATIENCE_S) == 0
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in replicas), "none to be left")


def test_what_replicas_cannot_have_is_said_at_once() -> None:
    def run(*flags: str) -> str:
        command = (sys.executable, "-m", "ridgeline", "serve", "--port", "0", "--replicas", *flags)
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.returncode == 2
        return done.stderr

    assert "--lab is of one engine" in run("2", "--lab")
    assert "--replicas" in run("65")
