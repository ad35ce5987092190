"""How does the driver of a group reach its other ranks, and which of them is gone or stuck?

Frames of `ridgeline.frames` over one stream socket for each rank: a pair of Unix sockets on one
host, TCP between hosts. A closed socket is the end of whoever had its other end; on each side a
thread listens, beside the one that steps, and a rank's also answers where that is (`Ask`).
"""

from __future__ import annotations

import hmac
import logging
import os
import platform
import secrets
import selectors
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ridgeline import __version__
from ridgeline.clock import WallClock
from ridgeline.distributed.agreement import PERIOD, Agreement
from ridgeline.distributed.messages import (
    COMMANDS,
    SAID,
    Answer,
    Ask,
    Challenge,
    Command,
    Failed,
    Hello,
    Refused,
    Result,
    Said,
    Sampled,
    Welcome,
)
from ridgeline.errors import ConfigError, EngineLost, RidgelineError
from ridgeline.frames import HEADER, BrokenWire, frame, frame_length, read_frame
from ridgeline.log import say
from ridgeline.observe.run import RankStatus
from ridgeline.step import PartialResults, StepResult

if TYPE_CHECKING:  # a rank says who it is before it loads torch
    from ridgeline.distributed.placement import Collective

SECRET_VARIABLE = "RIDGELINE_RANK_SECRET"
SECRET_FILE_VARIABLE = "RIDGELINE_RANK_SECRET_FILE"
SECRET_BYTES = 32
GREETING_BYTES = 64 << 10  # a stranger may send so much
GREETING_S = 10.0  # and take so long
MAX_STRANGERS = 64
TURN_S = 0.1  # of the thread that listens
LATE_S = 2.0  # a turn that takes so long says nothing of the others
ASK_S = 0.5  # between two questions where a rank is
LOOK_S = 0.3  # between two looks at who has ended before it came
TOLD_S = 5.0  # between two lines about who is missing
ANSWER_S = 0.8  # for what a rank is at
EXIT_S = 0.3  # for the last words of a rank that has closed its socket
OVERDUE_S = 10.0  # no rank may be in one place of a step for longer, see Ranks.overdue_s
# While it starts, a rank may be silent for so long: libraries are loaded without letting go of
# Python, and the answering thread needs that.
START_ANSWER_S = 60.0
IDLE_ANSWER_S = 10.0  # nobody waits for it; a busy machine may leave a rank without a turn
READ_BYTES = 1 << 16

M = TypeVar("M", bound=msgspec.Struct)

logger = logging.getLogger(__name__)


def read_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """What all ranks of a group know, from the environment or from a file that nobody else may
    read. Raises ConfigError."""
    text = environ.get(SECRET_VARIABLE, "")
    where, path = SECRET_VARIABLE, environ.get(SECRET_FILE_VARIABLE)
    if path is not None and not text:
        where = f"{SECRET_FILE_VARIABLE} {path}"
        try:
            if os.stat(path).st_mode & 0o077:
                raise ConfigError(f"{where} can be read by others; chmod 600 it")
            text = Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} cannot be read ({error})") from None
    if not text:
        raise ConfigError(
            f"ranks that join need a secret: set {SECRET_VARIABLE} to the same"
            f" {2 * SECRET_BYTES} hexadecimal digits everywhere (openssl rand -hex {SECRET_BYTES}),"
            f" or {SECRET_FILE_VARIABLE} to a file with them"
        )
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{where} is not {2 * SECRET_BYTES} hexadecimal digits")
    return secret


def _proof(secret: bytes, who: str, *nonces: bytes) -> bytes:
    return hmac.digest(secret, who.encode() + b"".join(nonces), "sha256")


# ------------------------------------------------------------------------ where a rank is


