"""The real engine on a virtual clock: a step takes what a formula says, no more."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.clock import VirtualClock
from ridgeline.engine import Engine
from ridgeline.errors import RequestFault
from ridgeline.request import FinishReason, Request, RequestOutput, SamplingParams
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.base import Overloaded, Policy
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.step import StepPlan, StepPricer, StepResult, StepShape

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Linear:
    """Prices like those of a device: the weights are read once, then each token and each cached
    token costs a little. About an 8B model on one large GPU."""

    base_s: float = 0.006
    per_token_s: float = 4e-5
    per_context_s: float = 4e-8

    def seconds(self, shape: StepShape) -> float:
        tokens = sum(new for new, _ in shape)
        context = sum(before + new for new, before in shape)
        busy_s = max(self.base_s, self.per_token_s * tokens)
        return busy_s + self.per_context_s * context


@dataclass(frozen=True, slots=True)
class _Future:
    device: VirtualDevice
    plan: StepPlan
    ends_at: float

    def result(self) -> StepResult:
        self.device.clock.advance_to(self.ends_at)
        return StepResult({e.request_id: (7,) for e in self.plan.scheduled if e.samples})


@dataclass(slots=True)
class VirtualDevice:
    """Steps run one after another; each is over when its price has passed."""

    clock: VirtualClock
    pricer: StepPricer
    num_blocks: int
    block_size: int = BLOCK_SIZE
    free_at: float = 0.0
    steps: list[tuple[StepShape, float]] = field(default_factory=list)

    def submit(self, plan: StepPlan) -> _Future:
        seconds = self.pricer.seconds(plan.shape)
        self.free_at = max(self.free_at, self.clock.now()) + seconds
        self.steps.append((plan.shape, seconds))
        return _Future(self, plan, self.free_at)


@dataclass(slots=True)
class Times:
    """What one request saw. Seconds."""

    arrived_at: float
    num_output: int
    retry_after_s: float | None = None  # it was refused
    first_at: float | None = None
    ended_at: float | None = None
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return float("inf") if self.first_at is None else self.first_at - self.arrived_at

    @property
    def tpot_s(self) -> float:
        if self.first_at is None or self.ended_at is None:
            return float("inf")
        return (self.ended_at - self.first_at) / max(1, self.num_tokens - 1)

    def keeps(self, ttft_s: float, tpot_s: float) -> bool:
        return self.ttft_s <= ttft_s and self.tpot_s <= tpot_s


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    num_prompt: int
    num_output: int
    tenant: bytes = b""
    weight: float = 1.0
    is_fork: bool = False  # another answer to the prompt of the one before it


def poisson(
    rng: random.Random, rate: float, lasts_s: float, prompt: int, output: int
) -> list[Arrival]:
    """Arrivals with lengths from half to one and a half times the given ones."""
    found: list[Arrival] = []
    at = rng.expovariate(rate)
    while at < lasts_s:
        lengths = [max(1, round(n * rng.uniform(0.5, 1.5))) for n in (prompt, output)]
        found.append(Arrival(at, lengths[0], lengths[1]))
        at += rng.expovariate(rate)
    return found


class World:
    """Requests arrive at their times, whatever the engine does. `max_tokens` is twice the answer,
    which ends before, as answers do."""

    def __init__(
        self,
        policy: Policy,
        pricer: StepPricer,
        *,
        num_blocks: int = 40_000,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_in_flight: int = 2,
    ) -> None:
        self.clock = VirtualClock()
        self.device = VirtualDevice(self.clock, pricer, num_blocks)
        blocks = BlockManager(num_blocks, BLOCK_SIZE, (None,), True, b"k")
        scheduler = Scheduler(blocks, policy, max_num_batched_tokens, max_num_seqs)
        self.engine = Engine(scheduler, self.device, self.clock, max_in_flight)
        self.times: dict[str, Times] = {}
        self.parent = ""

    def run(self, arrivals: Sequence[Arrival]) -> list[Times]:
        pending = list(reversed(arrivals))
        while pending or not self.engine.is_idle:
            if self.engine.is_idle:
                self.clock.advance_to(pending[-1].at)
            while pending and pending[-1].at <= self.clock.now():
                self._arrive(pending.pop())
            for output in self.engine.step():
                self._take(output)
        return list(self.times.values())

    def _arrive(self, arrival: Arrival) -> None:
        name = f"r{len(self.times)}"
        if not arrival.is_fork:
            self.parent = name
        first = int(self.parent[1:]) * 7919
        prompt = tuple(first + i for i in range(arrival.num_prompt))
        self.times[name] = Times(arrival.at, arrival.num_output)
        sampling = SamplingParams(max_tokens=2 * arrival.num_output)
        try:
            request = Request(name, prompt, sampling, arrival.at, tenant=arrival.tenant)
            request.weight = arrival.weight
            if arrival.is_fork:
                request.fork_of = self.parent
            self.engine.add(request)
        except Overloaded as refused:
            self.times[name].retry_after_s = refused.retry_after_s
        except RequestFault as fault:
            raise AssertionError("nothing here is too large") from fault

    def _take(self, output: RequestOutput) -> None:
        times = self.times[output.request_id]
        if output.finish_reason is FinishReason.ABORT:
            return
        now = self.clock.now()
        times.first_at = now if times.first_at is None else times.first_at
        times.num_tokens += len(output.new_token_ids)
        if times.num_tokens >= times.num_output and times.ended_at is None:
            times.ended_at = now
            if output.finish_reason is None:
                self.engine.abort(output.request_id)
