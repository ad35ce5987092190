"""Who turns text into tokens for the HTTP process, and what if that takes too much? Its side of
text_process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections import Counter, deque
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from ridgeline.child import environment
from ridgeline.errors import ConfigError, RequestFault
from ridgeline.frames import HEADER, BrokenWire, frame, frame_length
from ridgeline.log import say
from ridgeline.server.errors import ApiError
from ridgeline.server.outlet import Relay
from ridgeline.server.service_manager import PRIVATE
from ridgeline.server.text_wire import (
    ENCODE_S,
    ENCODE_S_PER_BYTE,
    GRAMMAR_S,
    LOAD_S,
    LOAD_WALL_S,
    TEMPLATE_S,
    WALL_S,
    WALL_S_PER_BYTE,
    WORK_BYTES,
    Answer,
    CheckGrammar,
    Command,
    Done,
    Encode,
    EncodeChat,
    End,
    Ended,
    Fork,
    Forked,
    Ids,
    Loaded,
    LoadFailed,
    LoadText,
    Question,
    Refusal,
    Stage,
)
from ridgeline.server.tripwire import allow_spawn

T = TypeVar("T")

FORK_SERVER = (sys.executable, "-m", "ridgeline.server.text_process")
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}  # so that it can fork
COMMAND_WALL_S = 20.0  # the fork server takes milliseconds, if it gets a processor
TRIES = 2  # of a question whose worker ended by itself, or was killed by somebody else
INNOCENT = (0, -signal.SIGKILL)  # exit codes of such
RESTART_PAUSE_S = 1.0
PARAMS: dict[type[Question], str] = {
    Encode: "prompt",
    EncodeChat: "messages",
    CheckGrammar: "structured_outputs",
}
GONE = (OSError, EOFError, TimeoutError, BrokenWire)

_Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_DONE: msgspec.msgpack.Decoder[Done] = msgspec.msgpack.Decoder(Done)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    """A question, as it is sent, and who waits for its answer."""

    data: bytes
    asked: type[Question]
    tenant: bytes
    request_id: str
    answer: asyncio.Future[Ids] = field(default_factory=asyncio.Future)
    in_template: bool = False
    num_tries: int = 0
    is_late: bool = False

    @property
    def param(self) -> str:
        """Of the request, where its texts are."""
        return PARAMS[self.asked]

    @property
    def wall_s(self) -> float:
        return WALL_S + WALL_S_PER_BYTE * len(self.data)


class _Worker(asyncio.Protocol):
    """One worker process: at most one job at a time."""

    def __init__(self, client: TextClient, fork_server: ForkServer, pid: int) -> None:
        self.fork_server, self.pid = fork_server, pid
        self.job: _Job | None = None
        self.is_lost = False
        self._client = client
        self._data = bytearray()
        self._transport: asyncio.WriteTransport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def ask(self, job: _Job) -> None:
        self.job = job
        job.in_template = job.asked is EncodeChat
        job.num_tries += 1
        self._timer = asyncio.get_running_loop().call_later(job.wall_s, self._too_late, job)
        if self._transport is not None:
            self._transport.write(job.data)

    def _too_late(self, job: _Job) -> None:
        job.is_late = True
        self.drop()

    def drop(self) -> None:
        """Have nothing to do with it any more; connection_lost follows, and its end."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._data += data
        try:
            while len(self._data) >= HEADER.size:
                end = HEADER.size + frame_length(bytes(self._data[: HEADER.size]))
                if len(self._data) < end:
                    return
                answer = _ANSWERS.decode(memoryview(self._data)[HEADER.size : end])
                del self._data[:end]
                self._take(answer)
        except (BrokenWire, msgspec.DecodeError) as fault:
            say(logger, logging.ERROR, "a text worker broke the protocol", reason=fault)
            self.drop()

    def _take(self, answer: Answer) -> None:
        job = self.job
        if job is None:
            raise BrokenWire("an answer that nobody asked for")
        if isinstance(answer, Stage):
            job.in_template = answer.is_template
            return
        self.job = None
        self._stop_timer()
        self._client.on_answer(self, job, answer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._stop_timer()
        self._client.on_lost(self)


class ForkServer:
    """The process that loads and forks. Its methods raise one of GONE when it is no more."""

    def __init__(
        self, process: asyncio.subprocess.Process, sock: socket.socket, wire: _Wire, output: Relay
    ) -> None:
        self.process = process
        self._output = output
        self._sock, self._wire = sock, wire
        self._lock = asyncio.Lock()
        self._watch = asyncio.ensure_future(self._close_at_end())

    @classmethod
    async def start(cls) -> ForkServer:
        (ours, theirs), output = socket.socketpair(), Relay()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *FORK_SERVER,
                "--fd",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.writer,
                stderr=output.writer,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment(PRIVATE) | ENVIRONMENT,
            )
        output.follow()
        sending = ours.dup()  # a transport sends no descriptors
        return cls(process, sending, await asyncio.open_unix_connection(sock=ours), output)

    async def _close_at_end(self) -> None:
        """A child that has not closed its copy of the other end would keep us waiting."""
        await self.process.wait()
        self._wire[1].close()

    async def load(self, command: LoadText) -> Loaded:
        """Raises ConfigError."""
        return await self._do(command, Loaded, wall_s=LOAD_WALL_S)

    async def fork(self, client: TextClient) -> _Worker:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                forked = await self._do(Fork(), Forked, theirs)
        except BaseException:
            ours.close()
            raise
        worker = _Worker(client, self, forked.pid)
        await asyncio.get_running_loop().create_unix_connection(lambda: worker, sock=ours)
        return worker

    async def end(self, worker: _Worker) -> int:
        """Its exit code, negative for the signal that ended it."""
        ended = await self._do(End(worker.pid), Ended)
        return ended.code

    async def _do(
        self, command: Command, kind: type[T], *given: socket.socket, wall_s: float = COMMAND_WALL_S
    ) -> T:
        async with self._lock, asyncio.timeout(wall_s):
            socket.send_fds(self._sock, [frame(command)], [sock.fileno() for sock in given])
            reader = self._wire[0]
            length = frame_length(await reader.readexactly(HEADER.size))
            done = _DONE.decode(await reader.readexactly(length))
        if isinstance(done, LoadFailed):
            raise ConfigError(done.message)
        if not isinstance(done, kind):
            raise BrokenWire(f"a {type(done).__name__}, not a {kind.__name__}")
        return done

    async def close(self) -> None:
        """End it, and its workers with it."""
        self._wire[1].close()
        self._sock.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self._watch
        self._output.end()