@dataclass(slots=True)
class Whereabouts:
    """Where the thread that steps is: the last step begun, how many collectives it has entered,
    and the last of them; beside that what it has done so far. `memory`: bytes that it holds."""

    step_id: int = 0
    num_calls: int = 0
    call: str = ""
    num_steps: int = 0
    memory: Callable[[], int] = int
    _called_s: float = 0.0
    _counting: list[Collective] = field(default_factory=list)

    def begin(self, step_id: int) -> None:
        self.step_id = step_id
        self.num_steps += 1

    @property
    def waited_s(self) -> float:
        """Seconds in collectives."""
        return self._called_s + sum(one.waited_s() or 0.0 for one in self._counting)

    @property
    def mark(self) -> tuple[int, int]:
        return self.step_id, self.num_calls

    def follow(self, collective: Collective) -> Collective:
        """The collective, which from now on notes here what is called."""
        counts_itself = collective.waited_s() is not None
        if counts_itself:
            self._counting.append(collective)
        for name in CALLS:
            if (call := getattr(collective, name, None)) is not None:
                setattr(collective, name, self._noting(name, call, counts_itself))
        return collective

    def _noting(
        self, name: str, call: Callable[..., Any], counts_itself: bool
    ) -> Callable[..., Any]:
        now = WallClock().now

        def noted(*args: Any, **named: Any) -> Any:
            self.call = name
            self.num_calls += 1
            if counts_itself:
                return call(*args, **named)
            before, began = self._called_s, now()
            try:
                return call(*args, **named)
            finally:
                if self._called_s == before:  # else another one was called in it
                    self._called_s += now() - began

        return noted

    def answer(self, number: int) -> Answer:
        return Answer(
            number, self.step_id, self.num_calls, self.call,
            self.waited_s, self.num_steps, self.memory(),
        )  # fmt: skip


CALLS = (
    "all_reduce", "all_reduce_norm", "all_gather", "gather_columns", "broadcast", "send", "recv",
)  # fmt: skip


def _words(step_id: int, num_calls: int, call: str) -> str:
    """Of one place."""
    where = f"step {step_id}" if step_id else "the start"
    return f"{where}, last collective {call} number {num_calls}" if call else where


# -------------------------------------------------------------------------- a rank's side


class DriverLink:
    """The way to the driver. ConfigError when it does not want this rank."""

    def __init__(self, sock: socket.socket, secret: bytes, rank: int | None = None) -> None:
        self.whereabouts = Whereabouts()
        self._sock = sock
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._sending = Lock()
        sock.settimeout(GREETING_S)
        try:
            self.rank, self.size = self._greet(secret, rank)
        except ConfigError:
            sock.close()
            raise
        except (OSError, EOFError, msgspec.DecodeError, BrokenWire) as problem:
            sock.close()
            reason = f"{type(problem).__name__}: {problem}" if str(problem) else "it hung up"
            raise ConfigError(f"who listens there is no driver of ranks ({reason})") from None
        sock.settimeout(None)

    def _greet(self, secret: bytes, rank: int | None) -> tuple[int, int]:
        challenge = self._read()
        if not isinstance(challenge, Challenge):
            raise BrokenWire("it does not ask who we are")
        nonce = secrets.token_bytes(SECRET_BYTES)
        proof = _proof(secret, "rank", challenge.nonce, nonce)
        where = -1 if rank is None else rank
        self.send(Hello(__version__, nonce, proof, where, platform.node(), os.getpid()))
        answer = self._read()
        if isinstance(answer, Refused):
            raise ConfigError(f"the driver refuses this rank: {answer.reason}")
        expected = _proof(secret, "driver", nonce, challenge.nonce)
        if not isinstance(answer, Welcome) or not hmac.compare_digest(answer.proof, expected):
            raise ConfigError("the driver does not know the secret; give both sides the same one")
        return answer.rank, answer.size

    def _read(self) -> Command:
        return COMMANDS.decode(read_frame(self._sock))

    def listen(self, on_end: Callable[[], None]) -> None:
        """Read from now on, in a thread of its own, which also answers where this rank is. `on_end`
        is called there when the driver is gone."""
        Thread(target=self._listen, args=(on_end,), name="driver", daemon=True).start()

    def _listen(self, on_end: Callable[[], None]) -> None:
        try:
            while True:
                command = self._read()
                if isinstance(command, Ask):
                    self.send(self.whereabouts.answer(command.number))
                else:
                    self._inbox.put(command)
        except (OSError, EOFError, BrokenWire, msgspec.DecodeError):
            self._sock.close()
            on_end()

    def take(self) -> Command:
        """The next one; waits for it."""
        return self._inbox.get()

    def send(self, message: Said) -> None:
        with self._sending:
            self._sock.sendall(frame(message))


