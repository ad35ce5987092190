"""What does the engine process do all day? Take commands, step, tell; one message per turn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from ridgeline.clock import Clock
from ridgeline.config import EngineConfig, ResolvedConfig
from ridgeline.engine import Engine
from ridgeline.errors import EngineFault, RequestFault
from ridgeline.generation import GenerationDefaults
from ridgeline.observe.steps import StepCounters
from ridgeline.request import RequestOutput
from ridgeline.scheduler.beam_group import ROW_MARK
from ridgeline.server.engine_gauges import GaugeReader, ReportsMemory
from ridgeline.server.wire import (
    Abort,
    Add,
    Admitted,
    Command,
    Event,
    Ready,
    Refused,
    Step,
    pack_output,
    unpack_add,
)

MAX_FAILURES = 3  # in a row: the device will not recover in this process

logger = logging.getLogger(__name__)


class MemoryLine(Protocol):
    @property
    def what(self) -> str: ...
    @property
    def predicted(self) -> int: ...


class HasVocabulary(Protocol):
    @property
    def vocab_size(self) -> int: ...


class Served(Protocol):
    """What the engine process needs of what a builder made; ridgeline.build.Built has it."""

    @property
    def engine(self) -> Engine: ...
    @property
    def spec(self) -> HasVocabulary: ...
    @property
    def resolved(self) -> ResolvedConfig: ...
    @property
    def memory(self) -> Sequence[MemoryLine]: ...
    @property
    def device(self) -> ReportsMemory: ...
    @property
    def generation(self) -> GenerationDefaults: ...
    @property
    def end_token_ids(self) -> frozenset[int]: ...


Builder = Callable[[EngineConfig, Callable[[str, int, int], None]], Served]


class CommandWire(Protocol):
    def take(self, *, wait: bool) -> list[Command]: ...
    def send(self, event: Event) -> None: ...


def ready_message(served: Served, pid: int) -> Ready:
    resolved = served.resolved
    return Ready(
        pid,
        resolved.model_path,
        resolved.model_name,
        served.spec.vocab_size,
        resolved.max_model_len,
        resolved.block_size,
        resolved.num_blocks,
        resolved.max_num_seqs,
        tuple(sorted(served.end_token_ids)),
        tuple(sorted(served.generation.asked().items())),
        tuple((row.what, row.predicted) for row in served.memory),
        served.device.memory_total(),
        min(resolved.max_model_len, served.engine.scheduler.max_servable_tokens),
    )


class EngineLoop:
    """Runs until the wire closes, or until the engine fails (which it lets through)."""

    def __init__(self, served: Served, wire: CommandWire, clock: Clock) -> None:
        self._engine = served.engine
        self._wire = wire
        self._clock = clock
        self._watch = StepCounters()
        self._num_failures = 0
        self._engine.observers.append(self._watch)
        scheduler = served.engine.scheduler
        self._gauges = GaugeReader(scheduler, served.device, self._watch, clock)

    def run(self) -> None:
        while True:
            self.turn()

    def turn(self) -> None:
        """Obey what came in, then one step. Waits for commands when there is nothing to do."""
        commands = self._wire.take(wait=self._engine.is_idle)
        replies = [reply for command in commands if (reply := self._obey(command)) is not None]
        if replies:
            self._tell(replies, [])  # a refusal need not wait for a step
        num_steps = self._watch.num_steps
        outputs = self._engine.step()
        has_stepped = self._watch.num_steps != num_steps
        if outputs or commands or has_stepped:
            self._tell([], outputs)
        if has_stepped:
            self._count_failures()

    def _count_failures(self) -> None:
        """Steps that fail together, because they were in flight together, count once."""
        self._num_failures = self._num_failures + 1 if self._watch.last_failed else 0
        if self._num_failures >= MAX_FAILURES:
            raise EngineFault(f"steps failed {MAX_FAILURES} times in a row")

    def _obey(self, command: Command) -> Admitted | Refused | None:
        if isinstance(command, Add):
            return self._add(command)
        if isinstance(command, Abort):
            for request_id in command.request_ids:
                self._engine.abort(request_id)
        return None

    def _add(self, command: Add) -> Admitted | Refused:
        """All of them or none."""
        added: list[str] = []
        try:
            for request in unpack_add(command, self._clock.now()):
                self._engine.add(request)
                added.append(request.request_id)
        except RequestFault as fault:
            for request_id in added:
                self._engine.abort(request_id)
            return Refused(command.ticket, str(fault), fault.param, fault.code)
        return Admitted(command.ticket)

    def _tell(
        self, replies: Sequence[Admitted | Refused], outputs: Sequence[RequestOutput]
    ) -> None:
        self._wire.send(
            Step(
                tuple(replies),
                tuple(row.partition(ROW_MARK)[0] for row in self._watch.take_started()),
                tuple(pack_output(output) for output in outputs),
                self._gauges.read(),
            )
        )
