"""What can be done before the first request, and in what order?

A step of a size that was not met before is launched twice and captured, which takes as long as many
steps, and compiles kernels where the disk has none. What any traffic will meet is known: two plain
prompts first, for all that is woken by its first use; then decode steps from the largest to the
smallest (so that they share memory), steps in which a chunk of prompts joins them, other prompts,
and the same decodes at temperatures. Where tokens are drafted, the decodes are those with drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch

from ridgeline.clock import WallClock
from ridgeline.executor.decode_graphs import Sampling
from ridgeline.executor.draft_graphs import DraftGraphs
from ridgeline.executor.local import LocalExecutor
from ridgeline.executor.mixed_graphs import DECODE_BUCKETS
from ridgeline.log import say
from ridgeline.request import SamplingParams
from ridgeline.step import NULL_BLOCK, NewRequest, ScheduledRequest, StepPlan

# Before the first request; a server does what is left while nothing runs, and where that is never
# so a step that compiles its kernels takes a second while all others wait. With kernels on the disk
# all of an 8B model takes 3 s on an H200, without them 20 to 40, once on a machine.
WARM_UP_S = 90.0
ROW = "warm-up"
FEW_ROWS = 8
NUMBERS_OF_DRAFTS = 4, 2, 1, 3, 6, 8  # the most useful first, where nobody knows
LONG_PROMPT, SHORT_PROMPT = 4096, 16

logger = logging.getLogger(__name__)


class WarmUp:
    """Foreseeable steps of an executor that runs nothing: of up to `max_tokens`, and up to
    `max_mixed` where prompts join decodes (None: as many). `draft_tokens`: how many of them a step
    may verify, the most useful number first. A failure ends it, or is raised if others take part
    in each step, who cannot go on."""

    def __init__(
        self,
        executor: LocalExecutor,
        *,
        max_tokens: int,
        max_mixed: int | None = None,
        draft_tokens: Sequence[int] = NUMBERS_OF_DRAFTS,
        can_give_up: bool = True,
    ) -> None:
        self._can_give_up = can_give_up
        steps = tuple(foreseen(executor, max_tokens, max_mixed, draft_tokens))
        self._clock = WallClock()
        self._coming = iter(steps)
        self._num_all = self._num_left = len(steps)
        self._seconds = 0.0

    def run(self, seconds: float, one: Callable[[], bool] | None = None) -> None:
        """Do what `seconds` allow, each by `one`; the last that is begun is done."""
        one = one or self.one
        while self._seconds < seconds and one():
            pass

    def one(self) -> bool:
        """Do one more; nothing may be in flight. False: there is none."""
        if (prepare := next(self._coming, None)) is None:
            return False
        begun = self._clock.now()
        try:
            with torch.inference_mode():
                prepare()
        except Exception as error:  # a request that needs it will say what is wrong
            if not self._can_give_up:
                raise
            self._coming = iter(())
            say(logger, logging.WARNING, "warm-up was given up", reason=repr(error)[:200])
        self._num_left -= 1
        self._seconds += self._clock.now() - begun
        if not self._num_left:
            say(logger, logging.INFO, "warm-up is over", steps=self._num_all,
                seconds=f"{self._seconds:.2f}")  # fmt: skip
        return True

    def text(self) -> str:
        return f"{self._num_all - self._num_left} of {self._num_all} foreseeable steps"


def foreseen(
    executor: LocalExecutor,
    max_tokens: int,
    max_mixed: int | None,
    draft_tokens: Sequence[int] = NUMBERS_OF_DRAFTS,
) -> Iterator[Callable[[], object]]:
    """In the order in which they are worth doing."""
    longest = min(max_tokens, executor.max_model_len - 1)
    for num_tokens in (LONG_PROMPT, SHORT_PROMPT):
        if num_tokens <= longest:
            yield partial(_read_prompt, executor, num_tokens)
    graphs, mixed = executor.decode_graphs, executor.mixed_graphs
    if executor.drafter is not None:
        yield from _checks(executor.drafter.graphs, draft_tokens)
    if graphs is not None:
        for bucket in reversed(graphs.buckets):
            yield partial(graphs.prepare, bucket, 0, Sampling.GREEDY)
    if mixed is not None:
        for least, room in _rooms(executor.most_captured_rows):
            most = max_tokens
            if max_mixed is not None and room:
                most = max(max_mixed, room + max_mixed // 4)
            for bucket in reversed(mixed.buckets):
                if least < bucket <= mixed.bucket_of(most):
                    yield partial(mixed.prepare, bucket, room)
    if graphs is not None:
        for bucket in reversed(graphs.buckets):
            yield partial(graphs.prepare, bucket, 0, Sampling.TEMPERATURES)


def _checks(graphs: DraftGraphs, draft_tokens: Sequence[int]) -> Iterator[Callable[[], object]]:
    """Of an engine that drafts: steps without drafts first; of those with, of few rows, where
    they pay."""
    for bucket in reversed(graphs.buckets):
        yield partial(graphs.prepare, bucket, 0, Sampling.GREEDY)
    drawn = Sampling.ODDS if graphs.has_odds else Sampling.TEMPERATURES
    for sampling, plain in ((Sampling.GREEDY, Sampling.GREEDY), (drawn, Sampling.TEMPERATURES)):
        for bucket in [b for b in reversed(graphs.buckets) if b <= FEW_ROWS]:
            for k in draft_tokens:
                if k <= graphs.most_drafts(bucket):
                    yield partial(graphs.prepare, bucket, k, sampling)
            yield partial(graphs.prepare, bucket, 0, plain)


def _rooms(most_rows: int) -> Sequence[tuple[int, int]]:
    """For so many decodes beside prompts: more than the first and up to the second number."""
    first, *rest = [(a, b) for a, b in pairwise(DECODE_BUCKETS) if a < most_rows] or [(0, 0)]
    return (first, (0, 0), *rest) if most_rows else (first,)


def _read_prompt(executor: LocalExecutor, num_tokens: int) -> None:
    """A prompt of zeros, sampled at a temperature, whose blocks are all the null block: nobody
    reads what it leaves there."""
    groups, size = executor.num_groups, executor.block_size
    blocks = ((NULL_BLOCK,) * -(-num_tokens // size),) * groups
    sampling = SamplingParams(max_tokens=1, seed=0)
    new = NewRequest(ROW, (0,) * num_tokens, num_tokens, sampling, blocks)
    entry = ScheduledRequest(ROW, 0, num_tokens, ((),) * groups, samples=True)
    executor.submit(StepPlan(0, (entry,), (new,))).result()
    executor.submit(StepPlan(0, (), finished=(ROW,))).result()
