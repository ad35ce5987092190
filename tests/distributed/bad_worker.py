"""A rank that comes to grief once, where a test says: `python -m tests.distributed.bad_worker` and
the arguments of a rank, or `--join HOST:PORT`.

The folder that SPOIL names has a file `spoil` with "PHASE ACT" while that is still to happen, and
then a file `at` with the moment. PHASE is one of PHASES, ACT is kill, stop or raise. "new diverge":
it draws other numbers for the next new requests.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Empty
from threading import Event
from typing import Any

import msgspec

from ridgeline import worker
from ridgeline.asked import read_address
from ridgeline.config import EngineConfig
from ridgeline.distributed import launch_local
from ridgeline.distributed.launch_ray import RankActor
from ridgeline.distributed.links import CALLS, DriverLink, Whereabouts
from ridgeline.distributed.messages import Challenge, Command, DecodeStep, Failed, Prepare, Step
from ridgeline.step import NewRequest

SPOIL = "RIDGELINE_TEST_SPOIL"
PHASES = (
    "start", "hello", "open", "meet", "load", "warm-up", "idle", "step", "collective", "shutdown",
)  # fmt: skip
CALM_S = 0.3  # without a command: no step is on its way


def reach(phase: str) -> str:
    """Come to grief if it is to be here; what has happened, for who must raise by himself."""
    folder = Path(os.environ[SPOIL])
    try:
        wanted, _, act = (folder / "spoil").read_text().partition(" ")
    except FileNotFoundError:
        return ""
    if wanted != phase:
        return ""
    (folder / "spoil").unlink()
    (folder / "at.part").write_text(f"{time.monotonic()} {os.getpid()}")
    (folder / "at.part").rename(folder / "at")
    if act == "raise":
        raise RuntimeError("broken on purpose")
    if act != "diverge":
        os.kill(os.getpid(), signal.SIGKILL if act == "kill" else signal.SIGSTOP)
    return act


def before(module: Any, name: str, phase: str) -> None:
    found: Callable[..., Any] = getattr(module, name)

    def spoilt(*args: Any, **named: Any) -> Any:
        reach(phase)
        return found(*args, **named)

    setattr(module, name, spoilt)


def spoil() -> None:
    """All phases but the start of the process."""
    read, leave, follow, opens = (
        DriverLink._read, worker.leave, Whereabouts.follow, worker._open,
    )  # fmt: skip
    inbox: list[Any] = []
    has_stepped = False

    def spoilt_read(link: DriverLink) -> Command:
        command = read(link)
        if isinstance(command, Challenge):
            reach("hello")
        return command

    def spoilt_open(*args: Any) -> Any:
        reach("open")
        from ridgeline import build, build_ranks  # which read torch

        before(build_ranks, "rank_placement", "meet")
        before(build, "build_rank", "load")
        return opens(*args)

    def spoilt_take(link: DriverLink) -> Command:
        nonlocal has_stepped
        inbox[:] = [link._inbox]
        while True:
            try:
                command = link._inbox.get(timeout=CALM_S)
                break
            except Empty:
                if has_stepped:
                    reach("idle")
        if isinstance(command, Failed):
            raise RuntimeError("broken on purpose")
        if isinstance(command, Prepare):
            reach("warm-up")
        if isinstance(command, (Step, DecodeStep)):
            reach("step")
            has_stepped = True
        if isinstance(command, Step) and command.new and reach("new"):
            command = msgspec.structs.replace(command, new=tuple(map(other_seed, command.new)))
        return command

    def spoilt_leave() -> None:
        try:
            reach("shutdown")
        except RuntimeError:
            inbox[0].put(Failed(""))
            Event().wait()
        leave()

    def spoilt_follow(self: Whereabouts, collective: Any) -> Any:
        for name in CALLS:
            if (call := getattr(collective, name, None)) is not None:
                setattr(collective, name, in_a_step(self, call))
        return follow(self, collective)

    DriverLink._read = spoilt_read  # type: ignore[method-assign,assignment]
    DriverLink.take = spoilt_take  # type: ignore[method-assign,assignment]
    Whereabouts.follow = spoilt_follow  # type: ignore[method-assign]
    worker._open = spoilt_open  # type: ignore[assignment]
    worker.leave = spoilt_leave  # type: ignore[assignment]


def in_a_step(at: Whereabouts, call: Callable[..., Any]) -> Callable[..., Any]:
    """The third collective of a step, and those after it."""
    first = [0, 0]

    def spoilt(*args: Any, **named: Any) -> Any:
        if at.step_id != first[0]:
            first[:] = at.step_id, at.num_calls
        if at.step_id and at.num_calls - first[1] >= 2:
            reach("collective")
        return call(*args, **named)

    return spoilt


def other_seed(new: NewRequest) -> NewRequest:
    seed = (new.sampling.seed or 0) + 1
    return replace(new, sampling=msgspec.structs.replace(new.sampling, seed=seed))


def build(config: EngineConfig, progress: Any) -> Any:
    """The engine of a server whose ranks are these."""
    from ridgeline.build import build_without_text

    launch_local.WORKER = (sys.executable, "-m", "tests.distributed.bad_worker")
    return build_without_text(config, progress)


class BadActor(RankActor):
    """The same in a process of Ray's."""

    def run(self, host: str, port: int, secret: str, rank: int) -> int:
        reach("start")
        spoil()
        return super().run(host, port, secret, rank)


def main() -> int:
    reach("start")
    spoil()
    if sys.argv[1] == "--join":
        return worker.join(*read_address(sys.argv[2]), None)
    return worker.main()


if __name__ == "__main__":
    os._exit(main())
