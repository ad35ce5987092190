"""What does the engine process do all day? Take commands, step, tell; one message per turn."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import inf
from typing import TYPE_CHECKING, Protocol

import msgspec

from ridgeline.clock import Clock
from ridgeline.config import EngineConfig, ResolvedConfig
from ridgeline.engine import Engine
from ridgeline.errors import EngineFault, RequestFault
from ridgeline.generation import GenerationDefaults
from ridgeline.observe.evidence import RunRecord
from ridgeline.observe.requests import PromptChunks
from ridgeline.observe.run import Run
from ridgeline.request import RequestOutput
from ridgeline.router.speeds import PricedSpeed
from ridgeline.scheduler.beams import BEAM_MARK
from ridgeline.server.engine_gauges import GaugeReader
from ridgeline.server.heartbeat import Heartbeat
from ridgeline.server.text_wire import vocabulary_of
from ridgeline.server.wire import (
    SPEED_CONTEXT,
    Abort,
    Add,
    Admitted,
    Command,
    Cost,
    Event,
    Explain,
    Explained,
    Prices,
    Ready,
    Refused,
    Scheduled,
    Step,
    Vocabulary,
    unpack_add,
)
from ridgeline.startup import Phase, Started, WarmsUp, say_first_token
from ridgeline.step import Listener, PricedStep, StepPlan

if TYPE_CHECKING:
    from ridgeline.architectures.spec import ModelSpec
    from ridgeline.devices.device import Device
    from ridgeline.resolve import MemoryRow
    from ridgeline.text import vocabulary as text_vocabulary

LATELY = 16  # steps of a kind, or plans
LEAST_S = 0.3e-3  # a shorter wait is not worth waking up for
GUARD_S = 0.3e-3  # of sleeping, waking and what differs from step to step
EXTRA_S = 0.5e-3  # more of that, after a step that came too late
CALMING = 0.98  # what is left of that after each step that did not

MAX_FAILURES = 3  # in a row: the device will not recover in this process

logger = logging.getLogger(__name__)


class Served(Protocol):
    """What the engine process needs of what a builder made; ridgeline.build.Built has it."""

    @property
    def engine(self) -> Engine: ...
    @property
    def spec(self) -> ModelSpec: ...
    @property
    def resolved(self) -> ResolvedConfig: ...
    @property
    def memory(self) -> Sequence[MemoryRow]: ...
    @property
    def device(self) -> Device: ...
    @property
    def generation(self) -> GenerationDefaults: ...
    @property
    def end_token_ids(self) -> frozenset[int]: ...
    @property
    def run_record(self) -> RunRecord | None: ...
    @property
    def no_grammars(self) -> str: ...
    def learn(
        self, vocabulary: text_vocabulary.Vocabulary | None, end_token_ids: frozenset[int]
    ) -> None: ...


Builder = Callable[[EngineConfig, Callable[[str, int, int], None]], Served]


class CommandWire(Protocol):
    def take(self, *, wait_s: float) -> list[Command]: ...
    def send(self, event: Event) -> None: ...


def ready_message(served: Served, pid: int, startup: Sequence[Phase] = ()) -> Ready:
    resolved = served.resolved
    return Ready(
        pid,
        resolved.model_path,
        resolved.model_name,
        served.spec.vocab_size,
        resolved.max_model_len,
        resolved.block_size,
        served.engine.scheduler.blocks.num_blocks,
        resolved.max_num_seqs,
        tuple(sorted(served.end_token_ids)),
        tuple(sorted(served.generation.asked().items())),
        tuple((row.what, row.predicted) for row in served.memory),
        served.device.memory_total(),
        min(resolved.max_model_len, served.engine.scheduler.max_servable_tokens),
        None if served.run_record is None else _prices(served.run_record),
        tuple((phase.name, phase.seconds) for phase in startup),
        () if served.run_record is None else _speeds(served.run_record, resolved),
        served.no_grammars,
    )


def _prices(run_record: RunRecord) -> Prices:
    limits, setup = run_record.pricer.limits, run_record.pricer.setup
    return Prices(setup.device.label, setup.constants.origin, limits.flops, limits.bytes)


def _speeds(run_record: RunRecord, resolved: ResolvedConfig) -> tuple[tuple[float, float], ...]:
    priced = PricedSpeed(run_record.pricer, resolved.max_num_batched_tokens)
    numbers = (1 << power >> 1 for power in range(resolved.max_num_seqs.bit_length() + 1))
    found = (priced.beside(number, number * SPEED_CONTEXT) for number in numbers)
    return tuple((speed.tokens_per_s, speed.step_s) for speed in found)


class EngineLoop:
    """Runs until the wire closes, or until the engine fails (which it lets through)."""

    def __init__(
        self, served: Served, wire: CommandWire, clock: Clock, heartbeat: Heartbeat | None = None
    ) -> None:
        self._served = served
        self._engine = served.engine
        self._wire = wire
        self._clock = clock
        self._heartbeat = heartbeat
        self._num_failures = 0
        self._has_answered = False
        self._kernels = served.kernels if isinstance(served, Started) else None
        self._idle_work = served.warm_up if isinstance(served, WarmsUp) else None
        self._run_record = served.run_record
        self._run: Run = served.run_record or Run()
        self._run.take_started()  # from now on
        if served.run_record is None:
            self._engine.listeners.append(self._run)
        self._chunks = PromptChunks()
        self._run.listeners.append(self._chunks)
        self.deferred_scheduling: DeferredScheduling | None = None
        if self._run.is_priced and not self._run.computes_in_submit:
            self.deferred_scheduling = DeferredScheduling(served.engine, self._run, clock)
        self._gauges = GaugeReader(served.engine.scheduler, served.device, self._run, clock)

    def run(self) -> None:
        while True:
            self.turn()

    def turn(self) -> None:
        """Obey what came in, then one step. Waits for commands when there is nothing to do."""
        is_idle = self._engine.is_idle and not self._works_idly()
        commands = self._obey_all(self._wire.take(wait_s=inf if is_idle else 0.0))
        while (
            self.deferred_scheduling is not None and (pause := self.deferred_scheduling.pause()) > 0
        ):
            commands += self._obey_all(self._wire.take(wait_s=pause))
        num_steps = self._run.num_steps
        outputs = self._engine.step()
        has_stepped = self._run.num_steps != num_steps
        if outputs and not self._has_answered:
            self._has_answered = True
            say_first_token(self._kernels)
        if outputs or commands or has_stepped:
            self._tell([], outputs)
        if has_stepped:
            self._count_failures()

    def _obey_all(self, commands: list[Command]) -> list[Command]:
        replies = [reply for command in commands if (reply := self._obey(command)) is not None]
        if replies:
            self._tell(replies, [])  # a refusal need not wait for a step
        return commands

    def _works_idly(self) -> bool:
        """Something was done that nobody waits for; more may be left."""
        if self._idle_work is not None:
            with nullcontext() if self._heartbeat is None else self._heartbeat.first_time():
                is_left = self._idle_work.one()
            self._idle_work = self._idle_work if is_left else None
        return self._idle_work is not None

    def _count_failures(self) -> None:
        """Steps that fail together, because they were in flight together, count once."""
        self._num_failures = self._num_failures + 1 if self._run.last_failed else 0
        if self._num_failures >= MAX_FAILURES:
            raise EngineFault(f"steps failed {MAX_FAILURES} times in a row")

    def _obey(self, command: Command) -> Admitted | Refused | None:
        if isinstance(command, Add):
            return self._add(command)
        if isinstance(command, Abort):
            for request_id in command.request_ids:
                self._engine.abort(request_id)
                self._close(request_id)
        elif isinstance(command, Vocabulary):
            words = vocabulary_of(command.table)
            self._served.learn(words, frozenset(command.end_token_ids))
        elif isinstance(command, Explain):
            self._wire.send(Explained(command.ticket, self._evidence(command.tenant)))
        return None

    def _evidence(self, tenant: bytes | None) -> bytes:
        """All at once and encoded by C: the next step waits for it."""
        if self._run_record is None:
            return b""
        who = None if tenant is None else tenant.hex()
        return msgspec.json.encode(self._run_record.evidence(self._engine.clock.now(), who))

    def _close(self, request_id: str) -> None:
        self._chunks.close(request_id)
        if self._run_record is not None:
            self._run_record.request_costs.close(request_id)

    def _add(self, command: Add) -> Admitted | Refused:
        """All of them or none."""
        added: list[str] = []
        try:
            for request in unpack_add(command, self._clock.now()):
                self._engine.add(request)
                added.append(request.request_id)
                if command.wants_chunks:
                    self._chunks.ask(request.request_id)
                if command.wants_cost and self._run_record is not None:
                    self._run_record.request_costs.ask(request.request_id)
        except RequestFault as fault:
            for request_id in added:
                self._engine.abort(request_id)
                self._close(request_id)
            return Refused(command.ticket, str(fault), fault.param, fault.code, fault.retry_after_s)
        return Admitted(command.ticket)

    def _tell(
        self, replies: Sequence[Admitted | Refused], outputs: Sequence[RequestOutput]
    ) -> None:
        self._wire.send(
            Step(
                tuple(replies),
                tuple(
                    Scheduled(row.partition(BEAM_MARK)[0], at)
                    for row, at in self._run.take_started()
                ),
                tuple(outputs),
                self._gauges.read(),
                self._costs(outputs),
                self._chunks.take(outputs),
            )
        )

    def _costs(self, outputs: Sequence[RequestOutput]) -> tuple[Cost, ...]:
        """Up to and with this output, for those who asked."""
        if self._run_record is None:
            return ()
        request_costs, costs = self._run_record.request_costs, []
        for output in outputs:
            if (cost := request_costs.get(output.request_id)) is not None:
                costs.append(Cost(output.request_id, cost.device_ns, cost.flops, cost.bytes))
                if output.finish_reason is not None:
                    request_costs.close(output.request_id)
        return tuple(costs)


class DeferredScheduling(Listener):
    """A listener of the engine and of its run."""

    def __init__(self, engine: Engine, run: Run, clock: Clock) -> None:
        self.num_waits = self.num_late = 0
        self._engine, self._run, self._clock = engine, run, clock
        self._took: dict[bool, deque[float]] = {}  # of its price, by: it reads prompts
        self._needs_s: deque[float] = deque(maxlen=LATELY)  # from planning a step to having sent it
        self._extra_s = 0.0
        self._planned_at = 0.0
        engine.listeners.append(self)
        run.listeners.append(self)

    def pause(self) -> float:
        """Seconds that the next plan can wait, now. 0: it cannot, or nobody gains by it."""
        engine, scheduler = self._engine, self._engine.scheduler
        is_room = scheduler.num_running < scheduler.max_num_seqs
        if not is_room or not 0 < engine.num_in_flight == engine.max_in_flight - 1:
            return 0.0
        running = self._run.running
        if running is None or len(self._needs_s) < LATELY:
            return 0.0
        took = self._took.get(bool(running.prompts), ())
        if len(took) < LATELY:
            return 0.0
        ends = running.began + min(took) * running.price.expected_s
        left = ends - max(self._needs_s) - GUARD_S - self._extra_s - self._clock.now()
        if left < LEAST_S or engine.oldest_is_over is not False:
            return 0.0
        self.num_waits += 1
        return left

    # ------------------------------------------------------------------ what is learned

    def on_plan(self, plan: StepPlan, now: float) -> None:
        self._planned_at = now

    def on_submitted(self, plan: StepPlan, now: float) -> None:
        if self._engine.num_in_flight < self._engine.max_in_flight:
            return
        self._needs_s.append(now - self._planned_at)
        if not self._engine.oldest_is_over:
            self._extra_s *= CALMING
            return
        self.num_late += 1
        self._took.clear()
        self._extra_s += EXTRA_S

    def on_priced(self, step: PricedStep) -> None:
        if step.price.expected_s > 0:
            took = self._took.setdefault(bool(step.prompts), deque(maxlen=LATELY))
            took.append(step.seconds / step.price.expected_s)
