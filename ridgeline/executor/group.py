"""How does a group of ranks run a step? Each gets the plan, and rank 0, which is here, runs it too.

Every rank samples for itself: logits are gathered with the same bits, and the noise is a function
of seed, position and token. So ranks send nothing back, and the answer of rank 0 is that of all.
In a wave each group of ranks gets its own part of the plan, and its first rank says what came of
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ridgeline.distributed.agreement import Digest
from ridgeline.distributed.links import Ranks
from ridgeline.distributed.messages import (
    Command,
    ExchangeExperts,
    Prepare,
    Score,
    step_message,
)
from ridgeline.distributed.wave import Wave
from ridgeline.errors import EngineFault
from ridgeline.executor.expert_balance import ExpertBalance
from ridgeline.executor.future import Failed
from ridgeline.executor.local import LocalExecutor
from ridgeline.executor.scorer import Scorer
from ridgeline.executor.warm_up import WarmUp
from ridgeline.step import KnowsEnd, StepFuture, StepPlan, StepResult, WaveCutter


class WaveExecutor(LocalExecutor):
    """Runs the part of each step that one group of ranks has. No step is captured and nothing is
    drafted."""

    def _run(self, plan: StepPlan) -> StepFuture:
        future = super()._run(plan)
        if not plan.scheduled:  # the others wait for this group's experts all the same
            decoder = self._decoder
            shape = (0, decoder.spec.hidden_size)
            no_TE = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
            for layer in self.experts:
                layer.of(no_TE)
        return future


class GroupExecutor:
    """A step that fails on one rank leaves the others in the middle of it: EngineLost."""

    def __init__(
        self,
        inner: LocalExecutor,
        ranks: Ranks,
        wave: Wave | None = None,
        balance: ExpertBalance | None = None,
    ) -> None:
        self.inner, self.balance = inner, balance
        self.num_blocks = inner.num_blocks
        self.block_size = inner.block_size
        self._ranks, self._wave = ranks, wave
        self._digest = Digest()
        self._cutter = None if wave is None else WaveCutter(wave.groups)
        self._known = 0  # the last step whose result was asked for
        ranks.started()

    def submit(self, plan: StepPlan) -> StepFuture:
        ranks = self._ranks
        ranks.check()
        if self.balance is not None and (due := self.balance.next()) is not None:
            self._exchange(self.balance, *due)
        with ranks.waiting():
            own = self._send(plan)
            ranks.whereabouts.begin(plan.step_id)
            future = self.inner.submit(own)
        if isinstance(future, Failed):
            ranks.raise_lost(future.cause)
        others = 0 if self._wave is None else self._wave.groups - 1
        return GroupFuture(future, ranks, plan.step_id, others, self._has_come, self._digest)

    def _has_come(self, step_id: int) -> None:
        self._known = max(self._known, step_id)

    def _exchange(self, balance: ExpertBalance, at: int, pairs: Sequence[tuple[int, int]]) -> None:
        """A rank that ends meanwhile ends the group, as in a step."""
        ranks = self._ranks
        ranks.send(ExchangeExperts(at, tuple(pairs)))
        try:
            with ranks.waiting():
                moved = self.inner.exchange_experts(at, pairs)
            ranks.check()
        except (EngineFault, RuntimeError) as error:
            ranks.raise_lost(str(error).partition("\n")[0])
            raise
        balance.done(at, pairs, moved=moved)

    def _send(self, plan: StepPlan) -> StepPlan:
        """To each of the others its part of it; returns that of rank 0."""
        ranks, wave = self._ranks, self._wave
        if wave is None or self._cutter is None:
            ranks.send(step_message(plan, self._known))
            return plan
        parts = self._cutter.cut(plan)
        messages: list[Command] = [step_message(part, self._known) for part in parts]
        ranks.send_each([messages[rank // wave.width] for rank in range(wave.size)])
        return parts[0]


class GroupFuture:
    """`others`: groups of ranks that say themselves what came of their parts. `has_come` is told
    of the step when its result is asked for; `digest` is of all tokens of rank 0."""

    def __init__(
        self,
        inner: StepFuture,
        ranks: Ranks,
        step_id: int,
        others: int,
        has_come: Callable[[int], None],
        digest: Digest,
    ) -> None:
        self._inner, self._ranks, self._digest = inner, ranks, digest
        self._step_id, self._others, self._has_come = step_id, others, has_come

    def is_over(self) -> bool:
        is_here = self._ranks.results.has(self._step_id, self._others)
        return is_here and isinstance(self._inner, KnowsEnd) and self._inner.is_over()

    def result(self) -> StepResult:
        self._has_come(self._step_id)
        try:
            with self._ranks.waiting():
                mine, ranks = self._inner.result(), self._ranks
                if (digest := self._digest.add(self._step_id, mine)) is not None:
                    ranks.sampled(self._step_id, digest)
                ranks.check()  # what is abandoned gives something, too
                if not self._others:
                    return mine
                ranks.results.add(self._step_id, 0, mine)
                return ranks.result(self._step_id, self._others + 1)
        except EngineFault as fault:
            self._ranks.raise_lost(str(fault))
            raise


class GroupWarmUp:
    """A WarmUp of which every rank does each step; `draft_tokens` as of it."""

    def __init__(self, inner: WarmUp, ranks: Ranks, draft_tokens: Sequence[int] = ()) -> None:
        self._inner, self._ranks, self._draft_tokens = inner, ranks, tuple(draft_tokens)
        self.text, self.run = inner.text, partial(inner.run, one=self.one)

    def one(self) -> bool:
        """As WarmUp.one. How long one takes nobody knows: kernels may be compiled."""
        self._ranks.check()
        self._ranks.preparing()
        self._ranks.send(Prepare(self._draft_tokens))
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
                found = self._inner.logits(token_ids)
            self._ranks.check()
            return found
        except RuntimeError as error:
            self._ranks.raise_lost(str(error))
            raise
