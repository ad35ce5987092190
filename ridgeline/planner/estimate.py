"""What would each candidate carry, in closed form? Thousands of them in a second or two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil, inf, sqrt

from ridgeline import figures
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.cost.fit_suggestions import Limits
from ridgeline.cost.memory import MemoryPlan, memory_plan, plan_or_none
from ridgeline.cost.pipeline import step_prices
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Setup
from ridgeline.cost.throughput import Load, Throughput, throughput
from ridgeline.errors import ConfigError, DoesNotFit
from ridgeline.planner.question import GRID, MAX_LOAD, Candidate, Grid, Hardware, Question
from ridgeline.scheduler.block_manager import blocks_needed
from ridgeline.speculation.price import PlannedDrafting, planned_drafting
from ridgeline.step import StepPricer

BLOCK_SIZE = 16
CHUNK = 512  # tokens beyond a window that a step may hold
TPOT_MARGIN = 0.95  # requests differ from the mean; the simulation has the last word
TTFT_MARGIN = 0.8

DOES_NOT_FIT, INFEASIBLE, TOO_DEAR, NO_PRICE = (
    "does not fit",
    "infeasible",
    "over budget",
    "no price",
)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why some hardware is out: `kind` is one of the four above, `because` a sentence. `miss`: how
    many times too slow it is, where that is the reason."""

    hardware: Hardware
    kind: str
    because: str
    miss: float = inf


