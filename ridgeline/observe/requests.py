"""Where did each request's time go, and what did it cost?

Every moment between its arrival and its end is put to one of six parts, so that they sum to its
latency. The measured time of every step, and its operations and bytes, are shared among its rows,
so that the shares sum to the whole, to the last nanosecond. A row's part of the time is by the
price of its work on an ideal device: its operations over the peak plus its bytes over the
bandwidth. The attention over its own cache is its own; what all rows use together (the weights) is
shared by tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice

from ridgeline.cost.pricer import Pricer
from ridgeline.request import Request, RequestOutput
from ridgeline.scheduler.beams import BEAM_MARK
from ridgeline.step import Listener, PricedStep, ScheduledRequest, StepPlan

NANO = 1_000_000_000
MAX_FINISHED = 256  # that are kept, the latest: of all together, and of each tenant
MAX_HASHES = 1024  # of the blocks of a request that ended
MAX_TENANTS = 256  # whose ended requests are kept apart, those who had one last


@dataclass(slots=True)
class Parts:
    """Seconds. A step that a request is in goes to `others_prefill` as far as prompts of others
    made it dearer, by price; what is left goes to its own work. `queue` is before its first step,
    and any later step that had no place for it. `preemption` is from the loss of its blocks until
    everything lost is computed again. `host` is between two steps."""

    queue: float = 0.0
    own_prefill: float = 0.0
    others_prefill: float = 0.0
    decode: float = 0.0
    preemption: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        begun = self.queue + self.own_prefill + self.others_prefill
        return begun + self.decode + self.preemption + self.host

    def add(self, other: Parts) -> None:
        for name in PARTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


PARTS = tuple(row.name for row in fields(Parts))


@dataclass(slots=True)
class TimeBreakdown:
    """One request. Times are of the engine's clock; `until`: how far its time is accounted for."""

    request_id: str
    arrival: float
    num_prompt_tokens: int
    parts: Parts
    until: float
    first_token: float | None = None
    ended: float | None = None
    end: str = ""  # stop, length, abort or error
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_done: int = 0  # tokens computed so far, whether or not they were lost since
    has_started: bool = False
    is_preempted: bool = False
    tenant: str = ""  # hex

    @property
    def latency(self) -> float:
        """Seconds from arrival to where its accounts end."""
        return self.until - self.arrival