# ----------------------------------------------------------------------- the driver's side


class Processes:
    """The ranks as processes. These are not ours: others start them, and they end by themselves
    when their socket is closed."""

    host = ""  # where all ranks reach rank 0
    wait_s = 600.0  # for them to say who they are
    how = "start each of them"  # what helps when one does not

    def early_end(self) -> str:
        """Which have ended without a word on a socket, and how; empty when none is known to."""
        return ""

    def kill(self) -> None:
        """All of them, and wait until they are gone."""

    def last_words(self, rank: int) -> str:
        """How it ended and what it wrote last; empty when it is not known."""
        return ""


@dataclass(slots=True, eq=False)
class _Peer:
    """Somebody at the other end of a socket; `hello` once it has proven that it belongs to us."""

    sock: socket.socket
    since: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES))
    hello: Hello | None = None
    rank: int = -1
    data: bytearray = field(default_factory=bytearray)
    answer: Answer | None = None
    sending: Lock = field(default_factory=Lock)

    def frames(self) -> Iterator[bytes]:
        """The payloads that have come whole."""
        data = self.data
        while len(data) >= HEADER.size:
            length = frame_length(bytes(data[: HEADER.size]))
            if self.hello is None and length > GREETING_BYTES:
                raise BrokenWire("a stranger says too much")
            end = HEADER.size + length
            if len(data) < end:
                return
            payload = bytes(data[HEADER.size : end])
            del data[:end]
            yield payload

    @property
    def words(self) -> str:
        if self.hello is None:
            return f"rank {self.rank}"
        return f"rank {self.rank} (host {self.hello.host}, pid {self.hello.pid})"