class TextClient:
    """The workers, and whose question each of them has."""

    def __init__(
        self, num_workers: int, chat_template: str | None = None, tool_parser: str | None = None
    ) -> None:
        self._num_workers = num_workers
        self._chat_template, self._tool_parser = chat_template, tool_parser
        self._turns: Turns[_Job] = Turns(num_workers)
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._fork_server: ForkServer | None = None  # that has loaded
        self._spare: asyncio.Task[ForkServer] | None = None  # that has not
        self._folder: Path | None = None
        self._loading: asyncio.Task[Loaded] | None = None
        self._lock = asyncio.Lock()  # of loading
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    @property
    def fork_server_pid(self) -> int | None:
        return None if self._fork_server is None else self._fork_server.process.pid

    # ------------------------------------------------------------------ for the service

    def begin(self) -> None:
        """Start a process; it can import beside everything else."""
        allow_spawn(FORK_SERVER)
        self._spare = self._in_background(ForkServer.start())

    async def load(self, folder: Path) -> Loaded:
        """What the tokenizer and the template in `folder` are, from now on. Raises ConfigError."""
        if self._loading is None or folder != self._folder:
            self._folder = folder
            self._loading = self._in_background(self._load(folder))
        return await asyncio.shield(self._loading)

    async def ids(self, question: Question, tenant: bytes, request_id: str) -> tuple[bytes, ...]:
        """An array of token ids for each text. Raises TextFault, or ApiError when nobody can."""
        job = _Job(frame(question), type(question), tenant, request_id)
        self._turns.add(tenant, job)
        self._dispatch()
        try:
            return (await job.answer).prompts
        except asyncio.CancelledError:  # its client has gone
            self._turns.remove(tenant, job)
            raise

    async def close(self) -> None:
        self._is_closed = True
        tasks = self._tasks if self._spare is None else {*self._tasks, self._spare}
        for task in tasks:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        for worker in self._workers:
            worker.drop()
        for fork_server in {self._fork_server, *found}:
            if isinstance(fork_server, ForkServer):
                await fork_server.close()

    # ------------------------------------------------------------------ the workers' side

    def on_answer(self, worker: _Worker, job: _Job, answer: Ids | Refusal) -> None:
        self._turns.done(job.tenant)
        if answer.is_last:
            worker.drop()
        else:
            self._idle.append(worker)
        if isinstance(answer, Refusal):
            if answer.crash:
                say(
                    logger, logging.WARNING, "a tokenizer, chat template or grammar crashed",
                    request_id=job.request_id, fault=answer.crash, template=job.in_template,
                )  # fmt: skip
            param = answer.param or job.param
            _fail(job, TextFault(answer.message, param, answer.code, answer.place))
        elif not job.answer.done():
            job.answer.set_result(answer)
        self._dispatch()

    def on_lost(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        if not self._is_closed:
            self._in_background(self._bury(worker))

    def _dispatch(self) -> None:
        while self._idle and (found := self._turns.take()) is not None:
            job = found[1]
            self._idle.pop().ask(job)

    # ------------------------------------------------------------------ lives and deaths

    async def _load(self, folder: Path) -> Loaded:
        async with self._lock:
            return await self._load_alone(folder)

    async def _load_alone(self, folder: Path) -> Loaded:
        spare, self._spare = self._spare, None
        old, self._fork_server = self._fork_server, None
        if old is not None:
            await old.close()
        fork_server = await (ForkServer.start() if spare is None else spare)
        try:
            loaded = await fork_server.load(
                LoadText(str(folder), self._chat_template, self._tool_parser)
            )
        except BaseException as fault:
            await fork_server.close()
            if not isinstance(fault, GONE):
                raise
            raise ConfigError(
                f"{folder}: tokenizer and chat template take over {LOAD_S:g} s of processor time "
                "to load, or too much memory; they are not usable"
            ) from None
        self._fork_server = fork_server
        for _ in range(self._num_workers if loaded.vocabulary is not None else 0):
            self._in_background(self._hire(fork_server))
        return loaded

    async def _hire(self, fork_server: ForkServer) -> None:
        try:
            worker = await fork_server.fork(self)
            if not worker.is_lost:
                self._workers.add(worker)
                self._idle.append(worker)
        except GONE:
            self._lose(fork_server)
        self._dispatch()

    async def _bury(self, worker: _Worker) -> None:
        """Its job fails if it is at fault, and is done by another one else."""
        code = 0
        try:
            code = await worker.fork_server.end(worker)
        except GONE:
            self._lose(worker.fork_server)
        if (job := worker.job) is not None:
            self._turns.done(job.tenant)
            innocent = code in INNOCENT and not job.is_late and job.num_tries < TRIES
            if innocent and not job.answer.done():
                self._turns.add(job.tenant, job, first=True)
            else:
                _fail(job, _fault(job, code))
        if worker.fork_server is self._fork_server:
            await self._hire(worker.fork_server)

    def _lose(self, fork_server: ForkServer) -> None:
        if fork_server is self._fork_server and not self._is_closed:
            self._fork_server = None
            self._in_background(self._revive(fork_server))

    async def _revive(self, fork_server: ForkServer) -> None:
        await fork_server.close()
        folder = self._folder
        while folder is not None and folder == self._folder and self._fork_server is None:
            say(logger, logging.ERROR, "the tokenizer process ended; starting another")
            self._loading = None
            try:
                await self.load(folder)
            except (ConfigError, *GONE) as fault:
                say(logger, logging.ERROR, "there is no tokenizer process", reason=fault)
                error = ApiError("engine_unavailable", "the tokenizer process is being restarted")
                for job in self._turns.drop_all():
                    _fail(job, error)
                await asyncio.sleep(RESTART_PAUSE_S)

    def _in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class TextFault(RequestFault):
    """What is wrong with text number `place` of a question; None: with one of them."""

    def __init__(self, message: str, param: str, code: str, place: int | None = None) -> None:
        super().__init__(message, param=param, code=code)
        self.place = place


def _fail(job: _Job, error: Exception) -> None:
    if not job.answer.done():
        job.answer.set_exception(error)


def _fault(job: _Job, code: int) -> TextFault:
    """The worker of this job ended with `code`."""
    if code == -signal.SIGPROF and job.asked is CheckGrammar:
        why = f"took more than {GRAMMAR_S:g} s of processor time"
    elif code == -signal.SIGPROF and job.in_template:
        why = f"took more than {TEMPLATE_S:g} s of processor time"
    elif code == -signal.SIGPROF:
        per_byte_us = 1e6 * ENCODE_S_PER_BYTE
        why = f"took more than {ENCODE_S:g} s and {per_byte_us:g} us a byte of processor time"
    elif job.is_late:
        why = f"took more than {job.wall_s:.0f} s"
    else:
        why = f"needed more than {WORK_BYTES >> 20} MiB of memory, or crashed,"
    say(
        logger, logging.WARNING, "a text worker was lost", request_id=job.request_id,
        code=code, template=job.in_template,
    )  # fmt: skip
    if job.asked is CheckGrammar:
        return TextFault(
            f"structured_outputs: to compile this {why}", job.param, "unsupported_schema"
        )
    if job.in_template:
        return TextFault(
            f"the model's chat template {why} on these messages", "messages", "invalid_messages"
        )
    return TextFault(f"the model's tokenizer {why} on this text", job.param, "invalid_value")


class Turns(Generic[T]):
    """What waits, by tenant, for `num_workers` workers."""

    def __init__(self, num_workers: int) -> None:
        self._most = max(1, num_workers - 1)
        self._waiting: dict[bytes, deque[T]] = {}  # the first is next
        self._busy: Counter[bytes] = Counter()

    def add(self, tenant: bytes, item: T, *, first: bool = False) -> None:
        queue = self._waiting.setdefault(tenant, deque())
        (queue.appendleft if first else queue.append)(item)

    def remove(self, tenant: bytes, item: T) -> None:
        """Who does not wait any more, if it does."""
        queue = self._waiting.get(tenant, deque())
        with suppress(ValueError):
            queue.remove(item)
            if not queue:
                del self._waiting[tenant]

    def take(self) -> tuple[bytes, T] | None:
        """The next for a worker that is free; `done` says that it is again. None where nobody waits
        or all who do have their share."""
        for tenant, queue in self._waiting.items():
            if self._busy[tenant] >= self._most:
                continue
            item = queue.popleft()
            del self._waiting[tenant]
            if queue:
                self._waiting[tenant] = queue
            self._busy[tenant] += 1
            return tenant, item
        return None

    def done(self, tenant: bytes) -> None:
        self._busy[tenant] -= 1
        if not self._busy[tenant]:
            del self._busy[tenant]

    def drop_all(self) -> list[T]:
        """Everything that waits, and waits no more."""
        dropped = [item for queue in self._waiting.values() for item in queue]
        self._waiting.clear()
        return dropped
