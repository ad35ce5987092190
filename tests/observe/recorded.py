"""Engines on the exact fake device whose every word is recorded, and the same log played back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ridgeline.clock import VirtualClock
from ridgeline.engine import Engine
from ridgeline.errors import EngineFault, RequestFault
from ridgeline.observe.engine_header import header_of
from ridgeline.observe.event_log import (
    Aborted,
    Added,
    Collected,
    EventLog,
    LogFile,
    Planned,
    Recorder,
    plan_digest,
    read_event_log,
)
from ridgeline.request import RequestOutput
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.block_pools import open_pools
from ridgeline.scheduler.cache_shares import IDLE_POOLS
from ridgeline.scheduler.policies.base import Policy
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.step import StepPlan, StepResult
from tests.simulated_world import World


class RecordedWorld(World):
    """A world that writes an event log. Its cache is never cleared from outside, which no log
    could know, and tenants are idle after as many blocks as a log takes for granted."""

    idle_pools = IDLE_POOLS

    def __init__(self, seed: int, path: Path) -> None:
        super().__init__(seed)
        self.scheduler.blocks.clear_cache = lambda: None  # type: ignore[method-assign]
        self.outputs: list[RequestOutput] = []
        header = header_of(
            self.scheduler, policy=self.case.policy, max_in_flight=self.case.max_in_flight
        )
        self.file = LogFile(str(path))
        self.engine.listeners.append(Recorder(self.file.write, header, b"k"))

    def on_output(self, output: RequestOutput, now: float) -> None:
        super().on_output(output, now)
        self.outputs.append(output)


@dataclass(slots=True)
class Played:
    """An executor that answers as the log says."""

    num_blocks: int
    block_size: int
    answers: deque[Collected]
    digests: list[str] = field(default_factory=list)

    def submit(self, plan: StepPlan) -> PlayedFuture:
        self.digests.append(plan_digest(plan))
        return PlayedFuture(self)


@dataclass(frozen=True, slots=True)
class PlayedFuture:
    executor: Played

    def result(self) -> StepResult:
        answer = self.executor.answers.popleft()
        if answer.result is None:
            raise EngineFault(answer.error or "")
        return answer.result


def play(log: EventLog, policy: Policy) -> tuple[list[str], list[str], list[RequestOutput]]:
    """(digests in the log, digests of the engine that did it again, its outputs)."""
    header, clock = log.header, VirtualClock()
    make = partial(
        BlockManager,
        header.num_blocks,
        header.block_size,
        header.windows,
        header.prefix_caching,
        b"other key",
    )
    blocks = open_pools(make, header.pools, header.max_num_batched_tokens)
    scheduler = Scheduler(
        blocks,
        policy,
        header.max_num_batched_tokens,
        header.max_num_seqs,
        num_drafts=header.num_drafts,
        starvation_limit=header.starvation_limit,
        max_preemptions=header.max_preemptions,
        stages=header.stages,
    )
    answers = deque(event for event in log.events if isinstance(event, Collected))
    executor = Played(header.num_blocks, header.block_size, answers)
    engine = Engine(scheduler, executor, clock, header.max_in_flight)
    outputs: list[RequestOutput] = []
    logged = []
    for event in log.events:
        clock.advance_to(event.now)
        if isinstance(event, Added):
            _add(engine, event)
        elif isinstance(event, Aborted):
            aborted = engine.abort(event.request_id)
            outputs += [aborted] if aborted is not None else []
        elif isinstance(event, Planned):
            logged += [event.digest] if event.plan.scheduled else []
            assert (engine.launch() is None) == (not event.plan.scheduled)
        elif isinstance(event, Collected) and not event.is_behind:
            outputs += engine.collect()
    assert not answers
    return logged, executor.digests, outputs


def _add(engine: Engine, event: Added) -> None:
    code = None
    try:
        engine.add(event.request())
    except RequestFault as fault:
        code = fault.code
    assert code == event.refused


def ends(outputs: Sequence[RequestOutput]) -> list[tuple[str, tuple[int, ...], str | None]]:
    """What users would see of them."""
    return [
        (o.request_id, o.new_token_ids, o.finish_reason and o.finish_reason.value) for o in outputs
    ]


def recorded(seed: int, path: Path, num_steps: int) -> tuple[RecordedWorld, EventLog]:
    world = RecordedWorld(seed, path)
    world.run(num_steps)
    world.file.close()
    return world, read_event_log(path)
