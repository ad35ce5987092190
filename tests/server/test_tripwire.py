"""Does a process that serves end when it does what it never should, and only then?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.running import PATIENCE_S, ROOT, fake_config, running, until
from tests.server.test_lifecycle import Asking, reference_text

HEAD = """
import ctypes, os, pickle, socket, subprocess, sys
from ridgeline.log import set_up
from ridgeline.server.tripwire import allow_spawn, arm
set_up()
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
allow_spawn((sys.executable, "-c", "pass"))
arm({how})
"""
NEVER = {
    "os.system('true')": "os.system",
    "os.fork()": "os.fork",
    "os.execv('/bin/true', ['true'])": "os.exec",
    "os.posix_spawn('/bin/true', ['true'], {})": "os.posix_spawn",
    "subprocess.run([sys.executable, '-c', 'print(1)'])": "subprocess.Popen",
    "subprocess.run('true', shell=True)": "subprocess.Popen",
    "pickle.loads(pickle.dumps(os.system))": "pickle.find_class",
    "socket.create_connection(('127.0.0.1', port))": "socket.connect",
    "open('/var/planted', 'w')": "open",
    "os.open('/var/planted', os.O_CREAT | os.O_RDWR)": "open",
    "sys.path.append(folder); import planted": "exec",
}
FINE = (
    "subprocess.run([sys.executable, '-c', 'pass', 'more'], check=True)",
    "import sched, xml.dom.minidom, starlette.testclient",
    "import dataclasses; dataclasses.make_dataclass('A', ['x'])(1)",
    "import collections; collections.namedtuple('A', 'x')(1)",
    "open('/proc/self/status').read(); open('/dev/null', 'w')",
    "import tempfile; tempfile.TemporaryFile().write(b'x')",
    "pickle.loads(pickle.dumps([1]))",
    "one, other = socket.socketpair(); one.send(b'x')",
)


def run(code: str, how: str = "", **environ: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", HEAD.format(how=how) + code],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | environ, timeout=PATIENCE_S,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("code", NEVER)
def test_what_a_server_never_does_ends_it(code: str, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("print(1)")
    status, log = run(f"folder = {str(tmp_path)!r}\n{code}\nprint('alive', file=sys.stderr)")
    assert status == 70, log
    [line] = log.splitlines()
    assert "CRITICAL ridgeline.server.tripwire" in line
    assert f" act={NEVER[code]} " in line
    assert "planted" not in line.partition(" at=")[0]


def test_what_a_server_does_goes_on() -> None:
    status, log = run("\n".join(FINE))
    assert (status, log) == (0, "")


def test_the_collector_that_was_asked_for_may_be_called() -> None:
    code = "socket.create_connection(('127.0.0.1', port))"
    assert run(code, "f'http://localhost:{port}'")[0] == 0
    assert run(code, "f'http://localhost:{port + 1}'")[0] == 70


def test_an_engine_that_starts_a_program_is_replaced(fake_model: Path, tmp_path: Path) -> None:
    with running(fake_config(fake_model), tmp_path) as server:
        assert Asking(server, "!shell").wait().error == "engine_unavailable"
        server.wait_until_ready()
        assert server.metric("ridgeline_engine_restarts_total") == 1
        assert Asking(server, "hello").wait().answer == reference_text("hello")
        log = server.log.read_text()
        assert log.count("CRITICAL ridgeline.server.tripwire") == 1
        assert "act=os.system" in log
        assert "exit_code=70" in log


def test_it_can_be_switched_off(fake_model: Path, tmp_path: Path) -> None:
    with running(fake_config(fake_model, tripwire=False), tmp_path) as server:
        assert Asking(server, "!shell").wait().answer == reference_text("!shell")
        until(server.is_idle, "the end of it")