class Priced:
    """One hardware with its prices, whatever is promised. Keeps what was asked before."""

    def __init__(self, question: Question, hardware: Hardware) -> None:
        self.hardware = hardware
        self.setup: Setup = hardware.setup(question.spec)
        self.target = Pricer(self.setup)
        self.steps = step_prices(self.setup, self.target)
        self.drafts: PlannedDrafting | None = None
        if hardware.num_drafts:
            self.drafts = planned_drafting(self.setup, self.target, hardware.num_drafts)
        self.windows = tuple(group.window for group in kv_groups(question.spec))
        whole = question.num_input + question.num_output
        self.blocks_each = blocks_needed(whole, BLOCK_SIZE, self.windows, CHUNK)
        self.num_input = question.num_input
        self.num_steps = question.num_output  # in which an answer is made
        if self.drafts is not None:
            self.num_steps = 1 + ceil((question.num_output - 1) / self.drafts.tokens_per_step)
        self._throughputs: dict[tuple[int, int], Throughput] = {}

    def room(self, memory: MemoryPlan) -> int:
        """Requests that the cache has room for, in the pools of all groups of devices."""
        return self.hardware.layout.dp * (memory.num_blocks // self.blocks_each)

    def throughput(self, batch: int, token_budget: int) -> Throughput:
        """With so many requests in flight. With drafts, its TPOT is the time of a step."""
        key = (batch, token_budget)
        if key not in self._throughputs:
            pricer: StepPricer = self.steps if self.drafts is None else self.drafts
            load = Load(batch, self.num_input, self.num_steps, token_budget)
            self._throughputs[key] = throughput(pricer, load, self.hardware.layout.pp)
        return self._throughputs[key]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Rates in requests a second of one replica: `saturation` is all it can do, `kept` what it can
    do within the promise, `planned` the most that a plan gives it. `throughput` is at `kept`."""

    candidate: Candidate
    priced: Priced = field(compare=False, repr=False)
    memory: MemoryPlan
    batch: int  # requests in flight at `kept`
    batch_limit: int
    saturation: float
    kept: float
    throughput: Throughput

    @property
    def hardware(self) -> Hardware:
        return self.candidate.hardware

    @property
    def room(self) -> int:
        return self.priced.room(self.memory)

    @property
    def planned(self) -> float:
        return min(self.kept, self.most)

    @property
    def most(self) -> float:
        """No plan gives a replica more than this, whatever a simulation says."""
        return MAX_LOAD * self.saturation

    def replicas(self, rate: float) -> int:
        return max(1, ceil(rate / self.planned - 1e-9))

    def least_replicas(self, rate: float) -> int:
        return max(1, ceil(rate / self.most - 1e-9))

    def is_crowded(self, rate: float) -> bool:
        """Chance alone would fill all places now and then (three standard deviations)."""
        usual = rate / self.replicas(rate) * self.throughput.e2e_s  # in flight, by Little's law
        return self.batch_limit < usual + 3 * sqrt(usual)

    def cost(self, num_replicas: int) -> float:
        """Dollars an hour; where prices are unknown, devices."""
        price = self.hardware.offer.per_hour
        devices = num_replicas * self.hardware.layout.devices
        return devices * (1.0 if price is None else price)


class Bench:
    """One hardware under one promise."""

    def __init__(self, question: Question, priced: Priced) -> None:
        self.question = question
        self.priced = priced
        self.hardware = priced.hardware
        self.setup = priced.setup

    # ------------------------------------------------------------------ what is out of the question

    def why_not(self, least_budget: int) -> Rejection | None:
        """Reasons that hold whatever the limits are: memory, one request alone."""
        question = self.question
        try:
            self._memory(1, least_budget)
        except DoesNotFit as fault:
            said = _first_sentence(str(fault)).removeprefix("does not fit: ")
            return Rejection(self.hardware, DOES_NOT_FIT, said)
        alone = self.throughput(1, max(least_budget, 2048))
        if self._tpot(alone) > question.tpot_s:
            return self._infeasible("a token", "a single request", self._tpot(alone))
        if alone.prompt_alone_s > question.ttft_s:
            return self._infeasible("to read", "one prompt alone", alone.prompt_alone_s)
        return None

    def _infeasible(self, what: str, who: str, seconds: float) -> Rejection:
        question = self.question
        promised_s = question.tpot_s if what == "a token" else question.ttft_s
        takes, promised = figures.seconds(seconds), figures.seconds(promised_s)
        because = f"{who} takes {takes} {what}, and {promised} are promised"
        return Rejection(self.hardware, INFEASIBLE, because, seconds / promised_s)

    # ------------------------------------------------------------------ one candidate

    def estimate(
        self, max_num_seqs: int, token_budget: int, *, is_rough: bool = False
    ) -> Estimate | None:
        """None: it does not fit with these limits, or keeps no promise even to one request. A rough
        one knows the largest batch as a power of two only."""
        if token_budget < max_num_seqs:
            return None
        limits = self._limits(max_num_seqs, token_budget)
        memory = plan_or_none(self.setup, limits)
        if memory is None:
            return None
        limit = min(max_num_seqs, self.priced.room(memory))
        batch = self._largest(limit, token_budget, is_rough=is_rough)
        if batch < 1:
            return None
        kept = self._fastest(batch, token_budget)
        return Estimate(
            Candidate(self.hardware, max_num_seqs, token_budget),
            self.priced,
            memory,
            batch,
            limit,
            self._fastest(limit, token_budget).request_rate,
            kept.request_rate,
            kept,
        )

    def throughput(self, batch: int, token_budget: int) -> Throughput:
        return self.priced.throughput(batch, token_budget)

    def _fastest(self, limit: int, token_budget: int) -> Throughput:
        """Of up to `limit` requests in flight. More are not always faster: chunks of prompts slow
        down the decodes beside them."""
        batches = [limit, *(b for b in _powers_of_two(limit) if 8 * b >= limit)]
        throughputs = (self.throughput(batch, token_budget) for batch in batches)
        return max(throughputs, key=lambda found: found.request_rate)

    def _tpot(self, found: Throughput) -> float:
        if self.question.num_output < 2:
            return 0.0
        return found.tpot_s * (self.priced.num_steps - 1) / (self.question.num_output - 1)

    def _keeps(self, batch: int, token_budget: int) -> bool:
        found, question = self.throughput(batch, token_budget), self.question
        is_steady = self._tpot(found) <= TPOT_MARGIN * question.tpot_s
        return is_steady and found.ttft_s <= TTFT_MARGIN * question.ttft_s

    def _largest(self, limit: int, token_budget: int, *, is_rough: bool) -> int:
        """The most requests in flight with the promise kept to all of them."""
        low, high = 0, min(limit, token_budget)
        if high and self._keeps(high, token_budget):
            return high
        for batch in reversed(_powers_of_two(high)):
            if self._keeps(batch, token_budget):
                low = batch
                break
            high = batch - 1
        while low < high and not is_rough:
            middle = (low + high + 1) // 2
            if self._keeps(middle, token_budget):
                low = middle
            else:
                high = middle - 1
        return low

    # ------------------------------------------------------------------ memory

    def _limits(self, max_num_seqs: int, token_budget: int) -> Limits:
        return Limits(self.question.max_model_len, max_num_seqs, token_budget)

    def _memory(self, max_num_seqs: int, token_budget: int) -> MemoryPlan:
        return memory_plan(
            self.setup,
            max_model_len=self.question.max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=token_budget,
        )


def _powers_of_two(limit: int) -> list[int]:
    """Those below `limit`."""
    return [1 << n for n in range((limit - 1).bit_length())] if limit > 1 else []


def _first_sentence(text: str) -> str:
    return text.partition(" What would fit:")[0].rstrip(".;: ")


# ---------------------------------------------------------------------- all of them


def estimates_of(bench: Bench, grid: Grid = GRID) -> Iterator[Estimate]:
    """Every candidate of one hardware that keeps the promise to somebody. Of equal ones, those
    with the smaller batch limit come first."""
    for token_budget in grid.token_budgets:
        for max_num_seqs in grid.batch_limits:
            found = bench.estimate(max_num_seqs, token_budget)
            if found is None:
                continue
            yield found
            if found.batch_limit < max_num_seqs:
                break  # the cache is full: more seats change nothing


def quick_estimate(bench: Bench, grid: Grid = GRID) -> Estimate | None:
    """The best of a few candidates of one hardware, to tell which hardware to look at closely."""
    middle = sorted(grid.token_budgets)[len(grid.token_budgets) // 2]
    if (found := bench.estimate(grid.batch_limits[-1], middle, is_rough=True)) is not None:
        return found
    least = min(grid.token_budgets)
    others = (bench.estimate(limit, least, is_rough=True) for limit in grid.batch_limits)
    known = [one for one in others if one is not None]
    return max(known, key=lambda one: one.planned, default=None)


def open_bench(question: Question, hardware: Hardware, grid: Grid = GRID) -> Bench | Rejection:
    """A rejection where no limits can help."""
    if hardware.offer.per_hour is None and any(o.per_hour is not None for o in question.offers):
        name = hardware.device.name
        return Rejection(hardware, NO_PRICE, f"no price is known; give --price {name}=DOLLARS")
    try:
        bench = Bench(question, Priced(question, hardware))
        return bench.why_not(min(grid.token_budgets)) or bench
    except ConfigError as fault:
        return Rejection(hardware, INFEASIBLE, _first_sentence(str(fault)))


def under(question: Question, priced: Priced, grid: Grid = GRID) -> Bench | None:
    """The same hardware under other promises; None where it keeps them to nobody."""
    bench = Bench(question, priced)
    return bench if bench.why_not(min(grid.token_budgets)) is None else None


def with_promise(question: Question, *, ttft: float = 1.0, tpot: float = 1.0) -> Question:
    """The same question with promises that many times as long."""
    return replace(question, ttft_s=question.ttft_s * ttft, tpot_s=question.tpot_s * tpot)
