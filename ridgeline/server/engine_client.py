"""Is there an engine, and which request does each of its words belong to? The HTTP side."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from ridgeline.child import environment
from ridgeline.clock import Clock
from ridgeline.errors import ConfigError, EngineFault, RequestFault
from ridgeline.frames import HEADER, BrokenWire, frame, frame_length
from ridgeline.log import say
from ridgeline.observe.latency import Latency, Traffic
from ridgeline.observe.watchdog import Overdue, StepInFlight, Watchdog
from ridgeline.request import RequestOutput
from ridgeline.server.active_request import ActiveRequest
from ridgeline.server.config import ServeConfig
from ridgeline.server.deadlines import ServiceRate
from ridgeline.server.errors import ApiError, internal_error
from ridgeline.server.heartbeat import HeartbeatPage, Progress, new_page
from ridgeline.server.outlet import Relay
from ridgeline.server.service_manager import PRIVATE
from ridgeline.server.text_wire import VocabularyTable
from ridgeline.server.tripwire import allow_spawn, arm
from ridgeline.server.wire import (
    Abort,
    Admitted,
    Command,
    Event,
    Explain,
    Explained,
    Faulted,
    Gauges,
    Loading,
    Ready,
    Refused,
    Start,
    StartFailed,
    Step,
    Vocabulary,
    pack_add,
    read_event,
)

HTTP_BYTES = 64 << 20  # what the HTTP process grows by in use, without the bodies that it holds
HEALTHY_S = 60.0  # an engine that lived so long starts with a clean record
RESTART_PAUSE_S = 0.2
EXIT_WAIT_S = 5.0
EXPLAIN_WAIT_S = 10.0
ENGINE = (sys.executable, "-m", "ridgeline.server.engine_process")

logger = logging.getLogger(__name__)


OnReady = Callable[[Ready], Awaitable[None]]  # get ready to serve it; a ConfigError ends the server


@dataclass(slots=True)
class _Life:
    """One engine process, from its start to its end."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    heartbeat: HeartbeatPage
    output: Relay
    ready_at: float | None = None


