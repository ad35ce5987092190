"""What became of the drafts of an engine's steps?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline.request import RequestOutput
from ridgeline.speculation.price import DraftPrices
from ridgeline.speculation.report import rows_taken
from ridgeline.step import Listener, StepPlan, StepResult


@dataclass(slots=True)
class Counts(Listener):
    """A journal of an engine: what became of the drafts of rows that decode. Steps are counted
    when somebody asks, as that takes the host a third of its time for a step of 256 rows, and 2 us
    of some 60 for one that checks eight drafts of one. Of many rows even what is kept until then
    takes long, so these are not to be counted while a clock runs."""

    steps: int = 0
    tokens: int = 0
    draft_tokens: int = 0  # that steps were planned with
    tried: list[int] = field(default_factory=list)  # by position: all before it were right
    right: list[int] = field(default_factory=list)
    by_drafts: dict[int, int] = field(default_factory=dict)  # of those steps, by their drafts
    context: int = 0  # tokens before them, all together
    answers: int = 0  # that have ended
    _kept: list[tuple[StepPlan, StepResult, Sequence[RequestOutput]]] = field(default_factory=list)

    def on_collect(
        self,
        plan: StepPlan,
        result: StepResult | None,
        outputs: Sequence[RequestOutput],
        error: str | None,
        now: float,
    ) -> None:
        if result is not None:
            self._kept.append((plan, result, outputs))

    def _take_in(self) -> None:
        kept, self._kept = self._kept, []
        for step in kept:
            self._add(*step)

    def _add(self, plan: StepPlan, result: StepResult, outputs: Sequence[RequestOutput]) -> None:
        self.answers += sum(output.finish_reason is not None for output in outputs)
        for row, got in rows_taken(plan, result, outputs):
            if row.num_tokens - row.num_draft != 1:
                continue
            self.steps += 1
            self.tokens += got.num_taken
            self.draft_tokens += row.num_draft
            self.by_drafts[row.num_draft] = self.by_drafts.get(row.num_draft, 0) + 1
            self.context += row.start
            if row.num_draft:
                self._count(got.num_looked, got.num_right)

    def _count(self, num_looked: int, num_right: int) -> None:
        while len(self.tried) < num_looked:
            self.tried.append(0)
            self.right.append(0)
        for place in range(num_looked):
            self.tried[place] += 1
            self.right[place] += place < num_right

    def figures(self) -> dict[str, Any]:
        """What is known of the steps since the start."""
        self._take_in()
        pairs = list(zip(self.right, self.tried, strict=True))
        return {
            "tokens_per_step": self.tokens / self.steps if self.steps else None,
            "drafts_per_step": self.draft_tokens / self.steps if self.steps else None,
            "by_position": [right / tried if tried else None for right, tried in pairs],
            "tried": list(self.tried),
        }

    def predicted_gain(self, prices: DraftPrices, batch: int) -> float | None:
        """Times the speed without drafts, of steps of so many rows: these tokens and numbers of
        drafts a step, at the prices of the cost model; of one row these answers, each from its
        first token to its last. None: there were no steps."""
        self._take_in()
        if not self.steps:
            return None
        context, tokens = round(self.context / self.steps), self.tokens / self.steps
        answers = self.answers if batch == 1 else 0
        seconds = sum(
            prices.seconds(batch, context, k, tokens, answers / self.steps) * steps
            for k, steps in self.by_drafts.items()
        )
        plain_s = prices.plain_seconds(batch, context, answers / self.tokens)
        return plain_s * self.tokens / seconds

    def restart(self) -> None:
        self._kept.clear()
        self.steps = self.tokens = self.draft_tokens = self.answers = 0
        self.tried, self.right = [], []
        self.by_drafts, self.context = {}, 0
