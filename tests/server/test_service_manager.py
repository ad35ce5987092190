"""Does systemd hear when the server is ready, alive and stopping, and nothing else?"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ridgeline.server.service_manager import VARIABLES, ServiceManager
from tests.server.running import PATIENCE_S, fake_config, running


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """What systemd listens at."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(PATIENCE_S)
        yield sock, str(tmp_path / "notify")


def heard(sock: socket.socket) -> dict[str, str]:
    return dict(line.split("=", 1) for line in sock.recv(4096).decode().splitlines())


def next_news(sock: socket.socket) -> dict[str, str]:
    """Behind signs of life."""
    until = time.monotonic() + PATIENCE_S
    while (said := heard(sock)) == {"WATCHDOG": "1"}:
        assert time.monotonic() < until, "signs of life alone"
    return said


def test_from_start_to_end(
    listener: tuple[socket.socket, str],
    fake_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sock, address = listener
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("WATCHDOG_USEC", "300000")
    # The system keeps ten messages for who does not read, so it is not waited for elsewhere.
    with running(fake_config(fake_model), tmp_path, wait=False) as server:
        assert next_news(sock)["READY"] == "1"
        server.wait_until_ready()
        for _ in range(3):
            assert heard(sock) == {"WATCHDOG": "1"}
        environment = Path(f"/proc/{server.engine_pid}/environ").read_bytes()
        assert not any(name.encode() in environment for name in VARIABLES)
        server.process.send_signal(signal.SIGTERM)
        assert next_news(sock)["STOPPING"] == "1"
        assert server.process.wait(PATIENCE_S) == 0


def test_signs_of_life_come_in_time_and_not_more_often(
    listener: tuple[socket.socket, str],
) -> None:
    sock, address = listener
    sock.setblocking(False)
    manager = ServiceManager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "3000000"})
    num_heard = 0
    for now in (10.0, 10.5, 11.0, 11.5, 12.0):
        manager.alive(now)
        with suppress(BlockingIOError):
            num_heard += heard(sock) == {"WATCHDOG": "1"}
    assert num_heard == 3  # a third of the limit between them


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WATCHDOG_USEC": "1000000"},
        {"NOTIFY_SOCKET": "/nobody/listens"},
        {"NOTIFY_SOCKET": "here", "WATCHDOG_USEC": "x"},
    ],
)
def test_nobody_listens(environment: dict[str, str]) -> None:
    manager = ServiceManager(environment)
    manager.alive(1.0)
    manager.ready()
    manager.stopping()


def test_signs_meant_for_another_process(listener: tuple[socket.socket, str]) -> None:
    sock, address = listener
    sock.setblocking(False)
    other = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}
    ServiceManager(other).alive(1.0)
    with pytest.raises(BlockingIOError):
        sock.recv(100)
    ServiceManager(other | {"WATCHDOG_PID": str(os.getpid())}).alive(1.0)
    assert heard(sock) == {"WATCHDOG": "1"}


def test_a_name_of_the_abstract_namespace() -> None:
    name = f"ridgeline-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name)
        sock.settimeout(PATIENCE_S)
        ServiceManager({"NOTIFY_SOCKET": "@" + name}).ready()
        assert heard(sock)["READY"] == "1"
