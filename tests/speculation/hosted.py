"""An engine on a virtual clock whose steps are launched in some time of the host and run in some
time of the device; what is drafted is found and right with known chances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from ridgeline.clock import VirtualClock
from ridgeline.cost.pricer import StepPrice
from ridgeline.engine import Engine
from ridgeline.observe.run import Run
from ridgeline.request import UNKNOWN_TOKEN, Request, SamplingParams
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.scheduler import DraftLengths, Scheduler
from ridgeline.speculation.controller import DraftLengthController
from ridgeline.step import ScheduledRequest, StepPlan, StepResult

MICRO = 1e-6
MOST = 8  # drafts of a row
PROMPT_S, COLLECT_S = 600 * MICRO, 20 * MICRO
PRICE_S = 139 * MICRO  # of any step: what is priced knows nothing of this host
UNEVEN = 0.1  # that a step takes more, at most
PROMPT, ANSWER = 30, 200  # tokens

Seconds = Callable[[int], float]  # of a step by its drafts


@dataclass(frozen=True, slots=True)
class Machine:
    """`host_s` to launch a step, `device_s` to run it."""

    host_s: Seconds
    device_s: Seconds


@dataclass(frozen=True, slots=True)
class Text:
    """How often there is something to check, and how likely the first draft and each later one is
    right. `is_drafted`: a model drafts, and without a check nothing is known."""

    found: float
    first: float
    later: float
    is_drafted: bool = False


@dataclass(frozen=True, slots=True)
class Flat:
    per_draft_s: float = 0.0

    def seconds(self, batch: int, context: int, num_drafts: int) -> float:
        return PRICE_S + self.per_draft_s * num_drafts


@dataclass(frozen=True, slots=True)
class Running:
    clock: VirtualClock
    ends: float
    outcome: StepResult

    def result(self) -> StepResult:
        self.clock.advance_to(self.ends)
        self.clock.advance_to(self.clock.now() + COLLECT_S)
        return self.outcome


@dataclass(slots=True)
class Hosted:
    """The executor."""

    machine: Machine
    text: Text
    rng: Random
    clock: VirtualClock = field(default_factory=VirtualClock)
    num_blocks: int = 1000
    block_size: int = 16
    by_drafts: Counter[int] = field(default_factory=Counter)  # steps that only decode
    num_tokens: int = 0  # of these
    busy_until: float = 0.0
    there: dict[str, bool] = field(default_factory=dict)

    def submit(self, plan: StepPlan) -> Running:
        rows = plan.scheduled
        host_s = device_s = PROMPT_S
        is_decode = all(row.num_tokens == row.num_draft + 1 for row in rows)
        if is_decode:
            k = max(row.num_draft for row in rows)
            host_s, device_s = self.machine.host_s(k), self.machine.device_s(k)
            self.by_drafts[k] += 1
        self.clock.advance_to(self.clock.now() + host_s * self._uneven())
        self.busy_until = max(self.clock.now(), self.busy_until) + device_s * self._uneven()
        outcome = StepResult({})
        for row in rows:
            num_new = self._run(row, outcome) if row.samples else 0
            self.num_tokens += num_new if is_decode else 0
        return Running(self.clock, self.busy_until, outcome)

    def _uneven(self) -> float:
        return 1 + UNEVEN * self.rng.random()

    def _run(self, entry: ScheduledRequest, outcome: StepResult) -> int:
        name, text, rng = entry.request_id, self.text, self.rng
        is_there, right = self.there.get(name, False), 0
        is_right = is_there and rng.random() < text.first
        if entry.num_draft and is_right:
            right = 1
            while right < entry.num_draft and rng.random() < text.later:
                right += 1
        if is_there and entry.num_draft:
            outcome.verified[name] = (min(entry.num_draft, right + 1), right)
        elif not text.is_drafted:
            outcome.verified[name] = (1, int(is_right)) if is_there else (0, 0)
        self.there[name] = found = text.is_drafted or rng.random() < text.found
        outcome.draft_token_ids[name] = (UNKNOWN_TOKEN,) * (MOST if found else 0)
        outcome.token_ids[name] = (7,) * (right + 1)
        return right + 1


@dataclass(frozen=True, slots=True)
class Ran:
    tokens_per_s: float
    tokens_per_step: float
    by_drafts: Mapping[int, int]


def run(
    machine: Machine,
    text: Text,
    draft_lengths: DraftLengths,
    *,
    in_flight: int,
    seed: int,
    num_requests: int = 20,
) -> Ran:
    """One request after the other."""
    hosted = Hosted(machine, text, Random(seed))
    blocks = BlockManager(hosted.num_blocks, hosted.block_size, (None,), False, b"k")
    scheduler = Scheduler(blocks, FCFS(), 2048, 8, num_drafts=MOST, draft_lengths=draft_lengths)
    engine = Engine(scheduler, hosted, hosted.clock, in_flight)
    run = Run(lambda shape, num_logits: StepPrice(PRICE_S, PRICE_S, 1.0, 1.0))
    if isinstance(draft_lengths, DraftLengthController):
        run.listeners.append(draft_lengths)
    engine.listeners.append(run)
    num_tokens = 0
    for number in range(num_requests):
        sampling = SamplingParams(max_tokens=ANSWER)
        prompt = tuple(range(PROMPT))
        engine.add(Request(f"{seed} {number}", prompt, sampling, hosted.clock.now()))
        while not engine.is_idle:
            num_tokens += sum(len(output.new_token_ids) for output in engine.step())
    steps = hosted.by_drafts.total()
    return Ran(num_tokens / hosted.clock.now(), hosted.num_tokens / steps, dict(hosted.by_drafts))
