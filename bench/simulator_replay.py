"""Would the scheduler decide the same again? A fresh one is given the recorded adds, aborts,
launches and results at the recorded readings of the clock; its decisions must be those of the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline import registry
from ridgeline.clock import VirtualClock
from ridgeline.cost.pricer import Pricer
from ridgeline.engine import Engine
from ridgeline.errors import EngineFault, RequestFault
from ridgeline.formats import POLICIES
from ridgeline.observe.engine_header import EngineHeader, read_setup
from ridgeline.observe.event_log import (
    Aborted,
    Added,
    Collected,
    EventLog,
    Planned,
    Submitted,
    plan_digest,
)
from ridgeline.observe.evidence import RunRecord
from ridgeline.request import FinishReason, Request, RequestOutput
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.block_pools import open_pools
from ridgeline.scheduler.policies import make_policy
from ridgeline.scheduler.policies.base import PolicySetting
from ridgeline.scheduler.policies.step_times import LearnedPricer
from ridgeline.scheduler.scheduler import Scheduler, _Step
from ridgeline.step import Listener, StepPlan, StepPricer, StepResult


@dataclass(frozen=True, slots=True)
class Decision:
    """One plan: its step, when it was made, the digest of all of it ("" when it was empty)."""

    step_id: int
    now: float
    digest: str

    @property
    def line(self) -> str:
        return f"{self.step_id} {self.now!r} {self.digest}\n"


@dataclass(frozen=True, slots=True)
class Replay:
    """What was decided then and what is decided now; `stopped` says why the replay could not go
    on, "" when it came to the end of the log."""

    recorded: tuple[Decision, ...]
    replayed: tuple[Decision, ...]
    stopped: str = ""

    @property
    def is_equal(self) -> bool:
        return not self.stopped and self.recorded == self.replayed

    @property
    def first_difference(self) -> int | None:
        """Number of the first decision that differs or is missing; None: there is none."""
        pairs = zip(self.recorded, self.replayed, strict=False)
        differs = (n for n, (then, now) in enumerate(pairs) if then != now)
        shorter = min(len(self.recorded), len(self.replayed))
        is_longer = len(self.recorded) != len(self.replayed)
        return next(differs, shorter if is_longer else None)


def decision_log(decisions: Sequence[Decision]) -> str:
    """One line for each; equal texts mean equal decisions at equal times."""
    return "".join(decision.line for decision in decisions)


def recorded_decisions(log: EventLog) -> tuple[Decision, ...]:
    planned = (event for event in log.events if isinstance(event, Planned))
    return tuple(Decision(event.plan.step_id, event.now, event.digest) for event in planned)


def replay(log: EventLog) -> Replay:
    """Feed the log to a fresh engine. Stops at the first decision that is not the recorded one,
    as nothing after it would mean anything."""
    recorded = recorded_decisions(log)
    player = _Player(log)
    try:
        player.play(recorded)
    except (RequestFault, KeyError, _Differs) as problem:
        return Replay(recorded, tuple(player.decisions), str(problem) or "it went another way")
    return Replay(recorded, tuple(player.decisions))


class _Differs(Exception):
    """The replay took another way than the log."""


class _Player:
    """A fresh engine whose executor and clock are the log."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.clock = VirtualClock()
        self.tape = _Tape(
            log.header.num_blocks,
            log.header.block_size,
            self.clock,
            {e.step_id: e for e in log.events if isinstance(e, Collected)},
            {e.step_id: e.now for e in log.events if isinstance(e, Submitted)},
        )
        self.scheduler, listeners = _scheduler(log.header)
        self.engine = Engine(self.scheduler, self.tape, self.clock, log.header.max_in_flight)
        self.engine.listeners += listeners
        self.decisions: list[Decision] = []

    def play(self, recorded: Sequence[Decision]) -> None:
        for event in self.log.events:
            if isinstance(event, Submitted) or (isinstance(event, Collected) and event.is_behind):
                continue  # part of the launch, or of the collect that failed, before it
            self.clock.advance_to(event.now)
            if isinstance(event, Added):
                self._add(event)
            elif isinstance(event, Aborted):
                self.engine.abort(event.request_id)
            elif isinstance(event, Planned):
                if self.log.header.speculate != "off":
                    rows = event.plan.scheduled
                    self.scheduler.taped = {row.request_id: row.num_draft for row in rows}
                self._plan(recorded[len(self.decisions)])
            else:
                self._collect(event)

    def _add(self, event: Added) -> None:
        try:
            self.engine.add(event.request())
        except RequestFault as fault:
            if event.refused != fault.code:
                raise
        else:
            if event.refused is not None:
                raise _Differs(f"{event.request_id} was refused then ({event.refused})")

    def _plan(self, then: Decision) -> None:
        now, step_id = self.clock.now(), self.engine.scheduler.state.last_planned
        self.tape.digest = ""
        sent = self.engine.launch()
        step_id += sent is not None
        self.decisions.append(Decision(step_id, now, self.tape.digest))
        if self.decisions[-1] != then:
            raise _Differs(f"step {then.step_id} is planned in another way")

    def _collect(self, event: Collected) -> None:
        outputs = self.engine.collect()
        if [_given(output) for output in outputs] != [_given(o) for o in event.outputs]:
            raise _Differs(f"step {event.step_id} gives other outputs")