class EngineClient:
    """Starts the engine process, keeps it alive and hands its outputs to their requests.

    `run` is the supervisor; it returns after `stop` and raises when there will be no engine.
    """

    def __init__(self, config: ServeConfig, clock: Clock, on_ready: OnReady) -> None:
        self.config = config
        self.clock = clock
        self.gauges = Gauges()
        self.ready: Ready | None = None
        self.progress = Progress(config.limits.step_deadline_s)
        self.watchdog = Watchdog(config.limits.step_overdue_multiple, config.limits.step_overdue_s)
        self.latency = Latency()
        self.service_rate = ServiceRate()
        self.traffic = Traffic()
        self.loading: Loading | None = None
        self.num_restarts = 0
        self.lives: dict[str, ActiveRequest] = {}
        self._on_ready = on_ready
        self._tickets: dict[int, ActiveRequest] = {}
        self._questions: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count()
        self._life: _Life | None = None
        self._stop = asyncio.Event()
        self._start_failure: str | None = None

    @property
    def is_up(self) -> bool:
        return self.ready is not None

    @property
    def engine_pid(self) -> int | None:
        return self._life.process.pid if self._life is not None else None

    # ------------------------------------------------------------------ for request handlers

    def refuse_if_down(self) -> None:
        """Raises ApiError `starting` before the first engine, `engine_unavailable` after it."""
        if self.ready is None and self.num_restarts:
            raise ApiError("engine_unavailable", "the engine is being restarted; try again soon")
        if self.ready is None:
            raise ApiError("starting", "the model is still being loaded; try again soon")

    async def submit(self, active: ActiveRequest) -> None:
        """Hand the requests of `active` to the engine and wait until it has taken them in.

        Raises RequestFault when it refuses and ApiError when it is gone. On any exit but the
        normal one nothing of `active` is left in the engine.
        """
        self.refuse_if_down()
        ticket = next(self._numbers)
        requests = active.requests
        self._tickets[ticket] = active
        self.lives.update(dict.fromkeys(active.open_ids, active))
        now = self.clock.now()
        self.progress.work_began(now, len(requests))
        for request in requests:
            active.times[request.request_id].queued = now if request.fork_of is None else None
        wants = {"wants_cost": active.wants_cost, "wants_chunks": active.wants_chunks}
        self._send(pack_add(ticket, requests, now, **wants))
        try:
            await active.admitted
        except BaseException:
            self.abandon(active)
            raise
        finally:
            self._tickets.pop(ticket, None)

    def teach(self, table: VocabularyTable, end_token_ids: tuple[int, ...]) -> None:
        """Tell the engine what its tokens are, once it is up."""
        self._send(Vocabulary(table, end_token_ids))

    async def evidence(self, tenant: bytes | None = None) -> bytes:
        """What the engine knows of where time went, as JSON; see Explain and Explained. Raises
        ApiError when it is gone or does not answer in time."""
        self.refuse_if_down()
        ticket = next(self._numbers)
        answer = self._questions[ticket] = asyncio.get_running_loop().create_future()
        self._send(Explain(ticket, tenant))
        try:
            async with asyncio.timeout(EXPLAIN_WAIT_S):
                found: bytes = await answer
                return found
        except TimeoutError:
            raise ApiError("engine_unavailable", "the engine does not answer just now") from None
        finally:
            self._questions.pop(ticket, None)

    def abandon(self, active: ActiveRequest) -> None:
        """Nobody waits for `active` any more: abort what the engine still does for it."""
        self._abort(active, tuple(active.open_ids))
        active.open_ids.clear()

    def _abort(self, active: ActiveRequest, request_ids: tuple[str, ...]) -> None:
        known = tuple(i for i in request_ids if self.lives.pop(i, None) is not None)
        if known:
            self.progress.work_ended(len(known))
            now = self.clock.now()
            for request_id in known:
                self.latency.on_end(active.times[request_id], now)
            self.traffic.finished["abort"] += len(known)
            self._send(Abort(known))

    # ------------------------------------------------------------------ its health

    def overdue(self, now: float) -> Overdue | None:
        """What is wrong with the step in flight, judged by its own price; counts and reports it
        once. None also where steps have no price."""
        step = self._step()
        found = self.watchdog.look(step, now)
        if found is not None and step is not None and self.watchdog.count(found, step.began):
            say(
                logger, logging.WARNING, "a step takes longer than it should",
                step=found.step_id, elapsed_s=round(found.elapsed_s, 3),
                expected_s=round(found.expected_s, 6),
            )  # fmt: skip
        return found

    def is_stuck(self, now: float) -> bool:
        """Work is pending and does not get on: the step in flight is overdue by its own price, or
        none has ended for too long, unless the price of this one allows for that."""
        if self.overdue(now) is not None:
            return True
        return self.progress.is_stuck(now) and not self._is_within_price(now)

    def should_kill(self, now: float) -> bool:
        """There is no hope any more for the step in flight."""
        if self.ready is None or self._life is None:
            return False
        limits = self.config.limits
        is_unknown = self.ready.prices is None or self._life.heartbeat.is_first_time()
        allowed_s = limits.first_step_kill_s if is_unknown else limits.step_kill_s
        return self.progress.stalled_s(now) > allowed_s and not self._is_within_price(now)

    def _step(self) -> StepInFlight | None:
        return None if self._life is None else self._life.heartbeat.read()

    def _is_within_price(self, now: float) -> bool:
        return self.watchdog.is_within_price(self._step(), now)

    # ------------------------------------------------------------------ the engine's life

    async def run(self) -> None:
        """Start engines until told to stop. Raises ConfigError when none can be built, and
        EngineFault after too many deaths in a row."""
        deaths = 0
        while True:
            lived_well = await self._one_life()
            if self._stop.is_set():
                return
            if self._start_failure is not None:
                raise ConfigError(self._start_failure)
            deaths = 1 if lived_well else deaths + 1
            if deaths > self.config.limits.max_engine_restarts:
                raise EngineFault(f"the engine died {deaths} times in a row; giving up")
            self.num_restarts += 1
            say(logger, logging.WARNING, "restarting the engine", attempt=deaths)
            with suppress(TimeoutError):
                pause_s = RESTART_PAUSE_S * 2 ** (deaths - 1)
                await asyncio.wait_for(self._stop.wait(), pause_s)
            if self._stop.is_set():
                return

    async def stop(self) -> None:
        """Close the wire; the engine process ends by itself, or is killed after a while. One that
        is not ready yet is killed: nothing would be lost, and it may be busy importing."""
        self._stop.set()
        if self._life is not None:
            self._life.writer.close()
        if self.ready is None:
            self.kill()

    def dump_stacks(self) -> None:
        """Have the engine process write its Python stacks to the log."""
        if self._life is not None and self._life.process.returncode is None:
            self._life.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End the engine process now, with whatever it started."""
        if self._life is not None and self._life.process.returncode is None:
            try:
                os.killpg(self._life.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._life.process.kill()

    async def _one_life(self) -> bool:
        """Run one engine process to its end. Whether it served in good health."""
        self._life = life = await self._spawn()
        if self._stop.is_set():  # we were told in the meantime
            await self.stop()
        try:
            await self._listen(life)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the other end is closed: it exited, was killed, or we told it to stop
        except BrokenWire as fault:
            say(logger, logging.ERROR, "the engine broke the protocol", reason=fault)
        finally:
            self.on_engine_lost()
            code = await self._reap(life)
            self._life = None
            life.heartbeat.close()
        if not self._stop.is_set() and self._start_failure is None:
            say(logger, logging.ERROR, "the engine process ended", exit_code=code)
        return life.ready_at is not None and self.clock.now() - life.ready_at > HEALTHY_S

    async def _spawn(self) -> _Life:
        ours, theirs = socket.socketpair()
        page, output = new_page(), Relay()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *ENGINE,
                "--fd",
                str(theirs.fileno()),
                "--heartbeat-fd",
                str(page),
                "--builder",
                self.config.builder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.writer,
                stderr=output.writer,
                pass_fds=(theirs.fileno(), page),
                start_new_session=True,
                env=environment(PRIVATE),
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        life = _Life(process, reader, writer, HeartbeatPage(page), output)
        os.close(page)
        output.follow()
        config = self.config
        writer.write(
            frame(
                Start(
                    config.engine,
                    config.log_level,
                    config.log_format,
                    http_bytes=HTTP_BYTES + config.limits.max_held_body_bytes,
                    tripwire=config.tripwire,
                    overdue_s=config.limits.step_overdue_s,
                )
            )
        )
        return life

    async def _listen(self, life: _Life) -> None:
        while True:
            header = await life.reader.readexactly(HEADER.size)
            payload = await life.reader.readexactly(frame_length(header))
            await self._take(read_event(payload), life)

    async def _reap(self, life: _Life) -> int | None:
        life.writer.close()
        try:
            async with asyncio.timeout(EXIT_WAIT_S if self._stop.is_set() else RESTART_PAUSE_S):
                await life.process.wait()
        except TimeoutError:
            pass
        self.kill()
        code = await life.process.wait()
        life.output.end()
        return code

    # ------------------------------------------------------------------ what the engine writes

    async def _take(self, event: Event, life: _Life) -> None:
        if isinstance(event, Step):
            self.on_step(event)
        elif isinstance(event, Loading):
            self.loading = event
            say(logger, logging.INFO, "loading", stage=event.stage, done=event.done, of=event.total)
        elif isinstance(event, Ready):
            await self._on_ready(event)
            if self.config.tripwire:
                allow_spawn(ENGINE)
                arm(self.config.otlp_endpoint)
            life.ready_at = self.clock.now()
            self.progress.reset()
            self.ready = event
        elif isinstance(event, Explained):
            question = self._questions.get(event.ticket)
            if question is not None and not question.done():
                question.set_result(event.evidence)
        elif isinstance(event, StartFailed):
            self._start_failure = event.message
        elif isinstance(event, Faulted):
            say(logger, logging.ERROR, "the engine failed", reason=event.message)

    def on_step(self, step: Step) -> None:
        """Hand everything in one message of the engine to the requests it is for."""
        now = self.clock.now()
        self.gauges = step.gauges
        self.progress.step_done(now)
        num_tokens = sum(len(output.new_token_ids) for output in step.outputs)
        if num_tokens:
            self.service_rate.on_step(now, num_tokens, is_full=step.gauges.num_waiting > 0)
        for reply in step.replies:
            self._reply(reply)
        for start in step.started:
            if (active := self.lives.get(start.request_id)) is not None:
                active.started = True
                active.began = start.at if active.began is None else active.began
                self.latency.on_start(active.times[start.request_id], start.at)
        for cost in step.costs:
            if (active := self.lives.get(cost.request_id)) is not None:
                active.costs[cost.request_id] = cost
        for chunk in step.chunks:
            if (active := self.lives.get(chunk.request_id)) is not None:
                active.chunks.append(chunk)
        for output in step.outputs:
            self._output(output, now)

    def _reply(self, reply: Admitted | Refused) -> None:
        active = self._tickets.get(reply.ticket)
        if active is None or active.admitted.done():
            return  # its client has gone
        if isinstance(reply, Admitted):
            self.traffic.accepted(
                len(active.times), sum(len(a.prompt_token_ids) for a in active.answers)
            )
            active.admitted.set_result(None)
            return
        for request_id in active.open_ids:
            self.lives.pop(request_id, None)
        self.progress.work_ended(len(active.open_ids))
        active.open_ids.clear()
        fault = RequestFault(
            reply.message, param=reply.param, code=reply.code, retry_after_s=reply.retry_after_s
        )
        active.admitted.set_exception(fault)

    def _output(self, output: RequestOutput, now: float) -> None:
        active = self.lives.get(output.request_id)
        if active is None:
            self.traffic.num_late_outputs += 1
            return
        times = active.times[output.request_id]
        self.latency.on_tokens(times, len(output.new_token_ids), now)
        self.traffic.num_output_tokens += len(output.new_token_ids)
        self._push(active, output)
        if output.finish_reason is not None:
            self.lives.pop(output.request_id, None)
            active.open_ids.discard(output.request_id)
            self.progress.work_ended()
            self.latency.on_end(times, now)
            self.traffic.finished[output.finish_reason.value] += 1
            self.service_rate.on_end(times.num_tokens)
        if active.error is not None:
            self.abandon(active)
        elif stopped := active.take_aborts():
            self._stopped(active, stopped, now)

    def _push(self, active: ActiveRequest, output: RequestOutput) -> None:
        """No output, whatever is in it, may harm anyone but its own request."""
        try:
            active.push(output)
        except Exception:
            say(
                logger, logging.ERROR, "an output could not be assembled", trace=True,
                request_id=active.request_id,
            )  # fmt: skip
            active.fail(internal_error())
        if output.error is not None:
            say(
                logger, logging.ERROR, "the engine failed one request",
                request_id=active.request_id, reason=output.error,
            )  # fmt: skip

    def _stopped(self, active: ActiveRequest, request_ids: Iterable[str], now: float) -> None:
        """A stop string ended these, which the engine cannot see."""
        known = tuple(i for i in request_ids if self.lives.pop(i, None) is not None)
        self.progress.work_ended(len(known))
        for request_id in known:
            self.latency.on_end(active.times[request_id], now)
        self.traffic.finished["stop"] += len(known)
        self._send(Abort(known))

    def on_engine_lost(self) -> None:
        """Everything in flight fails with one error that says to try again."""
        self.ready = None
        self.progress.reset()
        self.gauges = Gauges()
        error = ApiError("engine_unavailable", "the engine failed; it is being restarted")
        for question in self._questions.values():
            if not question.done():
                question.set_exception(error)
        lives, self.lives = {*self.lives.values()}, {}
        for active in lives:
            active.fail(error)
            self.traffic.finished["error"] += len(active.open_ids)
            active.open_ids.clear()

    def _send(self, message: Command) -> None:
        if self._life is not None and not self._life.writer.is_closing():
            self._life.writer.write(frame(message))
