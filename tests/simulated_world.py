"""A world in which everything happens to one engine, and every step is checked.

One seed draws a configuration and then a history: requests arrive (plain, forks, beam searches,
with salts, stop tokens, log-probabilities), are aborted in any state, twice, or by unknown ids;
steps fail, rows go wrong, results come late, the cache is cleared. The device is exact, so every
token that is delivered is compared with what the prompt alone implies.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from hashlib import sha256
from operator import itemgetter
from typing import Any, NoReturn

from msgspec import structs

from ridgeline.clock import VirtualClock
from ridgeline.engine import Engine
from ridgeline.errors import EngineLost, RequestFault
from ridgeline.request import FinishReason, Request, RequestOutput, SamplingParams
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.block_pools import open_pools
from ridgeline.scheduler.cache_shares import IDLE_POOLS, MOST_SHARES
from ridgeline.scheduler.policies.base import Policy, Rank
from ridgeline.scheduler.policies.fair import Fair
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.policies.priority import Priority
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.step import (
    BlockTables,
    Decodes,
    Listener,
    PartialResults,
    StepFuture,
    StepPlan,
    StepRecord,
    StepResult,
    StepShape,
    WaveCutter,
)
from tests.fake_device import (
    VOCAB,
    FakeDevice,
    FakeFuture,
    Truth,
    Violation,
    Windows,
    demand,
    truth_of,
)

MAX_TOKENS = 48  # of the longest request that a world asks for
MAX_LIVE = 20
OFTEN = 20.0  # times as often, while the host has still to learn that a step has failed
AT_ONCE = 0.3  # of deaths, noticed by who sends a step
ASKS_AGAIN = 0.7  # of requests that were lost with a rank
WINDOWS: tuple[Windows, ...] = (
    *[(None,)] * 4,
    (None, 3),
    (None, 1),
    (5,),
    (None, None, 8),
    (2, 9),
)


class Moody(Policy):
    """Ranks by something that changes all the time, and has wishes of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def rank(self, request: Request, now: float) -> Rank:
        return (hash((request.order, int(now) // 7)) % 5,)

    def token_budget(self, running: Collection[Request], now: float) -> int | None:
        return self.rng.choice([None, 0, 1, 3, 1000])

    def num_drafts(self, request: Request, shape: StepShape) -> int | None:
        return self.rng.choice([None, 0, 1, 9])


@dataclass(slots=True)
class Live:
    """One request in the world, and what it has got."""

    request: Request
    truth: Truth
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    num_outputs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration."""

    num_blocks: int
    block_size: int
    windows: Windows
    max_num_batched_tokens: int
    max_num_seqs: int
    max_in_flight: int
    num_drafts: int
    prefix_caching: bool
    policy: str
    starvation_limit: int
    max_preemptions: int
    longest_prompt: float  # as a share of the request
    has_faults: bool
    num_salts: int
    arrival: float
    beams: float
    weights: tuple[float, ...] = (1.0,)  # of its tenants
    stages: int = 1
    pools: int = 1  # of devices that attend for rows of their own


def draw_case(rng: random.Random) -> Case:
    windows = rng.choice(WINDOWS)
    block_size = rng.choice([1, 2, 3, 16])
    most = 64 if block_size < 16 else 24
    return Case(
        num_blocks=rng.randint(max(2, len(windows)) * rng.choice([1, 2]), most),
        block_size=block_size,
        windows=windows,
        max_num_batched_tokens=rng.choice([1, 2, 3, 5, 8, 16, 64, 512]),
        max_num_seqs=rng.choice([1, 2, 3, 4, 6, 8, 16]),
        max_in_flight=rng.randint(1, 3),
        num_drafts=rng.choice([0, 0, 0, 1, 2, 3, 4]),
        prefix_caching=rng.random() < 0.7,
        policy=rng.choice(["fcfs", "fair", "priority", "moody"]),
        starvation_limit=rng.choice([1, 4, 256]),
        max_preemptions=rng.choice([1, 2, 8]),
        longest_prompt=rng.choice([1.0, 0.2]),
        has_faults=rng.random() < 0.4,
        num_salts=rng.choice([1, 1, 2, 3]),
        arrival=rng.choice([0.1, 0.3, 0.8]),
        beams=rng.choice([0.05, 0.05, 0.05, 0.5]),
    )


class CheckedBlocks(BlockManager):
    """Keeps a diary of who used which block last, and knows by a look at all which may go."""

    def __init__(self, *args: Any, idle_pools: int = IDLE_POOLS) -> None:
        super().__init__(*args)
        self.most_idle = idle_pools * self.num_blocks
        self.user: dict[int, bytes] = {}
        self.last_use: dict[bytes, int] = {}  # in blocks taken; the last to use is the last here
        self.num_taken = 0
        self.counts: Counter[str] = Counter()

    def _meet(self, tenant: bytes) -> None:
        super()._meet(tenant)
        if self._shares:
            self._shares._most_idle = self.most_idle

    def _hold(self, block: int, tenant: bytes) -> None:
        super()._hold(block, tenant)
        self._note(block, tenant)

    def _take(self, count: int, tenant: bytes) -> list[int]:
        taken: list[int] = []
        for _ in range(count):
            lawful = self._lawful(tenant)
            taken += super()._take(1, tenant)
            demand(taken[-1] in lawful, "the block that is to go goes", taken[-1], lawful)
            self._note(taken[-1], tenant)
        return taken

    def _note(self, block: int, tenant: bytes) -> None:
        self.user[block] = tenant
        self.last_use.pop(tenant, None)
        self.last_use[tenant] = self.num_taken

    def _lawful(self, tenant: bytes) -> list[int]:
        """Any of these may be taken for this tenant."""
        free = list(self._free)
        if self._shares is None:
            return free[:1]
        self.num_taken += 1
        if not self._cache.names(free[0]):
            return free[:1]
        demand(all(map(self._cache.names, free)), "what is not cached is taken first")
        self.counts["evictions"] += 1
        holds = Counter([tenant, *self.user.values()])  # each block was used by somebody
        first = {self.user[block]: block for block in reversed(free)}
        for name, last in sorted(self.last_use.items(), key=itemgetter(1)):
            is_idle = last < self.num_taken - self.most_idle
            if is_idle and name != tenant and holds[name]:
                if name in first:
                    self.counts["idle"] += 1
                    return [first[name]]
                self.last_use[name] = self.num_taken  # all is in its tables
        weights = {name: self._weights.get(name, 1) for name, count in holds.items() if count}
        total = sum(weights.values())
        over = {
            name: Fraction(holds[name], weights[name])
            for name in first
            if holds[name] * total > self.num_blocks * weights[name]
            and holds[name] * MOST_SHARES > self.num_blocks
        }
        self.counts["over"] += bool(over)
        self.counts["spared"] += bool(over) and self.user[free[0]] not in over
        most = max(over.values(), default=None)
        return [first[name] for name in over if over[name] == most] or free[:1]


class FakeWave:
    """Devices that attend for rows of their own, made of one: blocks of a device lie behind those
    of the devices before it. What they say of a step comes in any order, also that of steps; a
    `late` one says nothing before the others have said what they can. A `dead` one says nothing of
    the step in which it died; the others may, and then wait for it for ever."""

    def __init__(self, num_devices: int, num_blocks: int, seed: int) -> None:
        self.num_devices, self.num_blocks = num_devices, num_blocks
        self.rng = random.Random(seed)
        self.late: int | None = None
        self.dead: int | None = None
        self.is_known = False  # to the host, that one is dead
        self._has_stopped = False
        self.cutter = WaveCutter(num_devices)
        self.rows: list[set[str]] = [set() for _ in range(num_devices)]
        self.results = PartialResults()
        self.coming: list[tuple[int, int, StepResult]] = []  # that devices have still to say
        self.num_idle = 0

    def as_one(self, plan: StepPlan) -> StepPlan:
        if self.num_devices == 1:
            return plan
        parts = self.cutter.cut(plan)
        demand(len(parts) == self.num_devices, "a part for each device")
        for device, part in enumerate(parts):
            rows = self.rows[device]
            here = rows.intersection((*plan.preempted, *plan.finished))
            demand(here <= {*part.preempted, *part.finished}, "a row is closed where it is", here)
            rows.difference_update(part.preempted, part.finished)
            rows.update(new.request_id for new in part.new)
            self.num_idle += not part.scheduled
            mine = {entry.request_id for entry in part.scheduled}
            mine |= {copy.request_id for copy in part.copies}
            demand(mine <= rows, "who has a row computes it", mine, rows)
            if part.scheduled and plan.decodes is not None:
                names = tuple(entry.request_id for entry in part.scheduled)
                starts = tuple(entry.start for entry in part.scheduled)
                blocks = (any(map(len, entry.new_block_ids)) for entry in part.scheduled)
                opened = tuple(place for place, is_open in enumerate(blocks) if is_open)
                demand(part.decodes == Decodes(names, starts, opened), "by columns", part.decodes)
        wholes = [self._moved(part, device) for device, part in enumerate(parts)]

        def every(name: str) -> tuple[Any, ...]:
            return tuple(dict.fromkeys(one for part in wholes for one in getattr(part, name)))

        return StepPlan(
            plan.step_id,
            tuple(one for part in wholes for one in part.scheduled),
            tuple(one for part in wholes for one in part.new),
            tuple(one for part in wholes for one in part.copies),
            every("preempted"),
            every("finished"),
        )

    def _moved(self, part: StepPlan, device: int) -> StepPlan:
        first = device * self.num_blocks

        def block(at: int) -> int:
            demand(0 <= at <= self.num_blocks, "a block of its device", at)
            return at + first if at else at

        def tables(every: BlockTables) -> BlockTables:
            return tuple(tuple(map(block, table)) for table in every)

        return replace(
            part,
            scheduled=tuple(
                structs.replace(one, new_block_ids=tables(one.new_block_ids))
                for one in part.scheduled
            ),
            new=tuple(replace(one, block_ids=tables(one.block_ids)) for one in part.new),
            copies=tuple(
                replace(one, source=block(one.source), target=block(one.target))
                for one in part.copies
            ),
        )

    def over(self, future: FakeFuture) -> StepFuture:
        """Each device says what its own rows got; one that is dead says nothing, and the step has
        failed."""
        if self.dead is None and (future.outcome is None or self.num_devices == 1):
            return future
        for device, rows in enumerate(self.rows):
            if device == self.dead or self._has_stopped or future.outcome is None:
                continue
            own = StepResult({})
            for name in StepResult.__struct_fields__:
                found = getattr(future.outcome, name).items()
                getattr(own, name).update((row, said) for row, said in found if row in rows)
            self.coming.append((future.step_id, device, own))
        self._has_stopped = self.dead is not None
        return WaveFuture(self, future)

    def next_word(self) -> tuple[int, int, StepResult]:
        early = [at for at, (_, device, _) in enumerate(self.coming) if device != self.late]
        if not self.coming:
            demand(self.dead is not None, "somebody waits for what has been said")
            self.lose()
        return self.coming.pop(self.rng.choice(early or range(len(self.coming))))

    def lose(self) -> NoReturn:
        self.is_known = True
        raise EngineLost("a rank has ended")


@dataclass(frozen=True, slots=True)
class WaveFuture:
    wave: FakeWave
    whole: FakeFuture

    def result(self) -> StepResult:
        wave, step_id = self.wave, self.whole.step_id
        if self.whole.outcome is None:  # and one is dead: that is what is found
            self.whole.device.over(step_id)
            wave.lose()
        self.whole.result()
        while not wave.results.has(step_id, wave.num_devices):
            wave.results.add(*wave.next_word())
        return wave.results.take(step_id)


class CheckedDevice(FakeDevice):
    """A device that refuses an unlawful plan. One of several ranks dies in a step with a chance of
    `rank_fault`; the host learns of it when it sends something, or waits for what was sent."""

    scheduler: Scheduler
    flown: dict[int, list[Request]]  # by step in flight: whose tokens
    wave: FakeWave
    num_preemptions = 0  # up to the last step
    num_early_takers = 0  # rows that were opened over blocks which were still to be filled
    rank_fault = 0.0
    deaths: random.Random

    def submit(self, plan: StepPlan) -> StepFuture:  # type: ignore[override]
        scheduler, size, wave = self.scheduler, self.block_size, self.wave
        demand(not wave.is_known, "nothing is sent to a group that has lost a rank")
        often = OFTEN if self.is_broken else 1.0
        if wave.dead is None and self.deaths.random() < often * self.rank_fault:
            wave.dead = self.deaths.randrange(wave.num_devices)
        if wave.dead is not None and self.deaths.random() < AT_ONCE:
            wave.lose()
        names = [entry.request_id for entry in plan.scheduled]
        demand(len(set(names)) == len(names) > 0, "scheduled at most once, and somebody", names)
        self._check_lane(plan)
        total = sum(entry.num_tokens for entry in plan.scheduled)
        demand(total <= scheduler.max_num_batched_tokens, "within the budget", total)
        rows = {row.request_id: row for _, row, _ in scheduler._in_flight[plan.step_id][1]}
        for entry in plan.scheduled:
            row, end = rows[entry.request_id], entry.start + entry.num_tokens
            blocks = scheduler.blocks.pools[row.pool]
            demand(entry.num_tokens > entry.num_draft >= 0, "at least one real token", entry)
            demand(end <= row.num_computable_tokens, "the last token is not computed", entry)
            demand(end == row.num_computed_tokens, "accounted for at once", entry)
            low = entry.start - self._drafts_in_flight(row, plan)
            own = self._promised_now(row, plan) if entry.num_tokens > 1 else set()
            for table in row.block_ids:
                for block in table[low // size : -(-end // size)]:
                    free_to_write = blocks._ref_count[block] == 1 and not blocks._cache.names(block)
                    free_to_write = free_to_write or block in own
                    demand(free_to_write, "one writer, neither shared nor sealed", entry, block)
        for new in plan.new:
            promised = self._promised(new.pool)
            self.num_early_takers += any(not promised.isdisjoint(table) for table in new.block_ids)
        owners = (scheduler.beams.asked(name) or scheduler.requests[name] for name in names)
        self.flown[plan.step_id] = list(owners)
        future = wave.over(super().submit(wave.as_one(plan)))
        state = scheduler.state
        open_rows = {name for name, row in state.requests.items() if row.has_row}
        demand(self.rows.keys() == open_rows, "both sides keep the same rows", open_rows)
        return future

    def _check_lane(self, plan: StepPlan) -> None:
        """Decodes of a pipeline are divided evenly: no step has more of them than its part of the
        rows that were running, those that it preempts among them."""
        opened = {new.request_id for new in plan.new}
        decodes = [
            e
            for e in plan.scheduled
            if e.samples and e.num_tokens == 1 and e.request_id not in opened
        ]
        before, self.num_preemptions = self.num_preemptions, self.scheduler.num_preemptions
        num_rows = len(self.scheduler.running) + self.num_preemptions - before
        most = -(-num_rows // self.stages)
        demand(self.stages == 1 or len(decodes) <= most, "an even part of the decodes", plan)

    def _promised(self, pool: int) -> set[int]:
        """Blocks of a pool that others may find and that steps in flight are to fill."""
        every = self.scheduler.blocks.pools[pool]._published_early.values()
        return {block for made in every for _, named in made for block in named}

    def _promised_now(self, row: Request, plan: StepPlan) -> set[int]:
        """Blocks that it fills in this very step and that others may find, or have taken."""
        made = self.scheduler.blocks.pools[row.pool]._published_early.get(plan.step_id, ())
        return {block for name, named in made if name == row.request_id for block in named}

    def _drafts_in_flight(self, row: Request, plan: StepPlan) -> int:
        """By so much may the true start lie before the planned one."""
        return sum(
            entry.num_draft
            for step_id, (_, in_flight) in self.scheduler._in_flight.items()
            for entry, other, epoch in in_flight
            if other is row and epoch == row.epoch and step_id != plan.step_id
        )


class World(Listener):
    """`faults` are the chances that a step, a row and the taking of a step fail, where they may."""

    faults = (0.01, 0.002, 0.004)
    idle_pools = 2  # few, so that some tenants are idle for so long
    rank_fault = 0.0
    late: int | None = None

    def draw(self) -> Case:
        case = draw_case(self.rng)
        if case.policy == "fair":
            rng = random.Random(self.seed)
            weights = tuple(rng.choice([0.5, 1.0, 1.0, 3.0]) for _ in range(rng.randint(1, 4)))
            case = replace(case, weights=weights)
        pipelines = random.Random(f"stages {self.seed}")  # what else a seed brings stays as it was
        stages = pipelines.choice([1, 1, 2, 3, 4])
        if stages > 1 and not case.num_drafts:
            in_flight = pipelines.choice([1, stages, stages + 1, stages + 1])
            case = replace(case, stages=stages, max_in_flight=in_flight)
        pools = random.Random(f"pools {self.seed}").choice([1, 1, 2, 3])
        if not case.num_drafts and case.stages == 1:
            case = replace(case, pools=pools)
        return case

    @property
    def num_ranks(self) -> int:
        return self.case.stages * self.case.pools

    def draw_ranks(self) -> None:
        """Which of several dies, and which is late."""
        rng = self.device.deaths = random.Random(f"ranks {self.seed}")
        if self.num_ranks > 1:
            self.rank_fault = rng.choice([0.0, 0.0, 0.01])
        if self.case.pools > 1:
            self.late = rng.choice([None, rng.randrange(self.case.pools)])

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.tenants = random.Random(seed + 1)
        self.case = case = self.draw()
        self.device = CheckedDevice(
            case.num_blocks * case.pools, case.block_size, case.windows, case.num_drafts, seed
        )
        self.draw_ranks()
        self.clock = VirtualClock()
        self._start()
        self.stems = [self._tokens(MAX_TOKENS) for _ in range(3)]
        self.live: dict[str, Live] = {}
        self.ended: list[str] = []
        self.counts: Counter[str] = Counter()
        self.failed = False
        self.trace = sha256() if traced else None
        self._crowd = random.Random(f"tenants {seed}")  # what else a seed brings stays as it was
        self._num_tenants, self._rarity = self._crowd.randint(1, 4), self._crowd.choice([1, 3, 20])
        self._num_ids = 0
        self._talks: list[tuple[tuple[int, ...], bytes]] = []  # prompts with answers, to go on with

    def _start(self) -> None:
        """An engine that knows nothing, on a device that holds nothing."""
        case, seed = self.case, self.seed
        make = partial(
            CheckedBlocks,
            case.num_blocks,
            case.block_size,
            case.windows,
            case.prefix_caching,
            b"key",
            idle_pools=self.idle_pools,
        )
        blocks = open_pools(make, case.pools, case.max_num_batched_tokens)
        policies: dict[str, Policy] = {
            "fair": Fair(),
            "fcfs": FCFS(),
            "priority": Priority(10.0),
            "moody": Moody(seed),
        }
        self.scheduler = Scheduler(
            blocks,
            policies[case.policy],
            case.max_num_batched_tokens,
            case.max_num_seqs,
            num_drafts=case.num_drafts,
            starvation_limit=case.starvation_limit,
            max_preemptions=case.max_preemptions,
            stages=case.stages,
        )
        self.device.scheduler, self.device.stages = self.scheduler, case.stages
        self.device.flown = {}
        self.device.wave = FakeWave(case.pools, case.num_blocks, seed)
        self.device.wave.late = self.late
        self.device.num_preemptions = self._num_seen_preemptions = 0
        self.engine = Engine(self.scheduler, self.device, self.clock, case.max_in_flight)
        self.engine.listeners.append(self)

    def _start_again(self) -> None:
        """A rank has ended, and with it what the engine knew. Some of those it served ask again."""
        self.counts["lost ranks"] += 1
        self.device.empty()
        self._start()
        for live in list(self.live.values()):
            old, token_ids = live.request, tuple(live.token_ids)
            demand(token_ids == live.truth.output[: len(token_ids)], "what was delivered is right")
            self._forget(old)
            if self.device.deaths.random() < ASKS_AGAIN:
                fresh = Request(
                    old.request_id,
                    old.prompt_token_ids,
                    old.sampling,
                    self.clock.now(),
                    priority=old.priority,
                    cache_salt=old.cache_salt,
                    tenant=old.tenant,
                    weight=old.weight,
                )
                self._add(fresh)

    # ------------------------------------------------------------------ running

    def run(self, num_steps: int) -> None:
        """Live until the device has executed `num_steps`, then let everything end."""
        case, device = self.case, self.device
        if case.has_faults:
            device.step_fault, device.row_fault, device.submit_fault = self.faults
        device.rank_fault = self.rank_fault
        while device.num_steps < num_steps:
            self._happen()
            self._turn()
        device.step_fault = device.row_fault = device.submit_fault = device.rank_fault = 0.0
        bound = device.num_steps + 200 * (len(self.live) + 1) * (MAX_TOKENS + 1)
        while not self.engine.is_idle:
            self._turn()
            demand(device.num_steps < bound, "everything ends when nothing new happens")
        demand(not self.live, "every request has ended", list(self.live))
        free = self.scheduler.blocks.num_free_blocks
        demand(free == case.num_blocks * case.pools, "all blocks are free at the end", free)

    def _turn(self) -> None:
        """A few launches and collects in any order, each of them checked."""
        self.clock.advance_to(self.clock.now() + 1.0)
        if self.rng.random() < 0.8:
            self._take(self.engine.step)
        elif self.rng.random() < 0.5:
            self._take(self._launch)
        elif self.engine.num_in_flight:
            self._take(self.engine.collect)
        self.scheduler.check_invariants()
        if self.rng.random() < 0.05:
            self._check_hashes()
        if isinstance(policy := self.scheduler.policy, Fair):
            opened = Counter(live.request.tenant for live in self.live.values())
            counted = {name: lane.num_open for name, lane in policy._lanes.items() if lane.num_open}
            demand(opened == counted, "tenants are counted", opened, counted)
        for request in self.scheduler.requests.values():
            often = request.num_preemptions <= self.case.max_preemptions
            demand(often, "preempted too often", request)
        queue = self.scheduler.waiting
        demand(queue._num_overtaken <= queue.starvation_limit, "passed over too often")

    def _check_hashes(self) -> None:
        """The hashes of a row are those of its own tokens."""
        state, cache = self.scheduler.state, self.scheduler.blocks.pools[0]._cache
        for row in state.requests.values():
            fresh = Request("", tuple(row.token_ids), row.sampling, 0.0)
            fresh.cache_salt = row.cache_salt
            hashes = cache._hashes(fresh, len(row.block_hashes))
            demand(hashes == row.block_hashes, "hashes of its own tokens", row.request_id)

    def _launch(self) -> list[RequestOutput]:
        idle = not self.engine.num_in_flight
        if self.engine.launch() is None and idle:
            demand(not self.scheduler.requests, "work is pending and nothing is in flight")
        return []

    def _take(self, act: object) -> None:
        self.failed = False
        before = self.device.num_steps
        idle = not self.engine.num_in_flight
        try:
            outputs: list[RequestOutput] = act()  # type: ignore[operator]
        except EngineLost:
            self._start_again()
            return
        if idle and self.device.num_steps == before and act == self.engine.step:
            demand(not self.scheduler.requests or self.failed, "work is pending, nothing happens")
        if self.failed:
            flown = {request for owners in self.device.flown.values() for request in owners}
            wanted = {name for name, live in self.live.items() if live.request in flown}
            hit = {output.request_id for output in outputs}
            demand(hit == wanted, "those in flight fail, and nobody else", hit, wanted)
            self.device.recover()
            self.device.flown.clear()
        for output in outputs:
            self._check(output)

    # ------------------------------------------------------------------ what is observed

    def on_step(self, record: StepRecord) -> None:
        if record.error is not None:
            self.failed = True
        else:
            del self.device.flown[record.plan.step_id]
        if self.trace is not None:
            plan = record.plan
            self.trace.update(
                repr((plan.scheduled, plan.copies, plan.preempted, plan.finished)).encode()
            )
        for output in record.outputs:
            self.on_output(output, record.collected_at)

    def on_abort(self, request_id: str, now: float) -> None:
        self.on_output(RequestOutput(request_id, (), FinishReason.ABORT), now)

    def on_output(self, output: RequestOutput, now: float) -> None:
        if self.trace is not None:
            self.trace.update(repr((now, output)).encode())

    def _check(self, output: RequestOutput) -> None:
        live = self.live.get(output.request_id)
        if live is None:
            raise Violation(f"an output for nobody: {output}")
        truth, request = live.truth, live.request
        beams = request.sampling.beam_width > 1
        cached = 0 if live.num_outputs else request.num_cached_tokens
        is_error = output.finish_reason is FinishReason.ERROR
        demand(is_error or output.num_cached_tokens == cached, "cached tokens come first", output)
        live.num_outputs += 1
        live.token_ids += output.new_token_ids
        live.logprobs += [] if beams else [item.logprob for item in output.logprobs]
        live.prompt_logprobs += [item.logprob for item in output.prompt_logprobs]
        got, wanted = tuple(live.token_ids), truth.output
        demand(got == wanted[: len(got)], "the tokens of the prompt", request, got, wanted)
        demand(
            bool(output.finish_reason or output.new_token_ids or output.prompt_logprobs),
            "no empty output",
            output,
        )
        if request.sampling.logprobs is not None and not beams:
            demand(tuple(live.logprobs) == truth.logprobs[: len(got)], "logprobs", output)
        if request.sampling.prompt_logprobs is not None:
            n = len(live.prompt_logprobs)
            demand(tuple(live.prompt_logprobs) == truth.prompt_logprobs[:n], "prompt", output)
        if output.finish_reason is not None:
            self._check_end(live, output)

    def _check_end(self, live: Live, output: RequestOutput) -> None:
        request, reason, truth = live.request, output.finish_reason, live.truth
        self.counts[str(reason)] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            demand(tuple(live.token_ids) == truth.output, "all tokens", request, truth)
            stops = frozenset(request.sampling.stop_token_ids)
            is_stop = reason is FinishReason.STOP
            demand(is_stop == (truth.output[-1] in stops), "the right reason", reason)
            if request.sampling.prompt_logprobs is not None:
                demand(tuple(live.prompt_logprobs) == truth.prompt_logprobs, "prompt logprobs")
            self._check_beams(output, truth)
        elif reason is FinishReason.ERROR:
            faulted = request.request_id in self.device.faulted
            demand(faulted or self.failed, "an error has a cause", output)
        self.counts["preemptions"] += request.num_preemptions
        self.counts["veterans"] += request.num_preemptions >= self.case.max_preemptions
        self.counts["cached"] += request.num_cached_tokens
        self._forget(request)

    def _check_beams(self, output: RequestOutput, truth: Truth) -> None:
        got = [beam[0] for beam in output.beams]
        demand(got == [beam[0] for beam in truth.beams], "the beams", got, truth.beams)
        for mine, theirs in zip(output.beams, truth.beams, strict=True):
            demand(abs(mine[1] - theirs[1]) < 1e-9, "the scores", mine, theirs)
            demand(len(mine[2]) == len(mine[0]), "a log-probability for each token", mine)

    def _forget(self, request: Request) -> None:
        live = self.live.pop(request.request_id)
        answers = [beam[0] for beam in live.truth.beams] or [live.truth.output]
        talk = (*request.prompt_token_ids, *self.rng.choice(answers))
        self._talks = [*self._talks[-8:], (talk, request.cache_salt)]
        self.ended = [*self.ended[-5:], request.request_id]

    # ------------------------------------------------------------------ what happens

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def _happen(self) -> None:
        rng = self.rng
        if rng.random() < self.case.arrival and len(self.live) < MAX_LIVE:
            self._arrive()
        roll = rng.random()
        if self.scheduler.num_preemptions > self._num_seen_preemptions and self.live:
            self._num_seen_preemptions = self.scheduler.num_preemptions
            if roll < 0.3:
                self._abort(rng.choice(list(self.live)))
        elif roll < 0.02 and self.live:
            self._abort(rng.choice(list(self.live)))
        elif roll < 0.03:
            demand(self.engine.abort("nobody") is None, "nobody cannot be aborted")
        elif roll < 0.035 and self.ended and self.ended[-1] not in self.live:
            demand(self.engine.abort(self.ended[-1]) is None, "what is over stays over")
        elif roll < 0.04:
            self.scheduler.blocks.clear_cache()
        elif roll < 0.045 and self.live:  # the same id again while old results are in flight
            request_id = rng.choice(list(self.live))
            self._abort(request_id)
            self._arrive(request_id)
        elif roll < 0.05 and self.live:
            live = self.live[rng.choice(list(self.live))]
            try:
                self.engine.add(self._twin(live.request))
            except RequestFault:
                self.counts["duplicates"] += 1
            else:
                raise Violation("an id is in use once")
        elif roll < 0.052:
            for request_id in list(self.live):
                self._abort(request_id)

    def _twin(self, request: Request) -> Request:
        return Request(request.request_id, request.prompt_token_ids, request.sampling, 0.0)

    def _abort(self, request_id: str) -> None:
        output = self.engine.abort(request_id)
        if output is None:
            raise Violation(f"a live request can be aborted: {request_id}")
        self._check(
            RequestOutput(request_id, (), FinishReason.ABORT) if self._is_first(output) else output
        )
        demand(self.engine.abort(request_id) is None, "it is over after an abort")

    def _is_first(self, output: RequestOutput) -> bool:
        self.live[output.request_id].num_outputs += 1  # an abort says nothing of cached tokens
        return True

    def _arrive(self, request_id: str | None = None) -> None:
        rng = self.rng
        roll = rng.random()
        if roll < 0.15 and self.live and request_id is None:
            self._fork(rng.choice(list(self.live.values())).request)
            return
        longest = min(MAX_TOKENS, self.scheduler.max_servable_tokens + rng.choice([0, 0, 0, 0, 1]))
        if longest < 2:
            longest = 2
        num_prompt = rng.randint(1, max(1, int((longest - 1) * self.case.longest_prompt)))
        if rng.random() < 0.3:  # at a block's boundary, or one off
            num_prompt = num_prompt // self.case.block_size * self.case.block_size
            num_prompt = min(longest - 1, max(1, num_prompt + rng.choice([-1, 0, 1])))
        stem, salt = rng.choice(self.stems), b"\x00\x01\x02"[: rng.randrange(self.case.num_salts)]
        common = rng.randint(0, num_prompt)
        prompt = tuple(stem[:common] + self._tokens(num_prompt - common))
        if self._talks and rng.random() < 0.25:  # what was answered becomes part of a prompt
            talk, salt = rng.choice(self._talks)
            prompt = (talk + tuple(self._tokens(longest)))[:num_prompt]
        room = longest - num_prompt
        max_tokens = rng.choice([room, rng.randint(1, room), min(room, 3)])
        beams = rng.random() < self.case.beams
        self._add(self._request(request_id, prompt, salt, max_tokens, beams=beams))

    def _fork(self, parent: Request) -> None:
        sampling = SamplingParams(
            max_tokens=self.rng.randint(1, max(1, parent.sampling.max_tokens or 1)),
            stop_token_ids=parent.sampling.stop_token_ids,
            logprobs=self.rng.choice([None, 1]),
        )
        prompt, salt, roll = parent.prompt_token_ids, parent.cache_salt, self.rng.random()
        if roll < 0.1:  # named as a fork, but nothing may be shared
            prompt = (*self._tokens(1), *prompt[1:])
        elif roll < 0.2:
            salt += b"x"
        child = Request(
            self._new_id(),
            prompt,
            sampling,
            self.clock.now(),
            priority=self.rng.randint(0, 2),
            cache_salt=salt,
            fork_of=parent.request_id,
            tenant=parent.tenant if roll < 0.8 else self._tenant(),
        )
        self._add(child)

    def _tenant(self) -> bytes:
        """In some worlds the last asks rarely."""
        return b"%d" % int(self._crowd.random() ** self._rarity * self._num_tenants)

    def _new_id(self) -> str:
        self._num_ids += 1
        return f"r{self._num_ids}"

    def _request(
        self,
        request_id: str | None,
        prompt: tuple[int, ...],
        salt: bytes,
        max_tokens: int,
        *,
        beams: bool,
    ) -> Request:
        rng = self.rng
        width = rng.randint(2, 4) if beams else 1
        sampling = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=rng.choice([frozenset(), frozenset({7}), frozenset({7, 13, 60})]),
            logprobs=rng.choice([None, 1]),
            prompt_logprobs=self._prompt_logprobs() if not beams else None,
            beam_width=width,
            n=rng.randint(1, width) if beams else 1,
            length_penalty=rng.choice([0.0, 1.0, 2.0, -0.5]),
            early_stopping=rng.random() < 0.5,
        )
        return Request(
            request_id or self._new_id(),
            prompt,
            sampling,
            self.clock.now() - rng.choice([0.0, 0.0, 5.0]),
            priority=rng.randint(0, 2),
            cache_salt=salt,
            tenant=self._tenant(),
        )

    def _prompt_logprobs(self) -> int | None:
        """Pipelines have none."""
        return 0 if self.rng.random() < 0.1 and self.case.stages == 1 else None

    def _asking(self) -> int:
        return self.tenants.randrange(len(self.case.weights))

    def _add(self, request: Request) -> None:
        if len(self.case.weights) > 1:
            tenant = self._asking()
            request.tenant, request.weight = b"%d" % tenant, self.case.weights[tenant]
        capacity = self.scheduler.capacity
        width = request.sampling.beam_width
        fits = capacity.blocks_needed(request, width) <= self.case.num_blocks
        fits = fits and request.sampling.beam_width <= self.case.max_num_seqs
        if request.sampling.beam_width == 1:
            longest = self.scheduler.max_servable_tokens
            demand(fits == (request.max_num_tokens <= longest), "one function decides")
        try:
            self.engine.add(request)
        except RequestFault as fault:
            demand(not fits, "what fits is taken", request, str(fault))
            self.counts["refused"] += 1
            return
        demand(fits, "what can never fit is refused", request)
        self.counts["arrived"] += 1
        self.counts["beams"] += request.sampling.beam_width > 1
        self.counts["forks"] += request.fork_of is not None
        device, request_id = self.device, request.request_id
        device.salts[request_id] = request.cache_salt
        device.parents[request_id] = request.fork_of
        device.faulted.discard(request_id)
        truth = truth_of(
            request.prompt_token_ids, request.sampling, request.cache_salt, self.case.windows
        )
        device.truths[request_id] = truth
        self.live[request_id] = Live(request, truth)


class Saturated(World):
    """Several tenants, each of whom always wants more than it gets: over a thousand steps each has
    its share of the tokens that are computed, within a tenth of it."""

    MOST_OFF = 0.1

    def draw(self) -> Case:
        rng = self.rng
        return replace(
            draw_case(rng),
            num_blocks=rng.choice([60, 200]),
            block_size=rng.choice([3, 16]),
            max_num_batched_tokens=rng.choice([16, 64]),
            max_num_seqs=rng.choice([4, 8, 16]),
            num_drafts=0,
            policy="fair",
            starvation_limit=256,
            max_preemptions=8,
            has_faults=False,
            weights=tuple(rng.choice([1.0, 1.0, 2.0, 3.0]) for _ in range(rng.randint(2, 4))),
        )

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        super().__init__(seed, traced=traced)
        self.longest = [self.tenants.choice([4, 12, 30]) for _ in self.case.weights]
        self.asks = 0
        self.had: Counter[int] = Counter()

    def _asking(self) -> int:
        return self.asks

    def _happen(self) -> None:
        if self.device.num_steps >= self.until:
            return
        waiting = Counter(r.tenant for r in self.scheduler.requests.values() if not r.block_ids)
        for tenant, longest in enumerate(self.longest):
            self.asks = tenant
            for _ in range(waiting[b"%d" % tenant], self.case.max_num_seqs):
                total = self.rng.randint(2, longest)
                prompt = tuple(self._tokens(self.rng.randint(1, total - 1)))
                self._add(self._request(None, prompt, b"", total - len(prompt), beams=False))

    def run(self, num_steps: int) -> None:
        self.until = num_steps
        super().run(num_steps)
        total, whole = self.had.total(), sum(self.case.weights)
        for tenant, weight in enumerate(self.case.weights):
            share, fair = self.had[tenant] / total, weight / whole
            demand(abs(share - fair) <= self.MOST_OFF * fair, "its share", tenant, share, fair)

    def on_step(self, record: StepRecord) -> None:
        if self.device.num_steps < self.until:
            for owner in self.device.flown[record.plan.step_id]:
                entry = next(e for e in record.plan.scheduled if e.request_id == owner.request_id)
                self.had[int(owner.tenant)] += entry.num_tokens
        super().on_step(record)


SATURATED = 1000  # steps; fewer would not tell
EVERY = 25  # one world in so many is saturated


def run_seed(seed: int, num_steps: int, *, traced: bool = False) -> World:
    """One world's whole life. Violations name the seed."""
    is_saturated = seed % EVERY == EVERY - 1 and num_steps >= SATURATED // 4
    world = (Saturated if is_saturated else World)(seed, traced=traced)
    num_steps = max(num_steps, SATURATED) if is_saturated else num_steps
    try:
        world.run(num_steps)
    except Exception as problem:
        raise Violation(
            f"seed {seed} step {world.device.num_steps}: {type(problem).__name__} {problem}"
        ) from problem
    return world
