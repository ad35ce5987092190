"""What does a rank do that is not the driver? It opens the model, builds its share, and runs each
plan that it is sent: `python -m ridgeline.worker`, or `ridgeline worker --join HOST:PORT`.

It says who it is before it loads anything large, so that the driver soon knows who is missing. It
ends as soon as the driver is gone, and the driver ends the group as soon as a rank is gone.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections import deque
from contextlib import suppress
from functools import partial
from time import sleep
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec

from ridgeline import log
from ridgeline.child import die_with_parent, harden
from ridgeline.clock import WallClock
from ridgeline.distributed.agreement import Digest
from ridgeline.distributed.links import (
    SECRET_VARIABLE,
    DriverLink,
    read_secret,
)
from ridgeline.distributed.messages import (
    Build,
    Built,
    DecodeStep,
    ExchangeExperts,
    Failed,
    Open,
    Opened,
    Prepare,
    Result,
    Sampled,
    Score,
    Step,
)
from ridgeline.errors import ConfigError, EngineLost, check
from ridgeline.log import say

if TYPE_CHECKING:  # torch and all that needs it
    from ridgeline.build import OpenModel, Rank
    from ridgeline.executor.warm_up import WarmUp
    from ridgeline.step import StepFuture, StepResult

EXIT_FAULT = 70  # EX_SOFTWARE
EXIT_CONFIG = 78  # EX_CONFIG
CONNECT_S = 10.0
CONNECT_PERIOD_S = 0.2
DRIVER_WAIT_S = 600.0
MOST_LETTERS = 500  # of the last words

M = TypeVar("M", bound=msgspec.Struct)

logger = logging.getLogger("ridgeline.worker")


def run(link: DriverLink, device_index: int | None = None) -> int:
    """Obey until the driver is gone. `device_index`: which of the GPUs that this process sees is
    its own. The exit code."""
    link.listen(on_end=leave)
    try:
        opened = _open(link, device_index)
        rank = _build(link, opened)
        _work(link, rank)
    except ConfigError as fault:
        _say_last(link, Failed(str(fault), is_asked=True))
        return EXIT_CONFIG
    except EngineLost as fault:  # a step failed, and was logged where it did
        _say_last(link, Failed(str(fault)))
    except Exception as fault:
        say(logger, logging.CRITICAL, "a rank failed", trace=True)
        _say_last(link, Failed(f"{type(fault).__name__}: {fault}"[:MOST_LETTERS]))
    return EXIT_FAULT


def leave() -> NoReturn:
    """From any thread: nothing here is worth saving, and memory is the system's."""
    os._exit(0)


def _say_last(link: DriverLink, words: Failed) -> None:
    with suppress(OSError):
        link.send(words)


def _take(link: DriverLink, kind: type[M]) -> M:
    command = link.take()
    check(isinstance(command, kind), "commands come in order", got=type(command).__name__)
    return command  # type: ignore[return-value]


def _open(link: DriverLink, device_index: int | None) -> OpenModel:
    config = _take(link, Open).config
    from ridgeline.build import open_model
    from ridgeline.build_ranks import hardware_of, held_bytes

    name = config.device
    if name != "cpu" and device_index is not None:
        name = f"{name}:{device_index}"
    opened = open_model(config, reads_text=False, device_name=name)
    device = opened.device
    link.whereabouts.memory = partial(held_bytes, device)
    sizes = device.memory_total(), device.memory_free()
    link.send(Opened(device.name, hardware_of(device), *sizes, opened.digest()))
    return opened


def _build(link: DriverLink, opened: OpenModel) -> Rank:
    command = _take(link, Build)
    from ridgeline.build import build_rank
    from ridgeline.build_ranks import rank_placement

    resolved = command.resolved
    placement = rank_placement(link.whereabouts.follow, resolved, link.rank, command.address)
    rank = build_rank(opened, resolved, placement)
    link.send(Built(rank.decoder.num_bytes, rank.kv.num_bytes))
    return rank


def _work(link: DriverLink, rank: Rank) -> NoReturn:
    """Steps, in the order in which they are planned. What they give is read when the driver has
    read it: what fails on the device is seen, and who drafts knows as much of earlier steps as
    there."""
    from ridgeline.build import warm_up_of
    from ridgeline.executor.future import Failed as FailedStep

    warm_up: WarmUp | None = None
    executor = rank.executor
    wave = rank.decoder.placement.wave
    reports = wave is not None and wave.group > 0 and rank.decoder.placement.rank == 0
    futures: deque[tuple[int, StepFuture]] = deque()
    agreed = Digest()

    def take(step_id: int, future: StepFuture) -> StepResult:
        result = future.result()
        if (digest := agreed.add(step_id, result)) is not None:
            link.send(Sampled(step_id, digest))
        return result

    while True:
        command = link.take()
        if isinstance(command, (Step, DecodeStep)):
            while futures and futures[0][0] <= command.known:
                take(*futures.popleft())
            link.whereabouts.begin(command.step_id)
            future = executor.submit(command.plan())
            if isinstance(future, FailedStep):
                raise EngineLost(future.cause)
            if reports:  # where this is served, a step is over when it has been submitted
                link.send(Result(command.step_id, take(command.step_id, future)))
                continue
            futures.append((command.step_id, future))
        elif isinstance(command, Score):
            rank.scorer.logits(command.token_ids)
        elif isinstance(command, Prepare):
            if warm_up is None:
                drafts = command.draft_tokens
                warm_up = warm_up_of(rank.resolved, executor, drafts, is_alone=False)
            warm_up.one()
        elif isinstance(command, ExchangeExperts):
            executor.exchange_experts(command.at, command.pairs)
        else:
            check(False, "a command in its place", got=type(command).__name__)


def main() -> int:
    """A rank that the driver has started on its own machine."""
    parser = argparse.ArgumentParser(prog="ridgeline.worker")
    parser.add_argument("--fd", type=int, required=True, help="our end of the socket pair")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--die-with-parent", action="store_true")
    options = parser.parse_args()
    if options.die_with_parent:
        die_with_parent()
    harden()
    log.set_up("WARNING")
    os.set_inheritable(options.fd, False)
    secret = read_secret()
    del os.environ[SECRET_VARIABLE]
    link = DriverLink(socket.socket(fileno=options.fd), secret, options.rank)
    return run(link, options.rank)


def join(host: str, port: int, rank: int | None) -> int:
    """A rank that somebody has started, perhaps elsewhere. Raises ConfigError."""
    secret = read_secret()
    sock = _connect(host, port)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link = DriverLink(sock, secret, rank)
    say(logger, logging.INFO, "the driver takes us", rank=link.rank, of=link.size)
    return run(link)


def _connect(host: str, port: int) -> socket.socket:
    """To the driver, which may be started later."""
    clock = WallClock()
    until = clock.now() + DRIVER_WAIT_S
    say(logger, logging.INFO, "waiting for the driver", host=host, port=port)
    while True:
        try:
            return socket.create_connection((host, port), timeout=CONNECT_S)
        except OSError as error:
            if isinstance(error, socket.gaierror) or clock.now() > until:
                raise ConfigError(
                    f"{host} port {port}: no driver listens there ({error.strerror or error})"
                ) from None
        sleep(CONNECT_PERIOD_S)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # no interpreter teardown: a device library may hang in it
