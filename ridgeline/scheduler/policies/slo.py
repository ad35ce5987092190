"""Keep what was promised to those admitted: a first token in time, then one every so often.

Three decisions follow from the price of a step. Its size: as many prompt tokens as leave the step
shorter than the time promised per token. The order: the nearest deadline first, of those that can
still be met. Admission: a request that would have to wait too long, or would make one that is
already waiting late, is refused at once and told when to come back.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from ridgeline.errors import ConfigError
from ridgeline.log import say
from ridgeline.request import Request
from ridgeline.scheduler.policies.base import Admit, Policy, PolicySetting, Rank, Refuse
from ridgeline.scheduler.policies.forecast import Speed, Waiter, first_tokens, largest, speed_of
from ridgeline.step import StepPricer, StepShape

HEADROOM = 0.9  # share of a promise that is planned with
STRETCH = 2.0  # a long prompt is promised this many times what it takes alone
LEAST_STEP = 1.25  # decode steps of one request: a promise below that cannot be kept
TYPICAL_ANSWER = 256  # tokens, until some have been seen
SPEED_LASTS = 64  # budgets, after which the speed is worked out again
CONTEXT_STEP = 1.25  # and whenever the typical context has changed by this factor

BEGUN, IN_TIME, LATE = 0.0, 1.0, 2.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """An admitted request. `prompt_s`: what its prompt takes alone; `has_begun`: its prompt was
    read once, so its next token is due, not its first."""

    request: Request
    prompt_s: float
    promised_s: float
    has_begun: bool = False

    @property
    def deadline(self) -> float:
        return self.request.arrival_time + self.promised_s

    @property
    def plan_for(self) -> float:
        return self.request.arrival_time + HEADROOM * self.promised_s

    @property
    def left_s(self) -> float:
        """What is left of its prompt, alone."""
        request = self.request
        return self.prompt_s * request.num_pending_tokens / len(request.prompt_token_ids)

    def rank(self, now: float) -> Rank:
        if self.has_begun:
            return (BEGUN, self.request.arrival_time)
        return (IN_TIME if now + self.left_s <= self.deadline else LATE, self.deadline)


class _Mean:
    """A mean that forgets slowly."""

    def __init__(self, value: float, memory: int = 64) -> None:
        self.value = value
        self._num, self._memory = 0, memory

    def add(self, value: float) -> None:
        self._num = min(self._num + 1, self._memory)
        self.value += (value - self.value) / self._num


class SLO(Policy):
    """Promises a first token within `ttft_s` (longer for prompts that alone take most of it) and
    the later ones at a mean distance of `tpot_s`. Sizes are those of the engine around it."""

    needs_promise = True

    def __init__(
        self,
        pricer: StepPricer,
        *,
        ttft_s: float,
        tpot_s: float,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_cache_tokens: int,
    ) -> None:
        self.pricer = pricer
        self.ttft_s, self.tpot_s = ttft_s, tpot_s
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_cache_tokens = num_cache_tokens
        self.num_refused = 0
        self._open: dict[str, _Open] = {}
        self._prompt, self._answer = _Mean(0.0), _Mean(TYPICAL_ANSWER)  # tokens
        self._cached = _Mean(0.0)  # share of a prompt
        self._draft = max_num_batched_tokens
        self._speed: Speed | None = None
        self._speed_context, self._speed_age = 0, 0

    @classmethod
    def make(cls, setting: PolicySetting) -> Self:
        """Raises ConfigError without both promises or without prices."""
        ttft_s, tpot_s, pricer = setting.ttft_slo_s, setting.tpot_slo_s, setting.pricer
        if ttft_s is None or tpot_s is None:
            raise ConfigError("policy slo needs a promise: give ttft_slo_ms and tpot_slo_ms")
        if pricer is None:
            raise ConfigError("policy slo needs to know what a step costs on this device")
        if (least_s := pricer.seconds(((1, 1),))) > tpot_s:
            say(
                logger,
                logging.WARNING,
                "the promise per token cannot be kept even for one request alone",
                promised_ms=f"{tpot_s * 1e3:.3g}",
                expected_ms=f"{least_s * 1e3:.3g}",
            )
        return cls(
            pricer,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            num_cache_tokens=setting.num_cache_tokens,
        )

    # ------------------------------------------------------------------ order

    def rank(self, request: Request, now: float) -> Rank:
        return (self._open.get(_name(request)) or self._opened(request)).rank(now)

    def _opened(self, request: Request) -> _Open:
        prompt_s = self.pricer.seconds(((len(request.prompt_token_ids), 0),))
        return _Open(request, prompt_s, max(self.ttft_s, STRETCH * prompt_s))

    # ------------------------------------------------------------------ the size of a step

    def token_budget(self, running: Collection[Request], now: float) -> int | None:
        decodes, chunks = self._split(running)
        seated = {_name(request) for request in running}
        waiting = [entry for name, entry in self._open.items() if name not in seated]
        if not chunks and not waiting:
            return None
        speed = self._current_speed()
        slots = max(0, speed.num_rows - len(decodes) - len(chunks))
        coming = heapq.nsmallest(slots, waiting, key=lambda entry: entry.rank(now))
        wanted = sum(chunk.num_pending_tokens for chunk in chunks)
        wanted += sum(self._num_to_read(entry.request) for entry in coming)
        most = min(wanted, self.max_num_batched_tokens - len(decodes))
        before = chunks[0].num_computed_tokens if chunks else 0
        return max(1, len(decodes) + self._largest_chunk(decodes, before, most, speed.step_s))

    def _split(self, running: Iterable[Request]) -> tuple[list[tuple[int, int]], list[Request]]:
        """The decoding rows as they enter a shape, and those whose prompt is being read."""
        decodes: list[tuple[int, int]] = []
        chunks: list[Request] = []
        for request in running:
            if request.num_pending_tokens > 1:
                chunks.append(request)
                continue
            decodes.append((1, request.num_computed_tokens))
            if (entry := self._open.get(_name(request))) is not None:
                entry.has_begun = True
        return decodes, chunks

    def _largest_chunk(
        self, decodes: Sequence[tuple[int, int]], before: int, most: int, step_s: float
    ) -> int:
        """Prompt tokens beside `decodes` in a step of `step_s`; all, where nobody is decoded."""
        if not decodes or most <= 0:
            return max(most, 0)
        rows: StepShape = tuple(decodes)
        seconds = self.pricer.seconds
        chunk = largest(most, self._draft, lambda n: seconds((*rows, (n, before))) <= step_s)
        self._draft = max(chunk, 1)
        return chunk

    # ------------------------------------------------------------------ admission

    def admit(self, request: Request, now: float) -> Admit | Refuse:
        entry = self._opened(request)
        late_s = self._lateness(entry, now)
        if late_s > 0:
            self.num_refused += 1
            return Refuse(late_s, "the promised time to the first token could not be kept")
        self._open[request.request_id] = entry
        self._prompt.add(len(request.prompt_token_ids))
        return Admit()

    def _lateness(self, entry: _Open, now: float) -> float:
        """Seconds by which it would be late, or would make another late that else is in time.

        Those who are late already come after it, yet count as if they came before: else newcomers
        would take every gap, and the late would wait for ever.
        """
        ahead = [e for e in self._open.values() if not e.has_begun]
        times = self._first_tokens([*ahead, entry], now)
        late_s = times[id(entry)] - entry.plan_for
        if any(times[id(e)] > e.deadline for e in ahead):
            before = self._first_tokens(ahead, now)
            for other in ahead:
                if before[id(other)] <= other.deadline:
                    late_s = max(late_s, times[id(other)] - other.deadline)
        return late_s

    def _first_tokens(self, entries: Iterable[_Open], now: float) -> dict[int, float]:
        """When each of these, who wait or are being read, will have its first token; by id()."""
        speed = self._current_speed()
        begun = [e.request for e in self._open.values() if e.has_begun]
        order = sorted(entries, key=lambda e: (e.request.num_computed_tokens == 0, e.deadline))
        line = [
            Waiter(
                self._num_to_read(e.request),
                e.left_s,
                self._num_to_make(e.request) * speed.token_s,
            )
            for e in order
        ]
        ends = [now + self._num_to_make(request) * speed.token_s for request in begun]
        times = first_tokens(speed, now + self._current_step(begun, line), ends, line)
        return {id(e): at for e, at in zip(order, times, strict=True)}

    def _current_step(self, begun: Sequence[Request], line: Sequence[Waiter]) -> float:
        """Seconds until a newcomer can be part of a step: the one that runs is in the way."""
        if not begun:
            return 0.0
        if len(line) > 1:
            return self._current_speed().step_s
        return self.pricer.seconds(tuple((1, request.num_computed_tokens) for request in begun))

    # ------------------------------------------------------------------ what is known of requests

    def _num_to_read(self, request: Request) -> int:
        """Tokens of its prompt that it will have to compute; a draft where the cache may help."""
        if request.num_computed_tokens:
            return request.num_pending_tokens
        if request.fork_of is not None and request.fork_of in self._open:
            return 1
        return max(1, round(len(request.token_ids) * (1 - self._cached.value)))

    def _num_to_make(self, request: Request) -> float:
        """Tokens still to come. An answer that is longer than usual goes on for a while."""
        most = request.max_num_tokens - len(request.token_ids)
        made = len(request.token_ids) - len(request.prompt_token_ids)
        usual = self._answer.value
        return max(1.0, min(most, max(usual - made, usual / 4)))

    def on_end(self, request: Request) -> None:
        """Learn from it how long answers are and how much the cache helps."""
        entry = self._open.pop(request.request_id)
        num_prompt = len(request.prompt_token_ids)
        if entry.has_begun:
            self._answer.add(len(request.token_ids) - num_prompt)
            self._cached.add(request.num_cached_tokens / num_prompt)

    def _current_speed(self) -> Speed:
        """For requests as they have been lately; worked out anew now and then."""
        context = max(1, round(self._prompt.value + self._answer.value / 2))
        self._speed_age += 1
        ratio = context / max(1, self._speed_context)
        if (
            self._speed is None
            or self._speed_age > SPEED_LASTS
            or not 1 / CONTEXT_STEP < ratio < CONTEXT_STEP
        ):
            self._speed = self._work_out_speed(context)
            self._speed_context, self._speed_age = context, 0
        return self._speed

    def _work_out_speed(self, context: int) -> Speed:
        whole = max(1.0, self._prompt.value + self._answer.value)
        by_cache = max(1, int(self.num_cache_tokens / whole))
        return speed_of(
            self.pricer,
            max(HEADROOM * self.tpot_s, LEAST_STEP * self.pricer.seconds(((1, context),))),
            context=context,
            most_rows=min(self.max_num_seqs, by_cache),
            most_tokens=self.max_num_batched_tokens,
            prompt_share=(1 - self._cached.value) * self._prompt.value / self._answer.value,
        )


def _name(request: Request) -> str:
    """What was admitted: a beam is part of the search that it forks."""
    return (request.sampling.beam_width > 1 and request.fork_of) or request.request_id