def _given(output: RequestOutput) -> tuple[str, int, FinishReason | None]:
    return output.request_id, len(output.new_token_ids), output.finish_reason


@dataclass(slots=True)
class _Tape:
    """An executor that gives what was recorded, at the recorded times."""

    num_blocks: int
    block_size: int
    clock: VirtualClock
    collected: dict[int, Collected]
    submitted: dict[int, float]
    digest: str = ""  # of the last plan

    def submit(self, plan: StepPlan) -> _Recorded:
        self.digest = plan_digest(plan)
        self.clock.advance_to(self.submitted.get(plan.step_id, self.clock.now()))
        return _Recorded(self.collected.get(plan.step_id))


@dataclass(frozen=True, slots=True)
class _Recorded:
    collected: Collected | None

    def result(self) -> StepResult:
        if self.collected is None:
            raise EngineFault("the log ends before this step")
        if self.collected.result is None:
            raise EngineFault(self.collected.error or "a step failed")
        return self.collected.result


class _TapedScheduler(Scheduler):
    """As many draft tokens as then: their number followed from times that were measured."""

    taped: Mapping[str, int] | None = None  # of each row, in the next plan

    def _num_draft_tokens(self, now: float) -> int:
        if self.taped is None:
            return super()._num_draft_tokens(now)
        return max(self.taped.values(), default=0)

    def _num_wanted(self, row: Request, step: _Step) -> int:
        if self.taped is None:
            return super()._num_wanted(row, step)
        return self.taped.get(row.request_id, 0)


def _scheduler(header: EngineHeader) -> tuple[_TapedScheduler, list[Listener]]:
    """As it was built then, with the listeners from which its policy learned step times."""

    def make() -> BlockManager:
        sizes = header.num_blocks, header.block_size
        return BlockManager(*sizes, header.windows, header.prefix_caching)

    blocks = open_pools(make, header.pools, header.max_num_batched_tokens)
    pricer, listeners = None, list[Listener]()
    policy = registry.load(POLICIES, header.policy, "policy")
    if policy.wants_prices and header.setup:
        pricer = LearnedPricer(Pricer(read_setup(header.setup)))  # that nobody taught
    elif policy.needs_promise:
        real = Pricer(read_setup(header.setup))
        pricer = LearnedPricer(real)
        run_record = RunRecord(header, real)
        run_record.listeners.append(pricer)
        listeners.append(run_record)
    scheduler = _TapedScheduler(
        blocks,
        make_policy(header.policy, _setting(header, pricer)),
        header.max_num_batched_tokens,
        header.max_num_seqs,
        num_drafts=header.num_drafts,
        finds_drafts=header.speculate == "off",  # else the tape knows how many there were
        starvation_limit=header.starvation_limit,
        max_preemptions=header.max_preemptions,
        max_num_mixed_tokens=header.max_num_mixed_tokens,
        stages=header.stages,
    )
    return scheduler, listeners


def _setting(header: EngineHeader, pricer: StepPricer | None) -> PolicySetting:
    return PolicySetting(
        max_num_seqs=header.max_num_seqs,
        max_num_batched_tokens=header.max_num_batched_tokens,
        num_cache_tokens=header.num_blocks * header.block_size,
        ttft_slo_s=header.ttft_slo_s,
        tpot_slo_s=header.tpot_slo_s,
        pricer=pricer,
    )
