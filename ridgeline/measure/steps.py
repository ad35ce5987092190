"""How long do whole steps take? The real engine and scheduler, contexts of synthetic KV.

A decode step is timed as the engine lives: from one collected step to the next, with as many in
flight as it keeps. A step with a prompt in it is timed alone, from its plan to its tokens. What a
GPU does in a decode step is timed by its own clock too: of a small model the host takes longer.

What a step costs depends on how many tokens lie in the cache, not on what they are. So while
`is_skipping` is set, plans are answered here with made-up tokens, and a request's row is opened on
the real executor only when a plan comes that is to be computed: with the whole context as known
tokens, and with the blocks that it got meanwhile.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median, mode
from typing import Any

from ridgeline.build import Built, build
from ridgeline.config import EngineConfig
from ridgeline.cost.constants import HostConstants
from ridgeline.costing import engine_host
from ridgeline.engine import Engine
from ridgeline.errors import EngineFault, check
from ridgeline.formats import MAX_DRAFT_TOKENS
from ridgeline.measure.stopwatch import DeviceTimer, host_clock, open_device_timer
from ridgeline.request import Request, SamplingParams
from ridgeline.scheduler.scheduler import DraftLengths
from ridgeline.step import (
    Executor,
    Listener,
    NewRequest,
    StepFuture,
    StepPlan,
    StepRecord,
    StepResult,
    StepShape,
)

MADE_UP_TOKEN = 1


@dataclass(frozen=True, slots=True)
class _MadeUp:
    answer: StepResult

    def result(self) -> StepResult:
        return self.answer


@dataclass(slots=True)
class _Waiting:
    """A row that the executor does not have yet."""

    new: NewRequest
    tokens: list[int]
    blocks: list[list[int]]

    def opened(self) -> NewRequest:
        return replace(
            self.new,
            token_ids=tuple(self.tokens),
            block_ids=tuple(tuple(ids) for ids in self.blocks),
        )


class SyntheticKVExecutor:
    """The executor inside, except for the plans that are skipped. A request whose row is open
    there must not be scheduled by a skipped plan. What `timer` is set to times the others."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.num_blocks = inner.num_blocks
        self.block_size = inner.block_size
        self.is_skipping = False
        self.timer: DeviceTimer | None = None
        self._waiting: dict[str, _Waiting] = {}

    def submit(self, plan: StepPlan) -> StepFuture:
        for request_id in (*plan.preempted, *plan.finished):
            self._waiting.pop(request_id, None)
        if self.is_skipping:
            return self._skip(plan)
        named = {entry.request_id for entry in plan.scheduled}
        come = [self._waiting.pop(name).opened() for name in list(self._waiting) if name in named]
        whole = replace(plan, new=(*come, *plan.new)) if come else plan
        if self.timer is None:
            return self.inner.submit(whole)
        return self.timer.send(lambda: self.inner.submit(whole))

    def _skip(self, plan: StepPlan) -> StepFuture:
        if plan.preempted or plan.finished:
            self.inner.submit(replace(plan, scheduled=(), new=(), copies=())).result()
        for new in plan.new:
            blocks = [list(ids) for ids in new.block_ids]
            self._waiting[new.request_id] = _Waiting(new, list(new.token_ids), blocks)
        tokens: dict[str, tuple[int, ...]] = {}
        for entry in plan.scheduled:
            row = self._waiting[entry.request_id]
            for table, ids in zip(row.blocks, entry.new_block_ids, strict=False):
                table.extend(ids)
            if entry.samples:
                row.tokens.append(MADE_UP_TOKEN)
                tokens[entry.request_id] = (MADE_UP_TOKEN,)
        return _MadeUp(StepResult(tokens))


