"""Does the engine process answer only to its wire, and end with it?"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ridgeline.config import EngineConfig
from ridgeline.frames import HEADER, frame, frame_length
from ridgeline.request import FinishReason, Request, SamplingParams
from ridgeline.server.wire import (
    Abort,
    Admitted,
    Command,
    Event,
    Faulted,
    Gauges,
    Loading,
    Ready,
    Refused,
    Start,
    StartFailed,
    Step,
    pack_add,
    read_event,
)
from tests.server.fake_build import reference
from tests.server.running import FAKE, PATIENCE_S, ROOT


class Talk:
    """The other end of an engine process's wire."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.process = process
        self.sock = sock

    def say(self, command: Command) -> None:
        self.sock.sendall(frame(command))

    def hear(self) -> Event:
        return read_event(self._exactly(frame_length(self._exactly(HEADER.size))))

    def hear_ready(self) -> Ready:
        while isinstance(event := self.hear(), Loading):
            pass
        assert isinstance(event, Ready)
        return event

    def _exactly(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            part = self.sock.recv(length - len(data))
            assert part, "the engine hung up"
            data += part
        return data


@contextmanager
def talking() -> Iterator[Talk]:
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S)
    command = [sys.executable, "-m", "ridgeline.server.engine_process", "--builder", FAKE]
    with ours, theirs:
        process = subprocess.Popen(
            [*command, "--fd", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            cwd=ROOT,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))},
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        try:
            yield Talk(process, ours)
        finally:
            process.kill()
            process.wait()


def start(talk: Talk, model: Path, **engine: str) -> None:
    talk.say(Start(EngineConfig(model=str(model), **engine), "CRITICAL"))  # type: ignore[arg-type]


def test_a_whole_conversation(fake_model: Path) -> None:
    with talking() as talk:
        start(talk, fake_model)
        ready = talk.hear_ready()
        assert (ready.vocab_size, ready.max_model_len, ready.pid) == (264, 512, talk.process.pid)
        good = [Request("a-0", (1, 2, 3), SamplingParams(max_tokens=3, temperature=0), 0.0)]
        talk.say(pack_add(7, good, 0.0))
        first = talk.hear()
        assert isinstance(first, Step)
        assert first.replies == (Admitted(7),)
        tokens: list[int] = []
        started: list[str] = []
        finish, gauges = None, Gauges()
        while finish is None:
            event = talk.hear()
            assert isinstance(event, Step)
            started += [row.request_id for row in event.started]
            gauges = event.gauges
            for output in event.outputs:
                tokens += output.new_token_ids
                finish = output.finish_reason
        assert (tokens, finish, started) == (reference((1, 2, 3), 3), FinishReason.LENGTH, ["a-0"])
        assert (gauges.num_used_blocks, gauges.num_running) == (0, 0)
        talk.say(Abort(("a-0", "nobody")))
        assert isinstance(talk.hear(), Step)


def test_all_of_a_group_or_none(fake_model: Path) -> None:
    with talking() as talk:
        start(talk, fake_model)
        talk.hear_ready()
        good = Request("a-0", (1, 2, 3), SamplingParams(max_tokens=3), 0.0)
        bad = Request("a-1", (1, 2, 3), SamplingParams(max_tokens=100_000), 0.0)
        talk.say(pack_add(1, [good, bad], 0.0))
        event = talk.hear()
        assert isinstance(event, Step)
        (reply,) = event.replies
        assert isinstance(reply, Refused)
        assert (reply.ticket, reply.code) == (1, "context_length_exceeded")
        last = talk.hear()
        assert isinstance(last, Step)
        assert (last.gauges.num_running, last.gauges.num_waiting) == (0, 0)


def test_a_model_that_cannot_be_had(fake_model: Path) -> None:
    with talking() as talk:
        start(talk, fake_model, attention_backend="refuse")
        event = talk.hear()
        assert event == StartFailed("this model cannot be had")
        assert talk.process.wait(PATIENCE_S) == 78


def test_a_crash_has_last_words(fake_model: Path) -> None:
    with talking() as talk:
        start(talk, fake_model)
        talk.hear_ready()
        for i in range(3):  # one after the other, so that each has a step of its own
            request = Request(f"a-{i}", tuple(b"!fault"), SamplingParams(max_tokens=3), 0.0)
            talk.say(pack_add(i, [request], 0.0))
            while not (isinstance(event := talk.hear(), Step) and event.outputs):
                pass
            assert event.outputs[0].finish_reason is FinishReason.ERROR
        while not isinstance(event := talk.hear(), Faulted):
            pass
        assert "EngineFault" in event.message
        assert talk.process.wait(PATIENCE_S) == 70


@pytest.mark.parametrize("when", ["before start", "idle", "in a step"])
def test_it_ends_when_the_wire_is_closed(fake_model: Path, when: str) -> None:
    with talking() as talk:
        if when != "before start":
            start(talk, fake_model)
            talk.hear_ready()
        if when == "in a step":
            request = Request("a-0", tuple(b"!hang"), SamplingParams(max_tokens=3), 0.0)
            talk.say(pack_add(1, [request], 0.0))
            talk.hear()
        talk.sock.close()
        assert talk.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", b"\x05\x00\x00\x00hello"])
def test_it_ends_when_the_wire_speaks_nonsense(fake_model: Path, junk: bytes) -> None:
    with talking() as talk:
        start(talk, fake_model)
        talk.hear_ready()
        talk.sock.sendall(junk)
        assert talk.process.wait(PATIENCE_S) == 0
