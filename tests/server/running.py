"""Start and watch real servers from tests: real processes, loopback only."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ridgeline.config import EngineConfig
from ridgeline.server import Limits, ServeConfig

FAKE = "tests.server.fake_build:build"
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0  # for what must happen, on a busy machine


def until(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> float:
    """Wait for `condition`; how long it took in seconds. Fails when it never comes true."""
    start = time.monotonic()
    while not condition():
        waited = time.monotonic() - start
        assert waited < patience_s, f"waited {waited:.0f} s in vain for: {what}"
        time.sleep(0.01)
    return time.monotonic() - start


def fake_config(
    folder: Path, limits: dict[str, Any] | None = None, engine: dict[str, Any] | None = None,
    **options: Any,
) -> ServeConfig:  # fmt: skip
    return ServeConfig(
        engine=EngineConfig(model=str(folder), **(engine or {})),
        port=0,
        served_model_name="fake",
        limits=Limits(**(limits or {})),
        builder=FAKE,
        **options,
    )


@dataclass
class Running:
    """A server process. `url` has no slash at its end."""

    process: subprocess.Popen[str]
    url: str
    log: Path
    key: str | None = None

    @property
    def http(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.Client(
            base_url=self.url, headers=headers, timeout=PATIENCE_S, verify=False, trust_env=False
        )

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def metric(self, name: str) -> float:
        """The value of a metric without labels (or the sum over its labels)."""
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        """The same of several, at one moment."""
        with self.http as http:
            page = http.get("/metrics").text
        found = []
        for name in names:
            rows = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
            assert rows, f"{name} is not on the page"
            found.append(sum(map(float, rows)))
        return found

    def is_ready(self) -> bool:
        with self.http as http:
            return http.get("/health/ready").status_code == 200

    def is_idle(self) -> bool:
        """No sequence in the engine, no block held, no request open."""
        names = (
            "sequences_running",
            "sequences_waiting",
            "kv_cache_used_blocks",
            "http_open_requests",
        )
        return not any(self.metrics(*(f"ridgeline_{name}" for name in names)))

    def wait_until_idle(self) -> float:
        return until(self.is_idle, "nothing left in the engine")

    def wait_until_ready(self) -> float:
        assert self.process.poll() is None, self.log.read_text()
        return until(self.is_ready, "the server to be ready")

    @property
    def engine_pid(self) -> int:
        return self.child_pid("engine_process")

    def child_pid(self, module: str) -> int:
        """Of the child that runs this module of ridgeline.server; 0 while there is none."""
        pid = self.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                if module.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        return 0

    def num_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def stop(self) -> int:
        """SIGTERM and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


def launch(config: ServeConfig, folder: Path, key: str | None = None) -> subprocess.Popen[str]:
    """Start the process; nothing is waited for. Its log is `folder`/server.log."""
    path = folder / "serve.json"
    path.write_bytes(msgspec.json.encode(config))
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    env.pop("RIDGELINE_API_KEY", None)
    if key is not None:
        env["RIDGELINE_API_KEY"] = key
    with (folder / "server.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.server.run_server", str(path)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env=env,
        )


@contextlib.contextmanager
def running(
    config: ServeConfig, folder: Path, key: str | None = None, wait: bool = True
) -> Iterator[Running]:
    """A server for the time of a `with` block; it is killed if it does not end by itself."""
    process = launch(config, folder, key)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        log = folder / "server.log"
        assert url.startswith("http"), log.read_text()
        server = Running(process, url, log, key)
        if wait:
            server.wait_until_ready()
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()
