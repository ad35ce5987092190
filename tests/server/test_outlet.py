"""Does nothing ever wait for a reader of standard error, and is no line lost where one reads?"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import F_SETPIPE_SZ, fcntl
from pathlib import Path
from typing import IO

import msgspec
import pytest

from ridgeline.log import say
from ridgeline.server.outlet import Outlet, Relay, never_block
from tests.server.running import PATIENCE_S, ROOT, Running, fake_config, until

SMALL_PIPE = 4096  # bytes; the least that a pipe has
LOST = re.compile(r"lines of the log are lost.* lost=(\d+)$", re.MULTILINE)
SERVER = """
from ridgeline.server import outlet
outlet.QUEUE_BYTES = 1 << 13
from tests.server.run_server import main
raise SystemExit(main())
"""


def read_all(fd: int) -> str:
    with os.fdopen(fd, encoding="utf-8") as file:
        return file.read()


def small_pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    fcntl(writer, F_SETPIPE_SZ, SMALL_PIPE)
    return reader, writer


def test_lines_come_whole_and_in_order_from_many_threads() -> None:
    reader, writer = os.pipe()
    outlet, texts = Outlet(writer, 1 << 20), []
    taking = threading.Thread(target=lambda: texts.append(read_all(reader)))
    taking.start()

    def write(name: str) -> None:
        for i in range(500):
            outlet.write(f"{name} {i} {'x' * 500}\n")

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    outlet.write("and a part")
    outlet.drain(PATIENCE_S)
    os.close(writer)
    taking.join(PATIENCE_S)
    lines = texts[0].splitlines()
    assert lines.pop() == "and a part"
    for name in "abc":
        own = [line.split() for line in lines if line[0] == name]
        assert own == [[name, str(i), "x" * 500] for i in range(500)]


def test_what_nobody_reads_is_counted_and_told() -> None:
    reader, writer = small_pipe()
    outlet = Outlet(writer, 10_000)
    for i in range(1000):
        outlet.write(f"{i:099}\n")  # 100 bytes each; none of these calls may wait
    outlet.drain(0.01)  # nor this
    taken: list[str] = []
    taking = threading.Thread(target=lambda: taken.append(read_all(reader)))
    taking.start()
    outlet.drain(PATIENCE_S)
    outlet.write("it goes on\n")
    outlet.drain(PATIENCE_S)
    os.close(writer)
    taking.join(PATIENCE_S)
    *before, told, after = taken[0].splitlines()
    assert [int(line) for line in before] == [*range(len(before))]
    assert 100 <= len(before) < 160
    found = LOST.search(told)
    assert found is not None
    assert int(found[1]) == 1000 - len(before)
    assert after == "it goes on"


def test_a_closed_pipe_and_a_full_disk() -> None:
    reader, writer = os.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    os.close(reader)
    for fd in (writer, full):
        outlet = Outlet(fd, 1000)
        for _ in range(3):
            outlet.write("a line\n" * 20)
            outlet.drain(PATIENCE_S)
        reader, again = os.pipe()
        os.dup2(again, fd)  # somebody reads again, there is room again
        os.close(again)
        outlet.write("well\n")
        outlet.drain(PATIENCE_S)
        os.close(fd)
        first, told = read_all(reader).splitlines()
        assert (first, told.rpartition(" ")[2]) == ("well", "lost=60")


def test_a_pipe_that_somebody_made_non_blocking() -> None:
    reader, writer = small_pipe()
    os.set_blocking(writer, False)
    outlet = Outlet(writer, 1 << 20)
    outlet.write("".join(f"{i:099}\n" for i in range(500)))
    taken: list[str] = []
    taking = threading.Thread(target=lambda: taken.append(read_all(reader)))
    taking.start()
    outlet.drain(PATIENCE_S)
    os.close(writer)
    taking.join(PATIENCE_S)
    assert [int(line) for line in taken[0].splitlines()] == [*range(500)]


def test_a_child_has_an_outlet_of_its_own() -> None:
    reader, writer = os.pipe()
    outlet = Outlet(writer, 1000)
    outlet.write("parent\n")
    outlet.drain(PATIENCE_S)
    if not (pid := os.fork()):
        outlet.write("child\n")
        outlet.drain(PATIENCE_S)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(writer)
    assert read_all(reader) == "parent\nchild\n"


def test_a_relay_passes_on_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    relay = Relay()
    for text, seen in (("one\ntw", "one\n"), ("o\n", "two\n"), ("the end", "")):
        os.write(relay.writer, text.encode())
        assert relay.pass_on()
        assert capsys.readouterr().err == seen
    os.close(relay.writer)
    assert not relay.pass_on()
    relay.close()
    assert capsys.readouterr().err == "the end\n"


@pytest.mark.parametrize("end", ["sys.exit(3)", "drain(); os._exit(3)", "raise ValueError('last')"])
def test_the_last_line_of_a_process_is_not_lost(end: str) -> None:
    code = (
        "import logging, os, sys, warnings\n"
        "from ridgeline.log import say, set_up\n"
        "from ridgeline.server.outlet import drain, never_block\n"
        "set_up(); never_block()\n"
        "warnings.warn('careful')\n"
        "logging.getLogger('asyncio').error('of a library')\n"
        "say(logging.getLogger('ridgeline.x'), logging.CRITICAL, 'the last line')\n" + end
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S,
        check=False, cwd=ROOT,
    )  # fmt: skip
    places = [done.stderr.index(word) for word in ("careful", "of a library", "the last line")]
    assert places == sorted(places)
    assert ("ValueError: last" in done.stderr) == ("raise" in end)


def test_a_stream_without_a_descriptor_stays(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stderr
    never_block()
    assert sys.stderr is before


# ------------------------------------------------------------------ a server


@contextmanager
def logging_to(stderr: int | IO[bytes], model: Path, folder: Path) -> Iterator[Running]:
    """A server that says something of each request, with a small queue."""
    path = folder / "serve.json"
    path.write_bytes(msgspec.json.encode(fake_config(model, access_log=True)))
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(path)],
        stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        server = Running(process, process.stdout.readline().strip(), path)
        until(server.is_ready, "the server to be ready")
        yield server
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def ask(server: Running, times: int) -> None:
    with server.http as http:
        for _ in range(times):
            body = {"model": "fake", "prompt": "a", "max_tokens": 2}
            assert http.post("/v1/completions", json=body).status_code == 200


def test_a_server_whose_log_nobody_reads(fake_model: Path, tmp_path: Path) -> None:
    reader, writer = small_pipe()
    with logging_to(writer, fake_model, tmp_path) as server:
        os.close(writer)
        ask(server, 100)
        os.kill(server.engine_pid, signal.SIGUSR1)  # the engine writes its stacks
        ask(server, 100)
        log: list[str] = []
        with os.fdopen(reader, encoding="utf-8") as file:
            taking = threading.Thread(target=lambda: log.extend(file))
            taking.start()
            until(lambda: any("are lost" in line for line in log), "the loss to be told")
            ask(server, 1)
            assert server.stop() == 0
            taking.join(PATIENCE_S)
    text = "".join(log)
    found = LOST.findall(text)
    num_requests = text.count(" ridgeline.access ")
    assert len(found) == 1
    assert num_requests < 201
    assert num_requests + int(found[0]) >= 201  # the engine lost some too
    assert "draining" in text  # what came after the loss is there


def test_a_server_whose_log_is_closed_or_full(fake_model: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for fd in (writer, os.open("/dev/full", os.O_WRONLY)):
        with logging_to(fd, fake_model, tmp_path) as server:
            os.close(fd)
            ask(server, 20)
            assert server.stop() == 0


def test_say_does_not_wait_for_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way, from a logger."""
    reader, writer = small_pipe()
    outlet = Outlet(writer, 1000)
    logger = logging.getLogger("ridgeline.test_outlet")
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(outlet)])
    for i in range(1000):
        say(logger, logging.CRITICAL, "again", number=i)
    assert outlet._num_lost > 0
    os.close(reader)
    outlet.drain(PATIENCE_S)
    os.close(writer)