class RequestTimes:
    """The time breakdowns of all active requests and of the latest that ended."""

    def __init__(self, max_finished: int | None = MAX_FINISHED) -> None:
        self.active: dict[str, TimeBreakdown] = {}
        self.finished: deque[TimeBreakdown] = deque(maxlen=max_finished)
        self.num_finished = 0
        # Apart, so that nobody can count from what is missing how much the others asked.
        self._ended: OrderedDict[str, deque[TimeBreakdown]] = OrderedDict()
        self._steady: _Steady | None = None
        # The hashes of their blocks, by request, as the prefix cache goes on making them.
        self._block_hashes: dict[str, list[bytes]] = {}

    def add(self, request: Request, now: float) -> None:
        arrival = min(request.arrival_time, now)
        num_prompt = len(request.prompt_token_ids)
        self.active[request.request_id] = TimeBreakdown(
            request.request_id, arrival, num_prompt, Parts(), arrival, tenant=request.tenant.hex()
        )
        self._block_hashes[request.request_id] = request.block_hashes

    def take(
        self, plan: StepPlan, outputs: Sequence[RequestOutput], now: float
    ) -> Sequence[RequestOutput]:
        """Count the tokens that a step gave; the outputs among which some may be the last."""
        if self._steady is not None and self._steady.gives(plan, outputs):
            return ()
        for output in outputs:
            breakdown = self.active.get(output.request_id)
            if breakdown is None:
                continue
            breakdown.num_output_tokens += len(output.new_token_ids)
            if breakdown.first_token is None and output.new_token_ids:
                breakdown.first_token = now
        return outputs

    def end(
        self,
        request_id: str,
        reason: str,
        now: float,
        running: PricedStep | None,
        last_ended: float,
    ) -> None:
        """`running` is the step that the device is at, the one before was over at `last_ended`."""
        self.settle_steady()
        breakdown = self.active.pop(request_id, None)
        if breakdown is None:
            return
        _settle([breakdown], now, running, last_ended)
        breakdown.ended, breakdown.end = now, reason
        if len(self.finished) == self.finished.maxlen:
            self._block_hashes.pop(self.finished[0].request_id, None)
        if len(hashes := self._block_hashes.get(request_id, [])) > MAX_HASHES:
            self._block_hashes[request_id] = hashes[:MAX_HASHES]
        self.finished.append(breakdown)
        self.num_finished += 1
        if breakdown.tenant:
            own = self._ended.setdefault(breakdown.tenant, deque(maxlen=self.finished.maxlen))
            own.append(breakdown)
            self._ended.move_to_end(breakdown.tenant)
            if len(self._ended) > MAX_TENANTS:
                self._ended.popitem(last=False)

    def of(
        self, tenant: str | None, now: float, running: PricedStep | None, last_ended: float
    ) -> tuple[tuple[TimeBreakdown, ...], tuple[TimeBreakdown, ...]]:
        """The latest that ended and as many of those that have not, the oldest first, up to `now`;
        of this tenant, or of all. Steps wait for it: it takes as long for many as for a few."""
        self.settle_steady()
        finished = self.finished if tenant is None else self._ended.get(tenant, ())
        found = (a for a in self.active.values() if tenant is None or a.tenant == tenant)
        active = tuple(
            replace(breakdown, parts=replace(breakdown.parts))
            for breakdown in islice(found, self.finished.maxlen)
        )
        _settle(active, now, running, last_ended)
        return tuple(finished), active

    def beginnings(self, block_size: int) -> dict[str, tuple[str, int]]:
        """Of those that ended: an earlier one that began alike, and for how many tokens."""
        first_with: dict[bytes, str] = {}
        found = {}
        ended = {one.request_id for one in self.finished}
        for name, hashes in self._block_hashes.items():
            if name not in ended:
                continue
            num_alike = bisect_left(hashes, True, key=lambda each: each not in first_with)
            if num_alike:
                found[name] = (first_with[hashes[num_alike - 1]], num_alike * block_size)
            first_with |= dict.fromkeys(hashes[num_alike:], name)
        return found

    def on_priced(self, step: PricedStep) -> None:
        steady = self._steady
        if steady is not None and steady.takes(step):
            return
        self.settle_steady()
        self._put_step(step)
        if not step.prompts:
            self._steady = _Steady.of(step, self.active)

    def settle_steady(self) -> None:
        """Write down what a run of equal steps has added up."""
        if self._steady is not None:
            self._steady.settle()
            self._steady = None

    def _put_step(self, step: PricedStep) -> None:
        active = self.active
        for row in step.plan.preempted:
            breakdown = active.get(_request_of(row))
            if breakdown is not None and not breakdown.is_preempted:
                _catch_up(breakdown, step.began, step.previous_ended)
                breakdown.is_preempted = True
                breakdown.num_preemptions += 1
        works = {e.request_id: _work(e) for e in step.prompts}
        share, all_work = _prompt_share(step), sum(works.values())
        began, ended, last = step.began, step.ended, step.previous_ended
        for entry in step.plan.scheduled:
            name = entry.request_id
            breakdown = active.get(name) or active.get(_request_of(name))
            if breakdown is None or breakdown.until >= ended:
                continue  # it is over, or another beam of it was in the same step
            if began > breakdown.until:
                _catch_up(breakdown, began, last)
            others = share
            if name in works:
                others = share * (all_work - works[name]) / all_work
            _put(breakdown, entry, ended, others)


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A step that read tokens of a request's prompt, or of what a preemption lost, from position
    `start` on. Seconds of the engine's clock; `expected_s` is the price of the whole step, with all
    its rows."""

    request_id: str
    began: float
    ended: float
    start: int
    num_tokens: int
    num_rows: int
    expected_s: float


class PromptChunks(Listener):
    """Notes the chunks of those who asked; one of a run's listeners. A step that reads no prompts,
    and one without anybody who asked, costs one look."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        self._new: list[PromptChunk] = []

    def ask(self, request_id: str) -> None:
        """Note them for this request, until `close` or its last output."""
        self._open.add(request_id)

    def close(self, request_id: str) -> None:
        self._open.discard(request_id)

    def on_priced(self, step: PricedStep) -> None:
        if not self._open:
            return
        for entry in step.prompts:
            name = _request_of(entry.request_id)
            if name in self._open:
                num_rows = len(step.plan.scheduled)
                expected_s = step.price.expected_s
                self._new.append(
                    PromptChunk(
                        name, step.began, step.ended, entry.start, entry.num_tokens, num_rows,
                        expected_s,
                    )
                )  # fmt: skip

    def take(self, outputs: Sequence[RequestOutput]) -> tuple[PromptChunk, ...]:
        """Those since the last call; `outputs` say whose were the last."""
        if not self._open:
            return ()
        new, self._new = self._new, []
        for output in outputs:
            if output.finish_reason is not None:
                self._open.discard(output.request_id)
        return tuple(new)


