"""What happened in this run: what was each step to cost, what did it cost, and whose was it?

A step runs from when the device could begin it (it was launched, and the one before was over) to
when it was collected; where the executor computes inside `submit`, from its launch to the end of
`submit`. Between steps the device waits for the host, unless there was nothing to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ridgeline.errors import InternalError, RequestFault
from ridgeline.observe.requests import MAX_FINISHED, RequestTimes
from ridgeline.request import Request, RequestOutput
from ridgeline.speculation.report import DraftTotals
from ridgeline.step import (
    Listener,
    Listeners,
    PricedStep,
    ScheduledRequest,
    StepPlan,
    StepPrice,
    StepResult,
    StepShape,
)

REGIMES = ("decode", "verify", "prefill", "mixed")
NUM_RECENT = 64  # steps that are kept whole
MOST_UNCOUNTED = 64  # steps with drafts that are kept until somebody asks

Price = Callable[[StepShape, int], StepPrice]  # of a step and how many rows of logits it makes
MaskPrice = Callable[[int], tuple[float, float]]  # bytes and seconds by rows of logits
DraftPrice = Callable[[int, int, int], float]  # seconds by rows, context of each, drafts of each
DecodesPrice = Callable[[tuple[int, ...]], StepPrice]  # of one token after each of these contexts


@dataclass(slots=True)
class Regime:
    """Steps of one kind: how many, what they took and what they should have taken, in seconds."""

    num_steps: int = 0
    measured_s: float = 0.0
    expected_s: float = 0.0


@dataclass(slots=True)
class Totals:
    """Sums over steps; all only rise."""

    num_steps: int = 0
    measured_s: float = 0.0
    expected_s: float = 0.0
    ideal_s: float = 0.0
    host_s: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    num_rows: int = 0
    regimes: dict[str, Regime] = field(default_factory=lambda: {r: Regime() for r in REGIMES})
    drafts: DraftTotals = field(default_factory=DraftTotals)
    num_masked_rows: int = 0  # rows of logits that a grammar had a mask for
    mask_bytes: float = 0.0  # of them, in `bytes` too


@dataclass(frozen=True, slots=True)
class CpuTime:
    """`cpu_s`: what all threads of the process computed in `wall_s`, while requests were there."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What one rank of a group has done since its start: steps begun, collectives entered and the
    last of them, seconds in which it waited there for others, and bytes of memory that it holds."""

    rank: int
    host: str
    num_steps: int
    num_collectives: int
    last_collective: str
    waited_s: float
    memory_bytes: int


class Run(Listener):
    """The record of one engine's steps and requests; one of the engine's listeners. Its own
    `listeners` are told of each step that has run. A step is priced once it is sent off, so that no
    device waits for that, or when somebody asks before; without a `price` steps are only counted.

    `mask_price`: bytes and seconds of the masks of so many rows of logits.

    `decodes_price` is a quicker way to what `price` says of a step that only decodes, `draft_price`
    is what making drafts takes before they are verified. `cpu_s` gives the CPU seconds of the
    process so far, or None where nobody knows: it is asked when the first request comes and when
    the last has gone."""

    def __init__(
        self,
        price: Price | None = None,
        *,
        computes_in_submit: bool = False,
        decodes_price: DecodesPrice | None = None,
        draft_price: DraftPrice | None = None,
        mask_price: MaskPrice | None = None,
        max_finished: int | None = MAX_FINISHED,
        cpu_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.requests = RequestTimes(max_finished)
        self.recent: deque[PricedStep] = deque(maxlen=NUM_RECENT)
        self.listeners = Listeners()
        # Of each layer with experts: tokens of the busiest one over those of the mean one.
        self.expert_load: Callable[[], tuple[float, ...]] = tuple
        self.ranks: Callable[[], tuple[RankStatus, ...]] = tuple  # of a group
        self.rank_load: Callable[[], tuple[float, ...]] = tuple
        self.num_exchanges: Callable[[], int] = int
        self.computes_in_submit = computes_in_submit
        self.last_ended = 0.0
        # Of all steps that were collected, priced or not; they only rise, but `last_failed`.
        self.num_steps = self.num_failed_steps = self.num_scheduled_tokens = 0
        self.num_prompt_tokens = 0  # looked up in the prefix cache
        self.num_hit_tokens = 0  # and found there
        self.busy_s = 0.0  # with at least one step in flight
        self.last_failed = False
        self._busy_until = 0.0
        self._launched: dict[int, float] = {}  # steps that are not collected yet
        self._started: list[tuple[str, float]] | None = None  # once somebody takes them
        self._totals = Totals()
        self.is_priced = price is not None
        self._price, self._decodes_price = price or _no_price, decodes_price
        self._draft_price, self._mask_price = draft_price, mask_price
        self._masked: set[str] = set()  # requests whose answers keep to a grammar
        self._planned: deque[tuple[StepPlan, float]] = deque()  # not priced yet
        self._in_flight: deque[PricedStep] = deque()
        self._ran: dict[int, PricedStep] = {}  # steps with drafts that are not collected yet
        # Steps with drafts that are not counted yet. To count some at once takes less than each as
        # it ends, when the host's caches are cold for it.
        self._verified: list[tuple[PricedStep, StepResult, Sequence[RequestOutput]]] = []
        self._busy_since = 0.0  # since when there has been work, without a break
        self._read_cpu_s, self._cpu = cpu_s, CpuTime(0.0, 0.0)
        self._cpu_since: tuple[float, float] | None = None

    # ------------------------------------------------------------------ what is known

    @property
    def totals(self) -> Totals:
        """Of all steps that have run."""
        self._count_verified()
        return self._totals

    @property
    def running(self) -> PricedStep | None:
        """The step that the device is at, as far as the host can know."""
        self._price_planned()
        return self._in_flight[0] if self._in_flight else None

    def price_of(self, plan: StepPlan) -> float:
        """Seconds; may be asked by another thread than the engine's."""
        return self._priced(plan, 0.0).price.expected_s

    def take_started(self) -> tuple[tuple[str, float], ...]:
        """The rows that plans opened since the last call, and when each plan was made: requests
        that run for the first time, and again those that come back from a preemption."""
        started, self._started = tuple(self._started or ()), []
        return started

    def cpu_until(self, now: float) -> CpuTime | None:
        """None where nothing is known."""
        found = self._cpu_with(now) or self._cpu
        return found if found.wall_s > 0 else None

    def _cpu_with(self, now: float) -> CpuTime | None:
        """The sum and the time since requests came."""
        if self._cpu_since is None or (cpu_s := self._read_cpu_s()) is None:
            return None
        began, began_cpu_s = self._cpu_since
        return CpuTime(self._cpu.wall_s + now - began, self._cpu.cpu_s + cpu_s - began_cpu_s)

    # ------------------------------------------------------------------ as a listener

    def on_add(self, request: Request, now: float, fault: RequestFault | None) -> None:
        if fault is not None:
            return
        if not self.requests.active:
            self._busy_since = now
            if (cpu_s := self._read_cpu_s()) is not None:
                self._cpu_since = now, cpu_s
        self.requests.add(request, now)
        if request.sampling.structured_outputs:
            self._masked.add(request.request_id)

    def on_abort(self, request_id: str, now: float) -> None:
        self._end(request_id, "abort", now)

    def on_plan(self, plan: StepPlan, now: float) -> None:
        if plan.scheduled:
            self._launched[plan.step_id] = now
            if self.is_priced:
                self._planned.append((plan, now))

    def on_submitted(self, plan: StepPlan, now: float) -> None:
        self._price_planned()
        if self.computes_in_submit:
            self._over(plan.step_id, now)

    def on_collect(
        self,
        plan: StepPlan,
        result: StepResult | None,
        outputs: Sequence[RequestOutput],
        error: str | None,
        now: float,
    ) -> None:
        try:
            self._price_planned()
            if not self.computes_in_submit:
                self._over(plan.step_id, now, has_failed=error is not None)
            verified = self._ran.pop(plan.step_id, None)
            if verified is not None and result is not None:
                self._verified.append((verified, result, outputs))
                if len(self._verified) >= MOST_UNCOUNTED:
                    self._count_verified()
        finally:  # whatever its price, requests have ended
            self._count_step(plan, error, now)
            for output in self.requests.take(plan, outputs, now):
                if output.finish_reason is not None:
                    self._end(output.request_id, output.finish_reason.value, now)

    def _end(self, request_id: str, reason: str, now: float) -> None:
        self._masked.discard(request_id)
        self.requests.end(request_id, reason, now, self.running, self.last_ended)
        if not self.requests.active and self._cpu_since is not None:
            self._cpu, self._cpu_since = self._cpu_with(now) or self._cpu, None

    def _count_step(self, plan: StepPlan, error: str | None, now: float) -> None:
        launched = self._launched.pop(plan.step_id, now)
        self.num_steps += 1
        self.last_failed = error is not None
        self.num_failed_steps += self.last_failed
        if plan.decodes is not None:
            self.num_scheduled_tokens += len(plan.scheduled)
        else:
            self.num_scheduled_tokens += sum([entry.num_tokens for entry in plan.scheduled])
        self.busy_s += max(0.0, now - max(launched, self._busy_until))
        self._busy_until = max(self._busy_until, now)
        if not plan.new:
            return
        starts = {entry.request_id: entry.start for entry in plan.scheduled}
        for row in plan.new:
            if self._started is not None:
                self._started.append((row.request_id, launched))
            if len(row.token_ids) == row.num_prompt_tokens:
                self.num_prompt_tokens += row.num_prompt_tokens
                self.num_hit_tokens += starts.get(row.request_id, 0)

    # ------------------------------------------------------------------ the price of a step

    def _price_planned(self) -> None:
        while self._planned:
            self._in_flight.append(self._priced(*self._planned.popleft()))
            if len(self._in_flight) == 1:
                self._can_begin(self._in_flight[0])

    def _priced(self, plan: StepPlan, now: float) -> PricedStep:
        step = self._priced_bare(plan, now)
        if self._masked and self._mask_price is not None:
            due = [row for row in plan.scheduled if row.samples and row.request_id in self._masked]
            step.num_masked_rows = sum([row.num_draft + 1 for row in due])
            step.mask_bytes, mask_s = self._mask_price(step.num_masked_rows)
            price = step.price
            step.price = replace(
                price, expected_s=price.expected_s + mask_s, bytes=price.bytes + step.mask_bytes
            )
        return step

    def _priced_bare(self, plan: StepPlan, now: float) -> PricedStep:
        rows = plan.scheduled
        if plan.decodes is not None and self._decodes_price is not None:
            price = self._decodes_price(plan.decodes.starts)
            return PricedStep(plan, len(rows), 0.0, now, 0.0, 0.0, price, (), price.expected_s)
        num_logits = sum([entry.num_draft + 1 for entry in rows if entry.samples])
        price = self._price(plan.shape, num_logits)
        draft_tokens = [entry.num_draft for entry in rows if entry.num_draft]
        drafting_s = plain_s = 0.0
        if draft_tokens and self._draft_price is not None:
            context = sum([entry.start for entry in rows]) // len(rows)
            drafting_s = self._draft_price(len(draft_tokens), context, max(draft_tokens))
            price = replace(price, expected_s=price.expected_s + drafting_s)
        alone_s = price.expected_s
        prompts: tuple[ScheduledRequest, ...] = ()
        verifies = bool(draft_tokens) and num_logits == sum([entry.num_tokens for entry in rows])
        if verifies:  # each row computes its newest token and drafts
            plain_s = self._decodes_s(tuple([entry.start for entry in rows]))
        else:
            prompts = tuple([entry for entry in rows if entry.num_tokens > 1 and _is_prompt(entry)])
            if prompts:
                num_rest = len(rows) - len(prompts)
                alone_s = self._without_prompts(rows, num_rest) if num_rest else 0.0
        return PricedStep(
            plan, num_logits, 0.0, now, 0.0, 0.0, price, prompts, alone_s, drafting_s, verifies,
            plain_s=plain_s,
        )  # fmt: skip

    def _decodes_s(self, contexts: tuple[int, ...]) -> float:
        """Of one token after each of these contexts."""
        if self._decodes_price is not None:
            return self._decodes_price(contexts).expected_s
        shape = tuple([(1, context) for context in contexts])
        return self._price(shape, len(contexts)).expected_s

    def _without_prompts(self, rows: Sequence[ScheduledRequest], num_rest: int) -> float:
        contexts = tuple([entry.start for entry in rows if entry.num_tokens == 1])
        if len(contexts) == num_rest:
            return self._decodes_s(contexts)
        rest = tuple((e.num_tokens, e.start) for e in rows if not _is_prompt(e))
        return self._price(rest, len(rest)).expected_s

    # ------------------------------------------------------------------ a step that has run

    def _can_begin(self, step: PricedStep) -> None:
        """All before it have run."""
        step.is_overlapped = step.began < self.last_ended
        step.began = max(step.began, self.last_ended)

    def _over(self, step_id: int, ended: float, *, has_failed: bool = False) -> None:
        """The oldest step in flight has run; one that failed says nothing of its price."""
        if not self._in_flight or self._in_flight[0].plan.step_id != step_id:
            return  # it could not be priced
        step, last = self._in_flight.popleft(), self.last_ended
        step.previous_ended, step.began = last, min(step.began, ended)
        step.ended = self.last_ended = ended
        step.host_s = max(0.0, step.began - max(last, self._busy_since))
        if self._in_flight:
            self._can_begin(self._in_flight[0])
        if not has_failed:
            self._count(step)
        self.recent.append(step)
        self.requests.on_priced(step)
        self.listeners.tell("on_priced", step)

    def _count(self, step: PricedStep) -> None:
        totals, price, num_rows = self._totals, step.price, len(step.plan.scheduled)
        seconds = step.ended - step.began
        totals.num_steps += 1
        totals.measured_s += seconds
        totals.expected_s += price.expected_s
        totals.ideal_s += price.ideal_s
        totals.host_s += step.host_s
        totals.flops += price.flops
        totals.bytes += price.bytes
        totals.num_rows += num_rows
        totals.num_masked_rows += step.num_masked_rows
        totals.mask_bytes += step.mask_bytes
        if step.checks:
            self._ran[step.plan.step_id] = step
        regime = totals.regimes["verify" if step.checks else _regime(len(step.prompts), num_rows)]
        regime.num_steps += 1
        regime.measured_s += seconds
        regime.expected_s += price.expected_s

    def _count_verified(self) -> None:
        """But those that gave nobody a token who was left."""
        verified, self._verified = self._verified, []
        drafts = self._totals.drafts
        for step, result, outputs in verified:
            if drafts.count_result(step.plan, result, outputs, step.plain_s):
                drafts.count_step(step.seconds, step.price.expected_s, step.drafting_s)


def _no_price(shape: StepShape, num_logits: int) -> StepPrice:
    raise InternalError("nobody prices the steps of this run")


def _is_prompt(entry: ScheduledRequest) -> bool:
    """More than one token that is no draft: a prompt, or a chunk of one."""
    return entry.num_tokens - entry.num_draft > 1


def _regime(num_prompts: int, num_rows: int) -> str:
    if not num_prompts:
        return "decode"
    return "prefill" if num_prompts == num_rows else "mixed"
