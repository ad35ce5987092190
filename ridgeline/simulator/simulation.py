"""What would happen? The real engine, scheduler and block manager under a workload, on a virtual
clock.

Each replica is an engine whose loop is that of the server: take in what has arrived, launch until
enough steps are in flight, wait for the oldest and collect it. Only the machine is made up: a step
takes what the cost model says. Where nothing is decided for a while, many steps are passed over at
once (`macro`), with the same outcome.
"""

from __future__ import annotations

import gc
import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import msgspec

from ridgeline.clock import Rng, VirtualClock
from ridgeline.cost.pricer import Setup
from ridgeline.errors import ConfigError
from ridgeline.formats import DRAFT_METHODS
from ridgeline.request import Request, SamplingParams
from ridgeline.router.policies import NoReplica, RequestView
from ridgeline.router.speeds import PricedSpeed
from ridgeline.scheduler.block_manager import BlockManager, blocks_needed
from ridgeline.scheduler.block_pools import open_pools
from ridgeline.scheduler.policies import make_policy
from ridgeline.scheduler.policies.base import PolicySetting
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.simulator.executor import Answer, SimulatedExecutor, Speculation
from ridgeline.simulator.macro import Leap, LeapingEngine
from ridgeline.simulator.options import (
    Machine,
    Options,
    Outage,
    limits_of,
    machine_of,
    without_paging,
)
from ridgeline.simulator.replica import Job, Replica
from ridgeline.simulator.report import (
    RequestTimeline,
    Slo,
    StepSample,
    Summary,
    summarize,
    used_blocks,
)
from ridgeline.simulator.workload import FRESH_TOKEN, MAX_LENGTH, Arrival
from ridgeline.speculation.controller import DraftLengthController
from ridgeline.speculation.price import Drafter, DraftPrices, Target
from ridgeline.step import Listener, StepPricer

__all__ = ["Job", "Machine", "Options", "Outage", "Simulation", "SimulationReport"]

NAME_BYTES = 16  # of a block that no prompt shares

ListenerOf = Callable[[int, Scheduler], Listener]  # of a replica, by its number


@dataclass(slots=True)
class SimulationReport:
    """`requests` in order of arrival. `num_slots` and `num_blocks` are those of one replica;
    `num_leaps` is how often many steps were passed over at once."""

    requests: list[RequestTimeline]
    steps: list[StepSample]
    num_slots: int
    num_blocks: int
    num_replicas: int
    num_leaps: int

    @property
    def num_steps(self) -> int:
        return sum(sample.num_steps for sample in self.steps)

    def used_shares(self, times: Sequence[float]) -> list[float]:
        """Of all blocks, at each of the times."""
        used = [(when, sum(blocks)) for when, *blocks in used_blocks(self.steps, self.num_replicas)]
        moments, whole = [when for when, _ in used], self.num_blocks * self.num_replicas
        places = [bisect_right(moments, t) for t in times]
        return [used[n - 1][1] / whole if n else 0.0 for n in places]

    def summary(self, slo: Slo | None = None, usd_per_hour: float | None = None) -> Summary:
        return summarize(
            self.requests,
            self.steps,
            num_slots=self.num_slots,
            num_blocks=self.num_blocks,
            num_replicas=self.num_replicas,
            slo=slo,
            usd_per_hour=usd_per_hour,
        )


class _Event(msgspec.Struct, frozen=True, order=True, gc=False):
    """A replica's loop goes on: its oldest step is over (`collects`), or a leap, or its sleep, or
    it has waited with a plan for who comes (`plans`). The earliest is the first."""

    when: float
    order: int
    replica: Replica
    collects: bool = False
    leap: Leap | None = None
    plans: bool = False