WARM_UP = 3  # steps of a series that are not counted
ANSWER_TOKENS = 40  # of an answer whose begin and end are told from its middle:
FIRST_STEPS, LAST_STEPS = 10, 3  # of it; in these the host's caches become warm, and it ends
MOST_LATE = 6  # steps of a series on the device alone that a host may send too late
PROMPT_IDS = 1000  # different token ids in prompts
DRAFT_TOKENS = (
    "synthetic:0"  # of an engine that is to check drafts: they cost nothing, and are wrong
)
RIGHT_DRAFTS = "synthetic:0.9"  # of one that is to choose their number
LOOK_UPS = "ngram"  # of one that looks drafts up


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of several steps that had (about) this shape."""

    shape: StepShape
    seconds: tuple[float, ...]


@dataclass(slots=True)
class StepBench(Listener):
    """Times steps of one engine. It must have been idle, and is idle again after each call.
    `most_alone`: tokens of the largest decode step that `alone` can time; 0: none."""

    engine: Engine
    synthetic: SyntheticKVExecutor
    vocabulary: int
    timer: DeviceTimer | None = None
    most_alone: int = 0
    rng: Random = field(default_factory=lambda: Random(0))
    records: list[StepRecord] = field(default_factory=list)
    num_added: int = 0

    def decode(self, num_requests: int, context: int, steps: int) -> StepTimes:
        """Steps in which `num_requests` requests of `context` tokens get one more each."""
        self._reach(num_requests, context, steps)
        for _ in range(WARM_UP + steps + 1):
            self.engine.step()
        times = [record.collected_at for record in self.records[WARM_UP - 1 :]]
        middle = self.records[len(self.records) // 2].plan.shape
        self._end()
        return StepTimes(middle, tuple(b - a for a, b in pairwise(times)))

    def check(
        self, num_requests: int, context: int, num_draft_tokens: int, steps: int
    ) -> StepTimes:
        """Steps that check so many drafts of each, none of which is right, where `context` tokens
        are before them. The engine must draft (`DRAFT_TOKENS`)."""
        with self._pinned(num_draft_tokens):
            return self.decode(num_requests, context, steps)

    def choosing(self, context: int, steps: int) -> tuple[float, float]:
        """Mean seconds of steps that check drafts of one request, whose number is chosen, and of
        others that check as many. The engine must draft, `RIGHT_DRAFTS` for one, and its steps
        must take the host longer than the device."""
        chosen_s, most = self._mean_of_verifying(context, steps)
        with self._pinned(most):
            given_s, _ = self._mean_of_verifying(context, steps)
        return chosen_s, given_s

    def _mean_of_verifying(self, context: int, steps: int) -> tuple[float, int]:
        """And how many drafts most of them check."""
        self._reach(1, context, (steps + 2 * WARM_UP) * (MAX_DRAFT_TOKENS + 1))
        for _ in range(WARM_UP + steps + 1):
            self.engine.step()
        times = [record.collected_at for record in self.records[WARM_UP - 1 :]]
        numbers = [max(new for new, _ in record.plan.shape) - 1 for record in self.records]
        self._end()
        return (times[-1] - times[0]) / (len(times) - 1), mode(numbers)

    def alone(
        self, num_requests: int, context: int, num_draft_tokens: int, steps: int
    ) -> StepTimes:
        """What the device does for such steps, drafting too if the engine makes drafts in them.
        Without any seconds where the host was never in time."""
        check(self.timer is not None, "the device has a clock of its own")
        with self._pinned(num_draft_tokens):
            self._reach(
                num_requests, context, (steps + MOST_LATE + WARM_UP) * (num_draft_tokens + 1)
            )
            for _ in range(WARM_UP):
                self._one_step()
            self.records.clear()
            seconds = self._timed(steps)
            if not self.records:
                raise EngineFault("no step came through while it was measured; see the log")
            middle = self.records[len(self.records) // 2].plan.shape
            self._end()
        return StepTimes(middle, seconds)

    def answers(self, context: int, num_answers: int) -> tuple[float, ...]:
        """Seconds that answers alone, one after the other, take more than as many steps like those
        in the middle of each, from the first token to the last; behind prompts of `context`
        tokens, which are computed anew."""
        found = []
        for _ in range(num_answers):
            self._add(context, ANSWER_TOKENS)
            while not self.engine.is_idle:
                self.engine.step()
            found.append(beside_steps([one.collected_at for one in self.records]))
            self._end()
        return tuple(found)

    def _timed(self, steps: int) -> tuple[float, ...]:
        """Seconds of the next steps, one by one; fewer where the host is too late again and again,
        as one that waits for the device would be with any pause."""
        self.synthetic.timer = timer = self.timer
        found: list[float] = []
        num_late = 0
        try:
            while timer is not None and len(found) < steps and num_late < MOST_LATE:
                self._one_step()
                if (seconds := timer.take()) is None:
                    num_late += 1
                else:
                    found.append(seconds)
        finally:
            self.synthetic.timer = None
        return tuple(found)

    @contextmanager
    def _pinned(self, num_draft_tokens: int) -> Iterator[None]:
        """An engine that drafts makes so many for each request."""
        scheduler = self.engine.scheduler
        chosen = scheduler.draft_lengths
        if chosen is not None:
            scheduler.draft_lengths = DraftLengths(num_draft_tokens)
        try:
            yield
        finally:
            scheduler.draft_lengths = chosen

    def prefill(self, num_tokens: int, repeats: int) -> StepTimes:
        """Steps that read one new prompt of `num_tokens`, which must fit in a step."""
        return self._alone([num_tokens], 0, 0, repeats)

    def mixed(self, num_tokens: int, num_requests: int, context: int, repeats: int) -> StepTimes:
        """Steps that read one prompt of `num_tokens` beside `num_requests` that decode."""
        return self._alone([num_tokens], num_requests, context, repeats)

    def _alone(
        self, prompts: list[int], num_requests: int, context: int, repeats: int
    ) -> StepTimes:
        found: list[StepRecord] = []
        for _ in range(repeats):
            self._reach(num_requests, context, 4)
            for length in prompts:
                self._add(length, 1)
            self._one_step()
            found.append(self.records[-1])
            self._end()
        seconds = tuple(record.collected_at - record.launched_at for record in found)
        return StepTimes(found[0].plan.shape, seconds)

    def _one_step(self) -> None:
        self.engine.launch()
        self.engine.collect()

    # -- getting there and away

    def _reach(self, num_requests: int, context: int, steps: int) -> None:
        """Requests that have just finished their prompts of `context` tokens; one step of theirs
        has been computed, so that their rows exist."""
        self.synthetic.is_skipping = True
        for _ in range(num_requests):
            self._add(context, steps + num_requests + 64)
        while any(
            request.num_computed_tokens < len(request.prompt_token_ids)
            for request in self.engine.scheduler.requests.values()
        ):
            self.engine.step()
        self._settle()
        self.synthetic.is_skipping = False
        if num_requests:
            self._one_step()
            self._one_step()
        self.records.clear()

    def _add(self, length: int, num_output: int) -> None:
        self.num_added += 1
        top = min(self.vocabulary, PROMPT_IDS)
        ids = tuple(self.rng.randrange(top) for _ in range(length))
        sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True, seed=0)
        self.engine.add(Request(f"measure-{self.num_added}", ids, sampling, 0.0))

    def _settle(self) -> None:
        while self.engine.num_in_flight:
            self.engine.collect()

    def _end(self) -> None:
        for request_id in list(self.engine.scheduler.requests):
            self.engine.abort(request_id)
        self._settle()
        self.engine.scheduler.blocks.clear_cache()
        self.records.clear()

    # -- the engine's observer

    def on_step(self, record: StepRecord) -> None:
        check(record.error is None, "a step failed while it was measured", why=record.error)
        self.records.append(record)


def beside_steps(times: Sequence[float]) -> float:
    """What the first and the last steps of an answer took more than those between. `times` of its
    tokens, one each."""
    gaps = [later - before for before, later in pairwise(times)]
    odd = gaps[:FIRST_STEPS] + gaps[-LAST_STEPS:]
    return sum(odd) - len(odd) * median(gaps[FIRST_STEPS:-LAST_STEPS])


def step_bench(built: Built) -> StepBench:
    """A bench on this engine, whose executor it wraps and whose clock it sets."""
    built.engine.clock = host_clock(built.device.torch_device, built.resolved.threads)
    synthetic = SyntheticKVExecutor(built.engine.executor)
    built.engine.executor = synthetic
    timer = open_device_timer(built.device.torch_device)
    most = engine_host(HostConstants(), built.resolved).captured_tokens
    bench = StepBench(
        built.engine, synthetic, built.spec.vocab_size, timer, 0 if timer is None else most
    )
    built.engine.listeners.append(bench)
    return bench


@contextmanager
def random_engine(config: Mapping[str, Any], **options: Any) -> Iterator[Built]:
    """An engine for this config.json with random weights; `options` are EngineConfig's."""
    with tempfile.TemporaryDirectory(prefix="ridgeline-") as folder:
        Path(folder, "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
        yield build(EngineConfig(model=folder, load_format="random", **options))