class Ranks:
    """The links to all ranks but rank 0, which is here, and the thread that listens to them.

    Any of them that ends, fails or is stuck is the end of the group (`lost`): a collective cannot
    be half of one. Those that we have started are killed then, and `on_lost` is called, in the
    thread that listens. A rank is stuck when rank 0 has been in one place of a step for more than
    `overdue_s`; who is furthest behind, or does not even answer, is to blame.
    """

    def __init__(
        self,
        size: int,
        secret: bytes,
        socks: Collection[socket.socket] = (),
        processes: Processes | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self.size = size
        self.whereabouts = Whereabouts()
        self.overdue_s = OVERDUE_S
        self.lost: RidgelineError | None = None
        self.on_lost: Callable[[str], None] | None = None
        self.abandon: Callable[[], None] | None = None  # what rank 0's device waits for
        self._secret = secret
        self.processes = processes or Processes()
        self._listener = listener
        self._clock = WallClock()
        self._selector = selectors.DefaultSelector()
        self._members: dict[int, _Peer] = {}
        self._strangers: set[_Peer] = set()
        self._said: dict[type, dict[int, Any]] = {}
        self.results = PartialResults()
        self._refusal = ""
        self._changed = Condition()
        self._is_closed = False
        self._waits_since: float | None = None
        self._seen: tuple[tuple[int, int], float] = ((0, 0), 0.0)
        self._question = 0
        self._asked_at: float | None = None
        self._is_starting = True
        self._prepared_at, self._turned_at = -inf, self._clock.now()
        self.agreement = Agreement([range(size)])
        for rank, sock in enumerate(socks, 1):
            self._meet(sock, rank)
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread = Thread(target=self._listen, name="ranks", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ for who drives

    def gather(self, wait_s: float, how: str) -> None:
        """Wait until all are there. ConfigError names those that are not, and `how` to start
        one."""
        clock, others = self._clock, range(1, self.size)
        until, told = clock.now() + wait_s, clock.now()
        with self._changed:
            while missing := [rank for rank in others if rank not in self._members]:
                self._check()
                now = clock.now()
                names = ", ".join(map(str, missing))
                if ended := self.processes.early_end():
                    raise ConfigError(f"ranks cannot be had: {ended}")
                if now >= until:
                    last = f"; the last one that came was refused: {self._refusal}"
                    raise ConfigError(
                        f"rank {names} of {self.size} did not report within {wait_s:g} s; {how}"
                        + (last if self._refusal else "")
                    )
                if now - told >= TOLD_S:
                    told = now
                    say(logger, logging.WARNING, "waiting for ranks", missing=names, of=self.size)
                self._changed.wait(min(LOOK_S, until - now))
        for rank, peer in sorted(self._members.items()):
            found = peer.hello
            if found is not None:
                say(logger, logging.INFO, "rank", number=rank, host=found.host, pid=found.pid)

    def started(self) -> None:
        """All of them are ready for steps."""
        self._is_starting, self._asked_at = False, None

    def preparing(self) -> None:
        """They may be silent for longer from now on: kernels may be compiled."""
        self._prepared_at = self._clock.now()

    def sampled(self, step_id: int, digest: bytes, rank: int = 0) -> None:
        """The digest of a rank's tokens up to this step."""
        with self._changed:
            apart = self.agreement.add(rank, step_id, digest)
        if apart:
            who = " and ".join(map(self.words, apart))
            steps = f"steps {step_id - PERIOD + 1} to {step_id}"
            have = "has" if len(apart) == 1 else "have"
            whose = " than the other ranks" if len(apart) == 1 else ""
            self._lose(EngineLost(f"{who} {have} sampled other tokens{whose} in {steps}"))

    def status(self) -> tuple[RankStatus, ...]:
        """Of all ranks, as they said last; rank 0's own is of now."""
        said = {rank: peer.answer for rank, peer in self._members.items()}
        rows = [(0, self.whereabouts.answer(0)), *sorted(said.items())]
        hosts = self.hosts()
        return tuple(
            RankStatus(
                rank, hosts[rank], at.num_steps, at.num_calls, at.call, at.waited_s, at.memory_bytes
            )
            for rank, at in rows
            if at is not None
        )

    def send(self, message: Command) -> None:
        """To all. EngineLost when one is gone."""
        self.send_each([message] * self.size)

    def send_each(self, messages: Sequence[Command]) -> None:
        """To each rank its own; that of rank 0 goes nowhere."""
        data: dict[int, bytes] = {}
        for rank, peer in self._members.items():
            message = messages[rank]
            if id(message) not in data:
                data[id(message)] = frame(message)
            try:
                with peer.sending:
                    peer.sock.sendall(data[id(message)])
            except OSError:
                self.raise_lost()

    def wait(self, kind: type[M]) -> list[M]:
        """What each of them says of this kind, in the order of ranks."""
        with self._changed:
            said = self._said.setdefault(kind, {})
            while len(said) < self.size - 1:
                self._check()
                self._changed.wait()
            del self._said[kind]
        return [said[rank] for rank in sorted(said)]

    def result(self, step_id: int, number: int) -> StepResult:
        """What so many ranks say of this step."""
        with self._changed:
            while not self.results.has(step_id, number):
                self._check()
                self._changed.wait()
            return self.results.take(step_id)

    def check(self) -> None:
        """Raises what ended the group, if it has ended."""
        with self._changed:
            self._check()

    def _check(self) -> None:
        if self.lost is not None:
            raise type(self.lost)(str(self.lost))

    def raise_lost(self, cause: str = "") -> None:
        """Something went wrong here, most likely because a rank is gone: says which as soon as it
        is known, else that it is rank 0's own fault."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None, ANSWER_S)
        self._lose(EngineLost(f"rank 0 failed: {cause or 'a rank does not listen'}"))
        self.check()

    def words(self, rank: int) -> str:
        """Who that is."""
        return self._members[rank].words if rank else f"rank 0 (host {platform.node()})"

    def hosts(self) -> list[str]:
        """In the order of ranks, rank 0 first."""
        met = [self._members[rank].hello for rank in range(1, self.size)]
        return [platform.node(), *("" if hello is None else hello.host for hello in met)]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """In this context rank 0 computes, or waits for others."""
        self._waits_since = self._clock.now()
        try:
            yield
        finally:
            self._waits_since = None

    def close(self) -> None:
        """All ranks end."""
        self._is_closed = True
        for peer in (*self._members.values(), *self._strangers):
            with suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.processes.kill()
        for peer in (*self._members.values(), *self._strangers):
            peer.sock.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

    # ------------------------------------------------------------------ the thread

    def _listen(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select(TURN_S):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._hear(key.data)
            now = self._clock.now()
            for peer in [p for p in self._strangers if now - p.since > GREETING_S]:
                if peer.rank < 0:
                    self._drop(peer)
            if self.lost is None:
                self._watch(now)

    def _accept(self) -> None:
        listener = self._listener
        with suppress(OSError):
            if listener is None:
                return
            sock, _ = listener.accept()
            if len(self._strangers) >= MAX_STRANGERS:
                sock.close()
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._meet(sock)

    def _meet(self, sock: socket.socket, rank: int = -1) -> None:
        """`rank`: of a process that we have started."""
        peer = _Peer(sock, self._clock.now(), rank=rank)
        sock.setblocking(True)
        sock.sendall(frame(Challenge(__version__, peer.nonce)))
        self._strangers.add(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)

    def _hear(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._ended(peer)
            return
        peer.data += data
        try:
            for payload in peer.frames():
                self._take(peer, SAID.decode(payload))
        except (BrokenWire, msgspec.DecodeError) as fault:
            if peer.hello is None:
                self._refuse(peer, f"what it said is no greeting ({fault})")
            else:
                self._lose(EngineLost(f"{peer.words} broke the protocol: {fault}"))

    def _take(self, peer: _Peer, said: Said) -> None:
        if isinstance(said, Hello):
            self._greet(peer, said)
        elif peer.hello is None:
            raise BrokenWire("it did not say who it is")
        elif isinstance(said, Answer):
            peer.answer = said
        elif isinstance(said, Sampled):
            self.sampled(said.step_id, said.digest, peer.rank)
        elif isinstance(said, Result):
            with self._changed:
                self.results.add(said.step_id, peer.rank, said.result)
                self._changed.notify_all()
        elif isinstance(said, Failed):
            kind = ConfigError if said.is_asked else EngineLost
            self._lose(kind(f"{peer.words}: {said.message}"))
        else:
            with self._changed:
                self._said.setdefault(type(said), {})[peer.rank] = said
                self._changed.notify_all()

    def _greet(self, peer: _Peer, hello: Hello) -> None:
        proof = _proof(self._secret, "rank", peer.nonce, hello.nonce)
        free = [rank for rank in range(1, self.size) if rank not in self._members]
        rank = hello.rank
        if hello.version != __version__:
            why = f"it is version {hello.version} and the driver {__version__}; install the same"
        elif not hmac.compare_digest(proof, hello.proof):
            why = "its secret is another; give both sides the same one"
        elif peer.hello is not None or not free:
            why = f"all {self.size} ranks are there"
        elif rank not in (-1, *free):
            why = f"rank {rank} is taken, or there is none; ranks {free} of {self.size} are free"
        else:
            peer.hello, peer.rank = hello, free[0] if rank < 0 else rank
            proof = _proof(self._secret, "driver", hello.nonce, peer.nonce)
            with suppress(OSError):  # it will be seen to have ended
                peer.sock.sendall(frame(Welcome(proof, peer.rank, self.size)))
            with self._changed:
                self._strangers.discard(peer)
                self._members[peer.rank] = peer
                self._asked_at = None  # it has not been asked yet
                self._changed.notify_all()
            return
        self._refuse(peer, why)

    def _refuse(self, peer: _Peer, why: str) -> None:
        self._refusal = why
        say(logger, logging.WARNING, "a rank is refused", reason=why)
        with suppress(OSError):
            peer.sock.sendall(frame(Refused(why)))
        self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.sock)
        self._strangers.discard(peer)
        peer.sock.close()

    def _ended(self, peer: _Peer) -> None:
        if peer.rank < 0:
            self._drop(peer)
            return
        self._selector.unregister(peer.sock)
        if self._is_closed:
            return
        words = self.processes.last_words(peer.rank)
        at = self.whereabouts
        here = f"; rank 0 is at {_words(at.step_id, at.num_calls, at.call)}" if at.step_id else ""
        self._lose(EngineLost(f"{peer.words} has ended{words and f' ({words})'}{here}"))

    def _lose(self, what: RidgelineError) -> None:
        with self._changed:
            if self.lost is not None or self._is_closed:
                return
            self.lost = what
        say(logger, logging.ERROR, "the group of ranks is lost", reason=what)
        self.processes.kill()
        if self.abandon is not None:
            self.abandon()
        with self._changed:
            self._changed.notify_all()
        if self.on_lost is not None:
            self.on_lost(str(what))

    # ------------------------------------------------------------------ who is stuck

    def _watch(self, now: float) -> None:
        if now - self._turned_at > LATE_S:  # we were stopped, and perhaps the others, too
            self._asked_at, self._seen = None, (self._seen[0], now)
        self._turned_at = now
        since, mark = self._waits_since, self.whereabouts.mark
        if since is None or mark != self._seen[0]:
            self._seen = mark, now
        asked_at = self._asked_at
        if asked_at is None or (now - asked_at >= ASK_S and not self._silent()):
            self._ask(now)
            return
        if not self._is_starting and since is not None:
            stays_s = now - max(since, self._seen[1])
            if stays_s <= self.overdue_s:
                return
            if asked_at < now - stays_s + self.overdue_s:
                self._ask(now)  # where they are now
            elif now - asked_at >= ANSWER_S or not self._silent():
                self._lose(EngineLost(self._blame(stays_s)))
            return
        is_new = self._is_starting or now - self._prepared_at < START_ANSWER_S
        silent = self._silent()
        patience_s = START_ANSWER_S if is_new else max(self.overdue_s, IDLE_ANSWER_S)
        if silent and now - asked_at > patience_s:
            who = " and ".join(peer.words for peer in silent)
            when = " while it starts" if self._is_starting else ""
            self._lose(EngineLost(f"{who} does not answer{when}"))

    def _ask(self, now: float) -> None:
        self._question += 1
        self._asked_at = now
        data = frame(Ask(self._question))
        for peer in self._members.values():
            if peer.sending.acquire(blocking=False):  # else it does not even read
                try:
                    peer.sock.send(data, socket.MSG_DONTWAIT)
                except OSError:
                    pass
                finally:
                    peer.sending.release()

    def _silent(self) -> list[_Peer]:
        """Who has not answered the last question."""
        asked = self._question
        every = self._members.values()
        return [p for p in every if p.answer is None or p.answer.number != asked]

    def _blame(self, stays_s: float) -> str:
        at = self.whereabouts
        here = _words(at.step_id, at.num_calls, at.call)
        if silent := self._silent():
            who = " and ".join(peer.words for peer in silent)
            return f"{who} does not answer; rank 0 has been at {here} for {stays_s:.1f} s"
        answers = [
            ((p.answer.step_id, p.answer.num_calls), p.rank, p.answer.call)
            for p in self._members.values()
            if p.answer is not None
        ]
        place, rank, call = min([*answers, (at.mark, 0, at.call)])
        if all(mark == place for mark, _, _ in answers) and place == at.mark:
            return f"all ranks have been at {here} for {stays_s:.1f} s"
        beside = "" if rank == 0 else f"; rank 0 has been at {here}"
        return f"{self.words(rank)} is stuck at {_words(*place, call)}{beside} for {stays_s:.1f} s"