@dataclass(slots=True)
class _Steady:
    """Steps in which the same requests, all of them, decode one token each, or that and drafts:
    what is the same for all is added up once for each step, and not once for each request and
    step."""

    names: tuple[str, ...]
    time_breakdowns: list[TimeBreakdown]
    until: float
    decode_s: float = 0.0
    host_s: float = 0.0
    num_collected: int = 0  # of one token each, not yet among those of their accounts
    last: StepPlan | None = None

    @classmethod
    def of(cls, step: PricedStep, active: Mapping[str, TimeBreakdown]) -> _Steady | None:
        """Ready for more steps like this one; None if one of its rows is in any way special."""
        time_breakdowns = []
        for entry in step.plan.scheduled:
            breakdown = active.get(entry.request_id)
            if breakdown is None or breakdown.until != step.ended:
                return None
            end = entry.start + entry.num_tokens - entry.num_draft
            if end < breakdown.num_prompt_tokens:
                return None
            if breakdown.num_preemptions and end < breakdown.num_done:
                return None
            time_breakdowns.append(breakdown)
        names = tuple([entry.request_id for entry in step.plan.scheduled])
        return cls(names, time_breakdowns, step.ended)

    def takes(self, step: PricedStep) -> bool:
        """Add this step, if it is one more of the same kind."""
        if step.prompts or step.plan.preempted or _decoding_rows(step) != self.names:
            return False
        self.host_s += step.began - self.until
        self.decode_s += step.ended - step.began
        self.until = step.ended
        self.last = step.plan
        return True

    def gives(self, plan: StepPlan, outputs: Sequence[RequestOutput]) -> bool:
        """Count the outputs of the latest step, if it has one token for each and nobody ends."""
        if plan is not self.last or plan.decodes is None or len(outputs) != len(self.names):
            return False
        for output in outputs:
            if output.finish_reason is not None:
                return False
        self.num_collected += 1
        return True

    def settle(self) -> None:
        if self.last is None:
            return
        for breakdown, entry in zip(self.time_breakdowns, self.last.scheduled, strict=True):
            breakdown.parts.decode += self.decode_s
            breakdown.parts.host += self.host_s
            breakdown.until = self.until
            end = entry.start + entry.num_tokens - entry.num_draft
            breakdown.num_done = max(breakdown.num_done, end)
            breakdown.num_output_tokens += self.num_collected


def _settle(
    time_breakdowns: Iterable[TimeBreakdown], now: float, running: PricedStep | None, last: float
) -> None:
    """Account for the time since their last steps, the latest of which ended at `last`; a step that
    is running counts as far as it has got."""
    entries: dict[str, ScheduledRequest] = {}
    if running is not None and running.began < now:
        for entry in running.plan.scheduled:
            entries.setdefault(_request_of(entry.request_id), entry)
    for breakdown in time_breakdowns:
        if running is None or running.began >= now:
            _catch_up(breakdown, now, last)
            continue
        _catch_up(breakdown, running.began, last)
        if breakdown.request_id in entries:
            _put(breakdown, entries[breakdown.request_id], now, 0.0)
        else:
            _catch_up(breakdown, now, now)


def _prompt_share(step: PricedStep) -> float:
    """The part of its time that went to entries of more than one token (prompts, chunks)."""
    expected = step.price.expected_s
    if not step.prompts or expected <= 0:
        return 0.0
    return min(1.0, max(0.0, 1.0 - step.price_without_prompts_s / expected))


def _decoding_rows(step: PricedStep) -> tuple[str, ...] | None:
    """The rows of a step that gives each one token, or that and drafts; None for any other."""
    plan = step.plan
    if plan.decodes is not None:
        return plan.decodes.row_ids
    rows = plan.scheduled
    if not step.checks and sum([entry.num_tokens for entry in rows]) != len(rows):
        return None
    return tuple([entry.request_id for entry in rows])


def _request_of(row: str) -> str:
    return row.partition(BEAM_MARK)[0]


def _work(entry: ScheduledRequest) -> float:
    """Of prompts in one step, as one is to the other: the pairs of tokens that attention sees are
    few beside what the weights cost, so tokens decide."""
    return float(entry.num_tokens)


