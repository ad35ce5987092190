"""How does a group of ranks run a step? Each gets the plan, and rank 0, which is here, runs it too.

Every rank samples for itself: logits are gathered with the same bits, and the noise is a function
of seed, position and token. So ranks send nothing back, and the answer of rank 0 is that of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ridgeline.distributed.links import Ranks
from ridgeline.distributed.messages import Prepare, Score, step_message
from ridgeline.errors import EngineFault
from ridgeline.executor.future import Failed
from ridgeline.executor.local import LocalExecutor
from ridgeline.executor.scorer import Scorer
from ridgeline.executor.warm_up import WarmUp
from ridgeline.step import KnowsEnd, StepFuture, StepPlan, StepResult


class GroupExecutor:
    """A step that fails on one rank leaves the others in the middle of it: EngineLost."""

    def __init__(self, inner: LocalExecutor, ranks: Ranks) -> None:
        self.inner = inner
        self.num_blocks = inner.num_blocks
        self.block_size = inner.block_size
        self._ranks = ranks
        ranks.started()

    def submit(self, plan: StepPlan) -> StepFuture:
        ranks = self._ranks
        ranks.check()
        with ranks.waiting():
            ranks.send(step_message(plan))
            ranks.whereabouts.begin(plan.step_id)
            future = self.inner.submit(plan)
        if isinstance(future, Failed):
            ranks.raise_lost(future.cause)
        return GroupFuture(future, ranks)


class GroupFuture:
    def __init__(self, inner: StepFuture, ranks: Ranks) -> None:
        self._inner, self._ranks = inner, ranks

    def is_over(self) -> bool:
        return self._inner.is_over() if isinstance(self._inner, KnowsEnd) else False

    def result(self) -> StepResult:
        try:
            with self._ranks.waiting():
                return self._inner.result()
        except EngineFault as fault:
            self._ranks.raise_lost(str(fault))
            raise


class GroupWarmUp:
    """A WarmUp of which every rank does each step."""

    def __init__(self, inner: WarmUp, ranks: Ranks) -> None:
        self._inner, self._ranks = inner, ranks
        self.text, self.run = inner.text, partial(inner.run, one=self.one)

    def one(self) -> bool:
        """As WarmUp.one. How long one takes nobody knows: kernels may be compiled."""
        self._ranks.check()
        self._ranks.send(Prepare())
        try:
            return self._inner.one()
        except Exception as error:
            self._ranks.raise_lost(repr(error)[:200])
            raise


class GroupScorer:
    """A Scorer of a model that several ranks share."""

    def __init__(self, inner: Scorer, ranks: Ranks) -> None:
        self._inner, self._ranks = inner, ranks

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """As Scorer.logits."""
        self._inner.check(token_ids)
        self._ranks.check()
        self._ranks.send(Score(tuple(token_ids)))
        try:
            with self._ranks.waiting():
                return self._inner.logits(token_ids)
        except RuntimeError as error:
            self._ranks.raise_lost(str(error))
            raise
