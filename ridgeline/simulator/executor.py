"""What does a step take and give on a machine that is only a price? Time, and known tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import cast

import msgspec

from ridgeline.clock import Rng, VirtualClock
from ridgeline.cost.captured import MAX_VERIFIED_TOKENS
from ridgeline.cost.pricer import Pricer
from ridgeline.errors import ConfigError
from ridgeline.speculation.price import Drafter, Target
from ridgeline.step import (
    ScheduledRequest,
    StepPlan,
    StepPricer,
    StepResult,
    StepShape,
    WaveCutter,
)


class Answer(msgspec.Struct, gc=False):
    """What a request will be answered: `token_ids`, then `filler` for as long as it asks."""

    num_prompt: int
    token_ids: tuple[int, ...] = ()
    filler: int = 0
    filled: tuple[int, ...] = ()  # one of them

    def __post_init__(self) -> None:
        self.filled = (self.filler,)

    def tokens(self, first: int, count: int) -> tuple[int, ...]:
        """Its tokens `first` .. `first + count - 1`."""
        if first >= len(self.token_ids):
            return self.filled if count == 1 else (self.filler,) * count
        known = self.token_ids[first : first + count]
        return known + (self.filler,) * (count - len(known))


NOBODY = Answer(0)  # a row that has ended with a step in flight: nobody reads what it gives


@dataclass(frozen=True, slots=True)
class Speculation:
    """A draft method with `num_drafts` drafts a step.

    `accepted[i]` is the chance that draft i is right when all before it were. `draft_seconds` is
    the time of making `num_drafts` drafts for the rows of a step, added to the step's own;
    `drafter` is that of the drafts that a step checks. `is_chosen`: a step checks as many as pay,
    at most `num_drafts` of a row, and of all rows together what makes `max_verified_tokens`.
    """

    num_drafts: int
    accepted: tuple[float, ...]
    draft_seconds: Callable[[StepShape], float] | None = None
    drafter: Drafter | None = None
    is_chosen: bool = False
    max_verified_tokens: int = MAX_VERIFIED_TOKENS["gpu"]

    def __post_init__(self) -> None:
        if self.num_drafts < 1 or len(self.accepted) < self.num_drafts:
            raise ConfigError(f"{self.num_drafts} drafts a step need as many acceptance rates")
        if not all(0 <= chance <= 1 for chance in self.accepted):
            raise ConfigError(f"acceptance rates are between 0 and 1, not {self.accepted}")

    @classmethod
    def even(
        cls,
        num_drafts: int,
        acceptance: float,
        draft_seconds: Callable[[StepShape], float] | None = None,
    ) -> Speculation:
        """Every draft is right with the same chance."""
        return cls(num_drafts, (acceptance,) * num_drafts, draft_seconds)

    @classmethod
    def from_curve(
        cls,
        num_drafts: int,
        lengths: Sequence[float],
        draft_seconds: Callable[[StepShape], float] | None = None,
    ) -> Speculation:
        """`lengths[k - 1]` tokens come from a step with k drafts on average, the sampled one
        included: draft k is reached and right in lengths[k - 1] - lengths[k - 2] of the steps."""
        reached, chances = 1.0, []
        for before, after in zip((1.0, *lengths), lengths, strict=False):
            right = min(reached, max(0.0, after - before))
            chances.append(right / reached if reached > 0 else 0.0)
            reached = right
        return cls(num_drafts, tuple(chances), draft_seconds)

    def num_accepted(self, num_draft_tokens: int, rng: Rng) -> int:
        for i in range(num_draft_tokens):
            if rng.random() >= self.accepted[i]:
                return i
        return num_draft_tokens


class Span(msgspec.Struct, frozen=True, gc=False):
    """When the device worked on one step."""

    start_s: float
    end_s: float


class SimulatedFuture(msgspec.Struct, frozen=True, gc=False):
    plan: StepPlan
    span: Span
    executor: SimulatedExecutor

    def result(self) -> StepResult:
        """What the step gave. To be called when the clock has come to its end."""
        self.executor.spans.popleft()
        return self.executor.result_of(self.plan)


@dataclass(slots=True)
class SimulatedExecutor:
    """Executes plans in no time of ours and `pricer.seconds` of the clock's.

    A step starts when it is submitted or when the one before it has ended, whichever is later. With
    `stages` that holds for each of them, which has its own price and waits for what the one before
    it has sent; the first waits for the tokens of the steps that its own follow on.
    With several `pools` of blocks a step is a wave, and lasts as long as its slowest part.
    `computes_in_submit`: the caller of `submit` waits until it (or its first stage) has ended.
    `answers` is filled by whoever adds requests. Ghosts are rows that have ended in a batch whose
    size does not change: each costs as much as the longest living one.
    """

    pricer: StepPricer
    clock: VirtualClock
    num_blocks: int
    block_size: int
    computes_in_submit: bool = False
    speculation: Speculation | None = None
    rng: Rng | None = None
    answers: dict[str, Answer] = field(default_factory=dict)
    num_ghosts: int = 0
    stages: tuple[StepPricer, ...] = ()
    sent_s: Callable[[int], float] = lambda num_tokens: 0.0
    returned_s: Callable[[int], float] = lambda num_rows: 0.0
    pools: int = 1
    stages_until: list[float] = field(init=False)  # when each is done with all it has been given
    returned_at: deque[float] = field(init=False)  # tokens of the last steps, the oldest first
    busy_until: float = 0.0
    spans: deque[Span] = field(default_factory=deque)  # of steps in flight, the oldest first
    _num_sampled: dict[str, int] = field(default_factory=dict)  # by row, with drafts alone
    _drafted: dict[int, StepResult] = field(default_factory=dict)
    _prices_logits: bool = field(init=False)
    _cutter: WaveCutter = field(init=False)

    def __post_init__(self) -> None:
        self._prices_logits = isinstance(self.pricer, Target)  # a slow question
        self._cutter = WaveCutter(self.pools)
        self.stages_until = [0.0] * len(self.stages)
        self.returned_at = deque([0.0] * len(self.stages), len(self.stages) or None)

    def submit(self, plan: StepPlan) -> SimulatedFuture:
        if self.stages:
            span, free = self._pass(plan), self.stages_until[0]
        else:
            seconds = self._seconds_of(plan)
            if self.speculation is not None:
                seconds += self._draft(plan, self.speculation) + self._more_logits(plan, seconds)
            start = max(self.clock.now(), self.busy_until)
            free = start + seconds
            span = Span(start, free)
        self.busy_until = span.end_s
        self.spans.append(span)
        if self.computes_in_submit:
            self.clock.advance_to(free)
        return SimulatedFuture(plan, span, self)

    def _pass(self, plan: StepPlan) -> Span:
        """Through all stages, and back."""
        shape, until = self._filled(plan.shape), self.stages_until
        num_sampled = sum([entry.samples for entry in plan.scheduled])
        sent_s = self.sent_s(sum([new for new, _ in shape]))
        start = came = max(self.clock.now(), until[0], self.returned_at[0])
        for n, stage in enumerate(self.stages):
            until[n] = max(came, until[n]) + stage.seconds(shape)
            came = until[n] + sent_s
        end = until[-1] + self.returned_s(num_sampled)
        self.returned_at.append(end if num_sampled else 0.0)
        return Span(start, end)

    def leap(self, spans: Iterable[Span], busy_until: float) -> None:
        """Many steps later: `spans` are those in flight now."""
        self.busy_until = busy_until
        self.spans.clear()
        self.spans.extend(spans)

    def seconds(self, shape: StepShape) -> float:
        """Of a step, with the rows that only fill the batch."""
        return self.pricer.seconds(self._filled(shape))

    def _filled(self, shape: StepShape) -> StepShape:
        if not self.num_ghosts or not shape:
            return shape
        return shape + ((1, max(context for _, context in shape)),) * self.num_ghosts

    def _seconds_of(self, plan: StepPlan) -> float:
        if self.pools > 1:
            parts = [part.shape for part in self._cutter.cut(plan)]
            if not self.num_ghosts and isinstance(self.pricer, Pricer):
                return self.pricer.wave_seconds(parts)
        elif not self.num_ghosts and isinstance(self.pricer, Pricer):
            if plan.decodes is not None:
                return self.pricer.decodes_seconds(plan.decodes.starts)
            return self.pricer.seconds(plan.shape)
        return self.seconds(plan.shape)

    def decode_times(self, contexts: Sequence[int]) -> Iterator[float]:
        """Of steps that compute one token after each context, then the next, and so on."""
        if self.num_ghosts:
            contexts = (*contexts, *[max(contexts)] * self.num_ghosts)
        if isinstance(self.pricer, Pricer):
            return self.pricer.each_decode(contexts)
        return self._each_step(contexts)

    def _each_step(self, contexts: Sequence[int]) -> Iterator[float]:
        for step in count():
            yield self.pricer.seconds(tuple((1, context + step) for context in contexts))

    def result_of(self, plan: StepPlan) -> StepResult:
        if self.speculation is not None:
            return self._drafted.pop(plan.step_id)
        answers, sampled = self.answers, dict[str, tuple[int, ...]]()
        for entry in plan.scheduled:
            if entry.samples:
                name = entry.request_id
                answer = answers.get(name, NOBODY)
                if answer.token_ids:
                    first = entry.start + entry.num_tokens - answer.num_prompt
                    sampled[name] = answer.tokens(first, 1)
                else:
                    sampled[name] = answer.filled
        return StepResult(sampled)

    def forget(self, request_id: str) -> None:
        """It has ended."""
        self.answers.pop(request_id, None)
        self._num_sampled.pop(request_id, None)

    # ------------------------------------------------------------------ drafts

    def _draft(self, plan: StepPlan, speculation: Speculation) -> float:
        """Decide at once what is accepted; the extra seconds for making the next drafts."""
        counts = self._num_sampled
        for new in plan.new:
            counts[new.request_id] = len(new.token_ids) - new.num_prompt_tokens
        tokens: dict[str, tuple[int, ...]] = {}
        verified: dict[str, tuple[int, int]] = {}
        for entry in plan.scheduled:
            if entry.samples:
                count = 1 + self._num_accepted(entry, speculation)
                if entry.num_draft:
                    verified[entry.request_id] = (entry.num_draft, count - 1)
                first = counts.get(entry.request_id, 0)
                answer = self.answers.get(entry.request_id, NOBODY)
                tokens[entry.request_id] = answer.tokens(first, count)
                counts[entry.request_id] = first + count
        drafts: Mapping[str, tuple[int, ...]] = dict.fromkeys(tokens, (0,) * speculation.num_drafts)
        self._drafted[plan.step_id] = StepResult(tokens, dict(drafts), verified=verified)
        rows = tuple((1, e.start) for e in plan.scheduled if e.samples)
        if speculation.drafter is not None:
            return _drafting_s(plan, speculation.drafter)
        draft_seconds = speculation.draft_seconds
        return draft_seconds(rows) if draft_seconds is not None and rows else 0.0

    def _more_logits(self, plan: StepPlan, seconds: float) -> float:
        """Each draft needs a row of logits too."""
        num_draft_tokens = sum([entry.num_draft for entry in plan.scheduled])
        if not num_draft_tokens or not self._prices_logits:
            return 0.0
        num_logits = num_draft_tokens + len(plan.scheduled)
        target = cast("Target", self.pricer)
        whole_s = target.seconds_of(target.features(plan.shape), num_logits)
        return max(0.0, whole_s - seconds)

    def _num_accepted(self, entry: ScheduledRequest, speculation: Speculation) -> int:
        if not entry.num_draft or self.rng is None:
            return 0
        return speculation.num_accepted(entry.num_draft, self.rng)


def _drafting_s(plan: StepPlan, drafter: Drafter) -> float:
    """Of the drafts that this step checks."""
    rows = [entry for entry in plan.scheduled if entry.num_draft]
    if not rows:
        return 0.0
    context = sum([entry.start for entry in rows]) // len(rows)
    return drafter.seconds(len(rows), context, max([entry.num_draft for entry in rows]))
