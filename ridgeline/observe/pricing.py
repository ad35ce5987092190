"""What should each step cost, what did it cost, and how far is that from the limit?

A step runs from when the device could begin it (it was launched, and the one before was over) to
when it was collected; where the executor computes inside `submit`, from its launch to the end of
`submit`. Between steps the device waits for the host, unless there was nothing to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ridgeline.cost.pricer import StepPrice
from ridgeline.errors import RequestFault
from ridgeline.request import Request, RequestOutput, record
from ridgeline.speculation.report import DraftTotals
from ridgeline.step import Listener, ScheduledRequest, StepPlan, StepResult, StepShape

REGIMES = ("decode", "verify", "prefill", "mixed")
MOST_UNCOUNTED = 64  # checks that are kept until somebody asks


Price = Callable[[StepShape, int], StepPrice]  # of a step and how many rows of logits it makes
DraftPrice = Callable[[int, int, int], float]  # seconds by rows, context of each, drafts of each
DecodesPrice = Callable[[tuple[int, ...]], StepPrice]  # of one token after each of these contexts


@record
class PricedStep:
    """A step that has run. `previous_ended`: when the device was done with the one before.
    `host_s`: what it then waited for this one, with work pending.
    `price_without_prompts_s`: what the rows that decode would have cost alone."""

    plan: StepPlan
    num_logits: int
    previous_ended: float
    began: float
    ended: float
    host_s: float
    price: StepPrice
    prompts: tuple[ScheduledRequest, ...]
    price_without_prompts_s: float
    drafting_s: float = 0.0  # part of the price
    checks: bool = False  # drafts, and reads no prompts
    is_overlapped: bool = False  # it was launched before the one before it was over

    @property
    def shape(self) -> StepShape:
        return self.plan.shape

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def prompt_share(self) -> float:
        """The part of its time that went to entries of more than one token (prompts, chunks)."""
        expected = self.price.expected_s
        if not self.prompts or expected <= 0:
            return 0.0
        return min(1.0, max(0.0, 1.0 - self.price_without_prompts_s / expected))


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
    num_padded_rows: int = 0  # computed because a captured graph is larger than its batch
    regimes: dict[str, Regime] = field(default_factory=lambda: {r: Regime() for r in REGIMES})
    drafts: DraftTotals = field(default_factory=DraftTotals)


@dataclass(frozen=True, slots=True)
class Running:
    """The step that the device is at."""

    step_id: int
    plan: StepPlan
    began: float
    expected_s: float
    reads_prompts: bool


@record
class _InFlight:
    plan: StepPlan
    num_logits: int
    launched: float
    price: StepPrice
    prompts: tuple[ScheduledRequest, ...]
    price_without_prompts_s: float
    drafting_s: float = 0.0  # part of the price
    checks: bool = False  # drafts, and reads no prompts


# A check that has run, what came out of it, for whom, and its price without drafts.
_Verified = tuple[PricedStep, StepResult, Sequence[RequestOutput], float]


class Pricing(Listener):
    """Prices every step and measures it when it is over; one of the engine's listeners. A step is
    priced once it is sent off, so that no device waits for that, or when somebody asks before.
    `graph_sizes` are the batch sizes that captured graphs exist for, if
    any; `decodes_price` is a quicker way to what `price` says of a step that only decodes,
    `draft_price` is what making drafts takes before they are checked."""

    def __init__(
        self,
        price: Price,
        *,
        computes_in_submit: bool = False,
        graph_sizes: Sequence[int] = (),
        decodes_price: DecodesPrice | None = None,
        draft_price: DraftPrice | None = None,
    ) -> None:
        self._totals = Totals()
        self.listeners: list[Callable[[PricedStep], object]] = []  # told of each step
        self.last_ended = 0.0
        self._price, self._decodes_price = price, decodes_price
        self._draft_price = draft_price
        self._plain_s: dict[int, float] = {}  # what steps in flight would take without drafts
        self._ran: dict[int, PricedStep] = {}  # of these, what they took
        # Checks that are not counted yet. To count some at once takes less than each as it ends,
        # when the host's caches are cold for it.
        self._verified: list[_Verified] = []
        self.computes_in_submit = computes_in_submit
        self._graph_sizes = sorted(graph_sizes)
        self._planned: deque[tuple[StepPlan, float]] = deque()  # not priced yet
        self._in_flight: deque[_InFlight] = deque()
        self._live: set[str] = set()
        self._busy_since = 0.0  # since when there has been work, without a break

    @property
    def totals(self) -> Totals:
        """Of all steps that have run."""
        self._count_verified()
        return self._totals

    @property
    def running(self) -> Running | None:
        """What the device is at, as far as the host can know."""
        self._price_planned()
        if not self._in_flight:
            return None
        step = self._in_flight[0]
        began = max(step.launched, self.last_ended)
        return Running(
            step.plan.step_id, step.plan, began, step.price.expected_s, bool(step.prompts)
        )

    def on_add(self, request: Request, now: float, fault: RequestFault | None) -> None:
        if fault is not None:
            return
        if not self._live:
            self._busy_since = now
        self._live.add(request.request_id)

    def on_abort(self, request_id: str, now: float) -> None:
        self._live.discard(request_id)

    def on_plan(self, plan: StepPlan, now: float) -> None:
        if plan.scheduled:
            self._planned.append((plan, now))

    def _price_planned(self) -> None:
        while self._planned:
            self._in_flight.append(self._priced(*self._planned.popleft()))

    def _priced(self, plan: StepPlan, now: float) -> _InFlight:
        rows = plan.scheduled
        if plan.decodes is not None and self._decodes_price is not None:
            price = self._decodes_price(plan.decodes.starts)
            return _InFlight(plan, len(rows), now, price, (), price.expected_s)
        num_logits = sum([entry.num_draft + 1 for entry in rows if entry.samples])
        price = self._price(plan.shape, num_logits)
        draft_tokens = [entry.num_draft for entry in rows if entry.num_draft]
        checks = bool(draft_tokens) and num_logits == sum([entry.num_tokens for entry in rows])
        drafting_s = 0.0
        if draft_tokens and self._draft_price is not None:
            context = sum([entry.start for entry in rows]) // len(rows)
            drafting_s = self._draft_price(len(draft_tokens), context, max(draft_tokens))
            price = replace(price, expected_s=price.expected_s + drafting_s)
        if checks:  # each row computes its newest token and drafts
            self._plain_s[plan.step_id] = self._decodes_s(tuple([entry.start for entry in rows]))
            return _InFlight(plan, num_logits, now, price, (), price.expected_s, drafting_s, True)
        prompts = tuple([entry for entry in rows if entry.num_tokens > 1 and _is_prompt(entry)])
        alone_s = 0.0 if prompts else price.expected_s
        if prompts and len(prompts) < len(rows):
            alone_s = self._without_prompts(rows, len(rows) - len(prompts))
        return _InFlight(plan, num_logits, now, price, prompts, alone_s, drafting_s, False)

    def _decodes_s(self, contexts: tuple[int, ...]) -> float:
        """Of one token after each of these contexts."""
        if self._decodes_price is not None:
            return self._decodes_price(contexts).expected_s
        return self._price(tuple([(1, context) for context in contexts]), len(contexts)).expected_s

    def _without_prompts(self, rows: Sequence[ScheduledRequest], num_rest: int) -> float:
        contexts = tuple([entry.start for entry in rows if entry.num_tokens == 1])
        if len(contexts) == num_rest:
            return self._decodes_s(contexts)
        rest = tuple((e.num_tokens, e.start) for e in rows if not _is_prompt(e))
        return self._price(rest, len(rest)).expected_s

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
        self._price_planned()
        if not self.computes_in_submit:
            self._over(plan.step_id, now, has_failed=error is not None)
        if plan.step_id in self._plain_s:
            plain_s, ran = self._plain_s.pop(plan.step_id), self._ran.pop(plan.step_id, None)
            if ran is not None and result is not None:
                self._verified.append((ran, result, outputs, plain_s))
                if len(self._verified) >= MOST_UNCOUNTED:
                    self._count_verified()
        for output in outputs:
            if output.finish_reason is not None:
                self._live.discard(output.request_id)

    def _count_verified(self) -> None:
        """But those that gave nobody a token who was left."""
        verified, self._verified = self._verified, []
        drafts = self._totals.drafts
        for ran, result, outputs, plain_s in verified:
            if drafts.count_result(ran.plan, result, outputs, plain_s):
                drafts.count_step(ran.seconds, ran.price.expected_s, ran.drafting_s)

    def _over(self, step_id: int, ended: float, *, has_failed: bool = False) -> None:
        """The oldest step in flight has run; one that failed says nothing of its price."""
        if not self._in_flight or self._in_flight[0].plan.step_id != step_id:
            return  # it could not be priced
        step = self._in_flight.popleft()
        began = min(max(step.launched, self.last_ended), ended)
        host = max(0.0, began - max(self.last_ended, self._busy_since))
        done = PricedStep(
            step.plan,
            step.num_logits,
            self.last_ended,
            began,
            ended,
            host,
            step.price,
            step.prompts,
            step.price_without_prompts_s,
            step.drafting_s,
            step.checks,
            step.launched < self.last_ended,
        )
        self.last_ended = ended
        if not has_failed:
            self._count(done)
        for listener in self.listeners:
            listener(done)

    def _count(self, step: PricedStep) -> None:
        totals, price, num_rows = self._totals, step.price, len(step.plan.scheduled)
        totals.num_steps += 1
        totals.measured_s += step.seconds
        totals.expected_s += price.expected_s
        totals.ideal_s += price.ideal_s
        totals.host_s += step.host_s
        totals.flops += price.flops
        totals.bytes += price.bytes
        totals.num_rows += num_rows
        totals.num_padded_rows += self._padding(num_rows) if not step.prompts else 0
        if step.checks:
            self._ran[step.plan.step_id] = step
        kind = "verify" if step.checks else _regime(len(step.prompts), num_rows)
        regime = totals.regimes[kind]
        regime.num_steps += 1
        regime.measured_s += step.seconds
        regime.expected_s += price.expected_s

    def _padding(self, num_rows: int) -> int:
        return next((size - num_rows for size in self._graph_sizes if size >= num_rows), 0)


def _is_prompt(entry: ScheduledRequest) -> bool:
    """More than one token that is no draft: a prompt, or a chunk of one."""
    return entry.num_tokens - entry.num_draft > 1


def _regime(num_prompts: int, num_rows: int) -> str:
    if not num_prompts:
        return "decode"
    return "prefill" if num_prompts == num_rows else "mixed"
