"""Who is taken as a rank, who is not, and what is said of one that is gone or stuck?"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch

from ridgeline.config import EngineConfig
from ridgeline.distributed import links
from ridgeline.distributed.links import (
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    DriverLink,
    Ranks,
    Whereabouts,
    read_secret,
)
from ridgeline.distributed.messages import (
    Answer,
    Built,
    Challenge,
    Failed,
    Hello,
    Open,
    Welcome,
    step_message,
)
from ridgeline.errors import ConfigError, EngineLost
from ridgeline.frames import HEADER, frame, read_frame
from ridgeline.request import SamplingParams
from ridgeline.step import BlockCopy, Decodes, NewRequest, ScheduledRequest, StepPlan
from tests.distributed.alone import Alone

SECRET = b"s" * links.SECRET_BYTES
WAIT_S = 20.0


class Members:
    """Ranks of one group, each a link in this process, over pairs of sockets or over TCP."""

    def __init__(self, size: int) -> None:
        pairs = [socket.socketpair() for _ in range(1, size)]
        self.ranks = Ranks(size, SECRET, [ours for ours, _ in pairs])
        self.links = [DriverLink(theirs, SECRET, rank) for rank, (_, theirs) in enumerate(pairs, 1)]
        self.ranks.gather(WAIT_S, "")
        self.ranks.started()
        self.lost: list[str] = []
        self._is_lost = threading.Event()
        self.ranks.on_lost = self._on_lost

    def _on_lost(self, words: str) -> None:
        self.lost.append(words)
        self._is_lost.set()

    def end(self) -> str:
        """What is said when the group is lost."""
        assert self._is_lost.wait(WAIT_S)
        with pytest.raises(EngineLost) as found:
            self.ranks.check()
        assert self.lost == [str(found.value)]
        return self.lost[0]


@pytest.fixture
def three() -> Iterator[Members]:
    members = Members(3)
    yield members
    members.ranks.close()
    for link in members.links:
        link._sock.close()


def test_commands_arrive_in_order_and_answers_by_rank(three: Members) -> None:
    ends: list[int] = []
    for link in three.links:
        link.listen(lambda rank=link.rank: ends.append(rank))  # type: ignore[misc]
    plans = [
        StepPlan(1, (), (NewRequest("a", (1, 2), 2, SamplingParams(seed=3), ((4,),)),)),
        StepPlan(2, (ScheduledRequest("a", 2, 1, ((),), True),), preempted=("b",)).knowing(
            Decodes(("a",), (2,), ())
        ),
        StepPlan(
            3,
            tuple(ScheduledRequest(f"r{i}", i, 1, ((9,) if i == 1 else (),), True) for i in (0, 1)),
            finished=("x",),
        ).knowing(Decodes(("r0", "r1"), (0, 1), (1,))),
        StepPlan(4, (), copies=(BlockCopy("a", 0, 1, 2, 3),)),
    ]
    three.ranks.send(Open(EngineConfig(model="m", tp=3)))
    for plan in plans:
        three.ranks.send(step_message(plan, 0))
    for link in three.links:
        command = link.take()
        assert isinstance(command, Open)
        assert command.config.tp == 3
        for plan in plans:
            got = link.take().plan()  # type: ignore[union-attr]
            assert got == plan
            assert got.decodes == plan.decodes
        link.send(Built(10 * link.rank, 7))
    assert [one.weights for one in three.ranks.wait(Built)] == [10, 20]
    three.ranks.close()
    for _ in range(1000):
        if len(ends) == 2:
            break
        threading.Event().wait(0.01)
    assert sorted(ends) == [1, 2]
    assert not three.lost


def test_the_end_of_a_rank_is_noticed_by_its_socket(three: Members) -> None:
    three.ranks.whereabouts.begin(7)
    three.links[1]._sock.shutdown(socket.SHUT_RDWR)
    words = three.end()
    assert f"rank 2 (host {os.uname().nodename}, pid {os.getpid()}) has ended" in words
    assert "rank 0 is at step 7" in words
    with pytest.raises(EngineLost):
        three.ranks.wait(Built)


@pytest.mark.parametrize(("is_asked", "kind"), [(False, EngineLost), (True, ConfigError)])
def test_a_rank_says_why_it_ends(three: Members, is_asked: bool, kind: type[Exception]) -> None:
    three.links[0].send(Failed("no such file", is_asked))
    with pytest.raises(kind, match=r"rank 1 \(host .*\): no such file"):
        three.ranks.wait(Built)


def test_who_does_not_answer_is_stuck(three: Members) -> None:
    three.ranks.overdue_s = 0.2
    three.links[0].listen(lambda: None)
    with three.ranks.waiting():
        three.ranks.whereabouts.begin(5)
        words = three.end()
    assert words.startswith("rank 2 (host ")
    assert "does not answer; rank 0 has been at step 5 for " in words


def test_who_is_furthest_behind_is_stuck(three: Members) -> None:
    three.ranks.overdue_s = 0.2
    for link, num_calls in zip(three.links, (4, 3), strict=True):
        link.whereabouts.begin(5)
        link.whereabouts.num_calls, link.whereabouts.call = num_calls, "all_reduce"
        link.listen(lambda: None)
    with three.ranks.waiting():
        own = three.ranks.whereabouts
        own.begin(5)
        own.num_calls, own.call = 4, "all_gather"
        words = three.end()
    assert words.startswith("rank 2 (host ")
    assert "is stuck at step 5, last collective all_reduce number 3; rank 0 has been at" in words
    assert "all_gather number 4" in words


def test_a_step_that_gets_on_is_not_stuck_however_long_it_takes(three: Members) -> None:
    three.ranks.overdue_s = 0.5
    with three.ranks.waiting():
        for _ in range(12):
            three.ranks.whereabouts.num_calls += 1
            threading.Event().wait(0.1)
    three.ranks.check()


def test_what_waits_is_timed_once() -> None:
    """A collective that calls another is not two; one that counts for itself is asked."""
    found, counting = Whereabouts(), Alone()
    alone = found.follow(Alone())
    x_TE = torch.ones(2, 4)
    alone.all_reduce_norm(x_TE, x_TE.clone(), torch.ones(4), 1e-6)
    assert (found.num_calls, found.call) == (2, "all_reduce")
    timed_s = found.waited_s
    assert timed_s > 0
    counting.waited_s = lambda: 7.0  # type: ignore[method-assign]
    found.follow(counting).all_reduce(x_TE)
    assert found.waited_s == timed_s + 7.0


# --------------------------------------------------------------------------- who is taken


@pytest.fixture
def open_group() -> Iterator[tuple[Ranks, tuple[str, int]]]:
    listener = socket.create_server(("127.0.0.1", 0))
    ranks = Ranks(3, SECRET, listener=listener)
    yield ranks, listener.getsockname()
    ranks.close()


def call(address: tuple[str, int], secret: bytes = SECRET, rank: int | None = None) -> DriverLink:
    return DriverLink(socket.create_connection(address, WAIT_S), secret, rank)


def test_ranks_take_the_numbers_that_are_free(
    open_group: tuple[Ranks, tuple[str, int]],
) -> None:
    ranks, address = open_group
    second = call(address, rank=2)
    assert (second.rank, second.size) == (2, 3)
    for rank in (2, 3, 0):
        with pytest.raises(ConfigError, match=rf"rank {rank} is taken, or there is none.*\[1\]"):
            call(address, rank=rank)
    with pytest.raises(ConfigError, match="its secret is another; give both sides the same one"):
        call(address, b"t" * links.SECRET_BYTES)
    assert "it is version 0.0.1 and the driver" in _version_of_hello(address)
    with pytest.raises(
        ConfigError, match=r"rank 1 of 3 did not report within 0.2 s; hint; the last"
    ):
        ranks.gather(0.2, "hint")
    first = call(address)
    assert first.rank == 1
    ranks.gather(WAIT_S, "hint")
    assert len(ranks.hosts()) == 3
    with pytest.raises(ConfigError, match="all 3 ranks are there"):
        call(address)
    for link in (first, second):
        link._sock.close()


def _version_of_hello(address: tuple[str, int]) -> str:
    """What a rank of another version is told."""
    with closing(socket.create_connection(address, WAIT_S)) as sock:
        read_frame(sock)
        sock.sendall(frame(Hello("0.0.1", b"", b"", -1, "h", 1)))
        told = msgspec.msgpack.decode(read_frame(sock))
        assert told[0] == "refused"
        return str(told[1])


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        frame(Answer(1, 1, 1, "")),
        HEADER.pack(links.GREETING_BYTES + 1),
        b"\x01\x00\x00\x00\xc1",
    ],
    ids=["HTTP", "no greeting", "too much", "no msgpack"],
)
def test_strangers_are_sent_away(open_group: tuple[Ranks, tuple[str, int]], said: bytes) -> None:
    ranks, address = open_group
    with closing(socket.create_connection(address, WAIT_S)) as sock:
        read_frame(sock)
        sock.sendall(said)
        told = b"".join(iter(lambda: sock.recv(1 << 16), b""))
        assert b"refused" in told
    link = call(address)
    assert link.rank == 1
    ranks.check()
    link._sock.close()


def test_a_driver_must_know_the_secret_too() -> None:
    ours, theirs = socket.socketpair()
    problem: list[Exception] = []

    def greet() -> None:
        try:
            DriverLink(theirs, SECRET)
        except ConfigError as error:
            problem.append(error)

    thread = threading.Thread(target=greet)
    thread.start()
    with closing(ours):
        ours.sendall(frame(Challenge("1", b"n")))
        read_frame(ours)
        ours.sendall(frame(Welcome(b"wrong", 1, 2)))
        thread.join(WAIT_S)
    assert "the driver does not know the secret" in str(problem[0])


# ----------------------------------------------------------------------------- the secret


def test_the_secret_is_read_from_where_only_its_owner_reads(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET.hex() + "\n")
    file.chmod(0o600)
    assert read_secret({SECRET_FILE_VARIABLE: str(file)}) == SECRET
    assert read_secret({SECRET_VARIABLE: SECRET.hex()}) == SECRET
    file.chmod(0o640)
    refusals: list[tuple[dict[str, str], str]] = [
        ({}, f"set {SECRET_VARIABLE} to the same 64 hexadecimal digits"),
        ({SECRET_VARIABLE: "abc"}, f"{SECRET_VARIABLE} is not 64 hexadecimal digits"),
        ({SECRET_FILE_VARIABLE: str(file)}, "can be read by others; chmod 600 it"),
        ({SECRET_FILE_VARIABLE: str(tmp_path / "none")}, "cannot be read"),
    ]
    for environ, words in refusals:
        with pytest.raises(ConfigError, match=words):
            read_secret(environ)