def _catch_up(breakdown: TimeBreakdown, now: float, last_ended: float) -> None:
    """Account for time in which it was not computed; the device was idle since `last_ended`."""
    if now <= breakdown.until:
        return
    parts = breakdown.parts
    if breakdown.is_preempted:
        parts.preemption += now - breakdown.until
    elif not breakdown.has_started:
        parts.queue += now - breakdown.until
    else:
        left_out = min(max(breakdown.until, last_ended), now)
        parts.queue += left_out - breakdown.until
        parts.host += now - left_out
    breakdown.until = now


def _put(
    breakdown: TimeBreakdown, entry: ScheduledRequest, ended: float, others_share: float
) -> None:
    """Account for a step that it is in, up to `ended`."""
    parts, own = breakdown.parts, ended - breakdown.until
    breakdown.until = ended
    if not breakdown.has_started:
        breakdown.has_started, breakdown.num_cached_tokens = True, entry.start
    breakdown.is_preempted = False
    others = own * others_share
    own -= others
    parts.others_prefill += others
    if breakdown.num_preemptions and entry.start < breakdown.num_done:
        lost = min(breakdown.num_done - entry.start, entry.num_tokens) / entry.num_tokens * own
        parts.preemption += lost
        own -= lost
    if entry.start < breakdown.num_prompt_tokens:
        parts.own_prefill += own
    else:
        parts.decode += own
    breakdown.num_done = max(breakdown.num_done, entry.start + entry.num_tokens - entry.num_draft)


# ---------------------------------------------------------------------- what it cost


@dataclass(slots=True)
class RequestCost:
    """Integers, so that nothing is lost in adding them up. `device_ns`: on all devices of the
    engine at once, so two devices for a second are a second."""

    device_ns: int = 0
    flops: int = 0
    bytes: int = 0

    def add(self, other: RequestCost) -> None:
        self.device_ns += other.device_ns
        self.flops += other.flops
        self.bytes += other.bytes

    def take(self, part: RequestCost) -> None:
        """Make `part` no larger than what is left here, and take it away."""
        part.device_ns = min(part.device_ns, self.device_ns)
        part.flops = min(part.flops, self.flops)
        part.bytes = min(part.bytes, self.bytes)
        self.device_ns -= part.device_ns
        self.flops -= part.flops
        self.bytes -= part.bytes


class RequestCosts(Listener):
    """Writes request costs for those who asked, and one for all others together; one of a run's
    listeners. Steps without anyone who asked cost one look each."""

    def __init__(self, pricer: Pricer) -> None:
        self.others = RequestCost()
        self._pricer = pricer
        self._open: dict[str, RequestCost] = {}
        limits = pricer.limits
        self._per_flop_s, self._per_byte_s = 1.0 / limits.flops, 1.0 / limits.bytes

    def ask(self, request_id: str) -> None:
        """Keep the costs for this request, until `close`."""
        self._open[request_id] = RequestCost()

    def get(self, request_id: str) -> RequestCost | None:
        """What it has cost so far; None when nobody asked."""
        return self._open.get(request_id)

    def close(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def on_priced(self, step: PricedStep) -> None:
        left = RequestCost(
            round(step.seconds * NANO), round(step.price.flops), round(step.price.bytes)
        )
        if not self._open:
            self.others.add(left)
            return
        rows = step.plan.scheduled
        asked = [(e, r) for e in rows if (r := self._of(e.request_id)) is not None]
        if not asked:
            self.others.add(left)
            return
        price, num_tokens = step.price, sum([new for new, _ in step.plan.shape])
        shared_flops = max(0.0, price.flops - price.own_flops) / num_tokens
        shared_bytes = max(0.0, price.bytes - price.own_bytes) / num_tokens
        whole_s = price.flops * self._per_flop_s + price.bytes * self._per_byte_s
        device_ns = left.device_ns
        for entry, request_cost in asked:
            flops, moved = self._pricer.own_work(entry.num_tokens, entry.start)
            flops += shared_flops * entry.num_tokens
            moved += shared_bytes * entry.num_tokens
            seconds = flops * self._per_flop_s + moved * self._per_byte_s
            share = RequestCost(round(device_ns * (seconds / whole_s)), round(flops), round(moved))
            left.take(share)
            request_cost.add(share)
        # What rounding left over is the others' or, where all have asked, the last one's.
        (self.others if len(asked) < len(rows) else asked[-1][1]).add(left)

    def _of(self, row: str) -> RequestCost | None:
        found = self._open.get(row)
        if found is None and BEAM_MARK in row:
            found = self._open.get(row.partition(BEAM_MARK)[0])
        return found