class Simulation:
    """One workload on some replicas. `run` may be called once."""

    def __init__(
        self,
        setup: Setup | Machine,
        workload: Sequence[Arrival],
        options: Options | None = None,
        *,
        rng: Rng | None = None,
        listener_of: ListenerOf | None = None,
    ) -> None:
        self.options = options = options or Options()
        self.now = 0.0
        self.rng = rng
        self._jobs: dict[str, Job] = {}
        self._events: list[_Event] = []
        self._num_events = 0
        self._num_sent = 0
        self._sampling: dict[int, SamplingParams] = {}
        self.workload = workload
        self.limits = limits_of(setup, workload, options)
        self.machine = machine_of(setup, self.limits)
        self.limits = without_paging(self.limits, self.machine)
        if options.router is not None and rng is None:
            raise ConfigError("a router policy needs an rng")
        if options.speculation is not None and rng is None:
            raise ConfigError("speculation needs an rng")
        num_replicas = options.num_replicas or (
            setup.layout.replicas if isinstance(setup, Setup) else 1
        )
        self._listener_of = listener_of
        self._speeds = PricedSpeed(self.machine.pricer, self.limits.max_num_batched_tokens)
        self.replicas = [self._replica(number) for number in range(num_replicas)]
        self._lost: list[Replica] = []  # with what is known of their steps
        self._homeless: list[Job] = []  # while no replica is ready
        self._changes = _changes_of(options.outages, num_replicas)

    def run(self) -> SimulationReport:
        return self.run_jobs(self._job(i, arrival) for i, arrival in enumerate(self.workload))

    def run_jobs(self, jobs: Iterable[Job]) -> SimulationReport:
        """Requests in order of arrival. Those made while they come take no room before."""
        collects_garbage = gc.isenabled()
        gc.disable()  # nothing here is in a cycle: it would look through all requests for nothing
        try:
            return self._run_jobs(jobs)
        finally:
            if collects_garbage:
                gc.enable()

    def _run_jobs(self, jobs: Iterable[Job]) -> SimulationReport:
        events, timelines = self._events, list[RequestTimeline]()
        coming = iter(jobs)
        job = next(coming, None)
        while job is not None or events or self._homeless:
            horizon = inf if job is None else job.request.arrival_time
            if self._changes and self._changes[0][0] <= horizon:
                horizon = self._changes[0][0]
                if not events or horizon <= events[0].when:
                    self._change()
                    continue
            elif job is not None and (not events or horizon <= events[0].when):
                self.now = horizon
                timelines.append(job.timeline)
                self._arrive(job)
                job = next(coming, None)
                continue
            event: _Event | None = heapq.heappop(events)
            while event is not None:
                self.now = event.when
                event = None if event.replica.is_lost else self._turn(event, horizon)
                if event is not None and (len(self.replicas) > 1 or event.when >= horizon):
                    heapq.heappush(events, event)
                    break
        everyone = (*self._lost, *self.replicas)
        samples = [sample for replica in everyone for sample in replica.samples]
        return SimulationReport(
            timelines,
            samples,
            self.limits.max_num_seqs,
            self.machine.num_blocks * self.machine.pools,
            len(self.replicas),
            sum(replica.num_leaps for replica in everyone),
        )

    # ------------------------------------------------------------------ events

    def _turn(self, event: _Event, horizon: float) -> _Event | None:
        """What comes next for this replica, if anything."""
        replica = event.replica
        replica.clock.advance_to(event.when)
        if event.collects:
            replica.collect()
        if event.leap is not None:
            replica.land(event.leap)
        replica.take_in()
        if event.collects and self.options.macro_steps:
            may_overshoot = self._is_blind and replica.engine.plans_ahead_s is None
            may_overshoot = may_overshoot and not self._changes  # what is lost has not run
            leap = replica.leap(horizon, may_overshoot=may_overshoot)
            if leap is not None:
                return self._next(replica, leap.now, leap=leap)
        return self._go_on(replica, is_time=event.plans)

    def _go_on(self, replica: Replica, *, is_time: bool = False) -> _Event | None:
        """Launch, and say when the loop turns again. `is_time`: for a plan that has waited."""
        engine, now = replica.engine, replica.clock.now()
        if self.options.computes_in_submit:
            is_sent = replica.launch()
            is_full = engine.num_in_flight >= engine.max_in_flight
            collects = engine.num_in_flight > 0 and (is_full or not is_sent)
            when = replica.clock.now()
        else:
            most, plans_at = engine.max_in_flight, None if is_time else engine.plans_at()
            while plans_at is None and engine.num_in_flight < most and replica.launch():
                plans_at = engine.plans_at()
            if plans_at is not None:
                replica.is_asleep = False
                return self._next(replica, plans_at, plans=True)
            spans = engine.executor.spans
            when, is_sent, collects = spans[0].end_s if spans else now, False, bool(spans)
        replica.is_asleep = not (is_sent or collects)
        return None if replica.is_asleep else self._next(replica, when, collects=collects)

    def _next(
        self,
        replica: Replica,
        when: float,
        *,
        collects: bool = False,
        leap: Leap | None = None,
        plans: bool = False,
    ) -> _Event:
        self._num_events += 1
        return _Event(when, self._num_events, replica, collects, leap, plans)

    @property
    def _is_blind(self) -> bool:
        """Requests are placed without a look at the replicas."""
        return self.options.router is None or len(self.replicas) == 1

    def _arrive(self, job: Job) -> None:
        try:
            replica = self.replicas[self._route(job)]
        except NoReplica:
            self._homeless.append(job)
            return
        job.timeline.replica = replica.number
        replica.inbox.append(job)
        if replica.is_asleep:
            replica.is_asleep = False
            heapq.heappush(self._events, self._next(replica, self.now))

    def _change(self) -> None:
        """A replica is lost, or is back."""
        self.now, number, is_back = self._changes.pop(0)
        old = self.replicas[number]
        if is_back:
            old.is_ready = True
            again, self._homeless = self._homeless, []
        else:
            old.lose(self.now)
            self._lost.append(old)
            new = self.replicas[number] = self._replica(number)
            new.clock.advance_to(self.now)
            new.is_ready = False
            own = [job for job in self._jobs.values() if job.timeline.replica == number]
            again = [self._begun_anew(job) for job in (*own, *old.inbox)]
        for job in again:
            self._arrive(job)

    def _begun_anew(self, job: Job) -> Job:
        """What was answered of it is lost; its arrival stays."""
        request, timeline = job.request, job.timeline
        self._jobs.pop(request.request_id, None)
        timeline.started_s = timeline.first_token_s = None
        timeline.num_retries += 1
        fresh = Request(
            request.request_id,
            request.prompt_token_ids,
            request.sampling,
            request.arrival_time,
            request.priority,
            request.cache_salt,
            request.fork_of,
            request.tenant,
            request.weight,
        )
        fresh.block_hashes = request.block_hashes
        return Job(fresh, job.answer, timeline)

    def _route(self, job: Job) -> int:
        request = job.request
        self._num_sent += 1
        if len(self.replicas) == 1 and self.replicas[0].is_ready:
            return 0
        if self.options.router is None or self.rng is None:
            ready = [n for n, replica in enumerate(self.replicas) if replica.is_ready]
            if not ready:
                raise NoReplica("none is ready")
            return ready[(self._num_sent - 1) % len(ready)]
        views = [replica.view(request) for replica in self.replicas]
        asked = RequestView(len(request.prompt_token_ids))
        chosen = self.options.router.choose(asked, views, self.rng)
        job.num_to_read = asked.num_prompt_tokens - views[chosen].num_cached_tokens
        return chosen

    # ------------------------------------------------------------------ what is built

    def _job(self, index: int, arrival: Arrival) -> Job:
        """The engine's clock stands `request_s` behind what the user sees as the arrival."""
        when = arrival.time_s + self.options.request_s
        request = Request(
            str(index),
            arrival.tokens(index),
            self._sampling_of(arrival.num_output),
            when,
            tenant=arrival.tenant,
            weight=arrival.weight,
        )
        if not (arrival.prompt or arrival.prefix_hashes):
            request.block_hashes = self._own_hashes(index, arrival)
        timeline = RequestTimeline(
            arrival.id, arrival.time_s, arrival.num_input, arrival.num_output
        )
        return Job(request, Answer(arrival.num_input, filler=FRESH_TOKEN + index), timeline)

    def _own_hashes(self, index: int, arrival: Arrival) -> list[bytes]:
        """Names for the blocks of a request that begins like no other: they need not be derived
        from its tokens."""
        if not self.replicas[0].engine.scheduler.blocks.prefix_caching:
            return []
        first = index * (MAX_LENGTH << 1)
        last = first + (arrival.num_input + arrival.num_output) // self.limits.block_size
        return [name.to_bytes(NAME_BYTES, "big") for name in range(first, last)]

    def _sampling_of(self, num_output: int) -> SamplingParams:
        found = self._sampling.get(num_output)
        if found is None:
            found = self._sampling[num_output] = SamplingParams(max_tokens=num_output)
        return found

    def _may_find_prefixes(self) -> bool:
        """Could the prefix cache find anything? Not where no prompts begin alike and blocks are
        there for all, so that nobody is preempted: then it would be hashing for nothing."""
        limits, machine, work = self.limits, self.machine, self.workload
        if not work or any(a.prefix_hashes or a.prompt or a.tenant for a in work):
            return True
        longest = max(arrival.num_input + arrival.num_output for arrival in work)
        chunk = limits.max_num_batched_tokens
        each = blocks_needed(longest, limits.block_size, machine.windows, chunk)
        return each * limits.max_num_seqs > machine.num_blocks

    def _replica(self, number: int) -> Replica:
        options, machine, limits = self.options, self.machine, self.limits
        listener_of = self._listener_of
        size = limits.block_size
        caches = options.prefix_caching and options.paging
        if caches and listener_of is None:
            caches = self._may_find_prefixes()
        make = partial(BlockManager, machine.num_blocks, size, machine.windows, caches)
        blocks = open_pools(make, machine.pools, limits.max_num_batched_tokens)
        setting = PolicySetting(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            num_cache_tokens=blocks.num_blocks * size // len(machine.windows),
            ttft_slo_s=options.ttft_slo_s,
            tpot_slo_s=options.tpot_slo_s,
            pricer=machine.pricer,
        )
        speculation = options.speculation
        scheduler = Scheduler(
            blocks,
            make_policy(options.policy, setting),
            limits.max_num_batched_tokens,
            limits.max_num_seqs,
            num_drafts=speculation.num_drafts if speculation is not None else 0,
            draft_lengths=_controller(speculation, machine.pricer),
            chunked_prefill=options.chunked_prefill,
            max_num_mixed_tokens=options.max_num_mixed_tokens if options.chunked_prefill else None,
            stages=max(1, len(machine.stages)),
        )
        clock = VirtualClock()  # one for each: a loop may stand still while others go on
        executor = SimulatedExecutor(
            machine.pricer,
            clock,
            machine.num_blocks,
            size,
            options.computes_in_submit,
            speculation,
            self.rng,
            stages=machine.stages,
            sent_s=machine.sent_s,
            returned_s=machine.returned_s,
            pools=machine.pools,
        )
        in_flight = max(options.max_in_flight, len(machine.stages) + 1 if machine.stages else 0)
        engine = LeapingEngine(scheduler, executor, clock, in_flight, options.plans_ahead_s)
        if listener_of is not None:
            engine.listeners.append(listener_of(number, scheduler))
        static = options.static_batching
        return Replica(number, engine, self._jobs, self._speeds, is_static=static)


