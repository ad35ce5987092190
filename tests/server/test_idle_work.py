"""What was left of the start is done while nobody is served, and never before somebody who is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from ridgeline.build import Built, build
from ridgeline.clock import WallClock
from ridgeline.config import EngineConfig
from ridgeline.request import Request, SamplingParams
from ridgeline.server.engine_loop import EngineLoop
from ridgeline.server.wire import Command, Event, pack_add
from tests.tiny_model import make_tiny_model


class Wire:
    """Keeps whether it was waited on; has nothing to say but once."""

    def __init__(self, *commands: Command) -> None:
        self.commands = list(commands)
        self.waits: list[bool] = []

    def take(self, *, wait_s: float) -> list[Command]:
        self.waits.append(wait_s > 0)
        taken, self.commands = self.commands, []
        return taken

    def send(self, event: Event) -> None:
        pass


class Work:
    def __init__(self, num: int) -> None:
        self.left = num

    def one(self) -> bool:
        self.left -= 1
        return self.left >= 0


def built(tmp_path: Path) -> Built:
    folder = make_tiny_model(tmp_path)
    return build(EngineConfig(model=str(folder), device="cpu", num_blocks=20))


def test_idle_turns_do_it_one_by_one_and_then_wait(tmp_path: Path) -> None:
    work, wire, told = Work(2), Wire(), []

    @contextmanager
    def first_time() -> Iterator[None]:
        told.append(work.left)
        yield

    heartbeat = SimpleNamespace(first_time=first_time)
    served = replace(built(tmp_path), warm_up=work)  # type: ignore[arg-type]
    loop = EngineLoop(served, wire, WallClock(), heartbeat)  # type: ignore[arg-type]
    for _ in range(4):
        loop.turn()
    assert work.left == -1
    assert wire.waits == [False, False, True, True]
    assert told == [2, 1, 0]  # each may compile kernels, and the HTTP process knows


def test_while_somebody_is_served_nothing_of_it_is_done(tmp_path: Path) -> None:
    request = Request("q-0", (1, 2, 3), SamplingParams(max_tokens=4, seed=0), 0.0)
    work, wire = Work(10), Wire(pack_add(0, [request], 0.0))
    served = replace(built(tmp_path), warm_up=work)  # type: ignore[arg-type]
    loop = EngineLoop(served, wire, WallClock())
    loop.turn()  # takes it in
    left = work.left
    while not served.engine.is_idle:
        loop.turn()
    assert work.left == left
    assert wire.waits[1:] == [False] * (len(wire.waits) - 1)


def test_nothing_left_is_nothing_to_do(tmp_path: Path) -> None:
    wire = Wire()
    served = built(tmp_path)
    assert served.warm_up is None  # a CPU captures when it needs to
    EngineLoop(served, wire, WallClock()).turn()
    assert wire.waits == [True]