def _changes_of(outages: Iterable[Outage], num_replicas: int) -> list[tuple[float, int, bool]]:
    """(when, which replica, whether it is back then), the earliest first. Raises ConfigError."""
    changes = []
    ends = dict[int, float]()
    for outage in sorted(outages, key=lambda one: one.start_s):
        if outage.replica >= num_replicas:
            raise ConfigError(
                f"an outage of replica {outage.replica}: there are {num_replicas}, from 0"
            )
        if outage.start_s < ends.get(outage.replica, 0.0):
            raise ConfigError(f"two outages of replica {outage.replica} overlap; make them one")
        ends[outage.replica] = outage.end_s
        changes.append((outage.start_s, outage.replica, False))
        changes.append((outage.end_s, outage.replica, True))
    return sorted(changes)


def _controller(
    speculation: Speculation | None, pricer: StepPricer
) -> DraftLengthController | None:
    """As the engine has it, but that nothing is measured: steps take their price."""
    if speculation is None or not speculation.is_chosen:
        return None
    if not isinstance(pricer, Target):
        raise ConfigError("as many drafts as pay: that needs a machine with prices of its steps")
    return DraftLengthController(
        DraftPrices(pricer, speculation.drafter or Drafter()).seconds,
        acceptance=DRAFT_METHODS["draft"].acceptance,
        max_drafts=speculation.num_drafts,
        max_verified_tokens=speculation.max_verified_tokens,
    )
