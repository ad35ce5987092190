"""What became of the guesses of an engine's steps?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline.cost.speculation import GuessPrices
from ridgeline.observe.guesses import rows_taken
from ridgeline.request import Request, RequestOutput
from ridgeline.step import StepPlan, StepResult


@dataclass(slots=True)
class Counts:
    """A journal of an engine: what became of the guesses of rows that decode. To count takes a
    third of the host's time for a step of 256 rows, so steps of many rows are not to be counted
    while a clock runs."""

    steps: int = 0
    tokens: int = 0
    guesses: int = 0  # that steps were planned with
    tried: list[int] = field(default_factory=list)  # by position: all before it were right
    right: list[int] = field(default_factory=list)
    by_guesses: dict[int, int] = field(default_factory=dict)  # of those steps, by their guesses
    context: int = 0  # tokens before them, all together

    def on_add(self, request: Request, now: float, fault: object) -> None: ...

    def on_abort(self, request_id: str, now: float) -> None: ...

    def on_plan(self, plan: StepPlan, now: float) -> None: ...

    def on_submitted(self, plan: StepPlan, now: float) -> None: ...

    def on_collect(
        self,
        plan: StepPlan,
        result: StepResult | None,
        outputs: Sequence[RequestOutput],
        error: str | None,
        now: float,
    ) -> None:
        if result is not None:
            self._add(plan, result, outputs)

    def _add(self, plan: StepPlan, result: StepResult, outputs: Sequence[RequestOutput]) -> None:
        for row, got in rows_taken(plan, result, outputs):
            if row.num_tokens - row.num_draft != 1:
                continue
            self.steps += 1
            self.tokens += got.num_taken
            self.guesses += row.num_draft
            self.by_guesses[row.num_draft] = self.by_guesses.get(row.num_draft, 0) + 1
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
        pairs = list(zip(self.right, self.tried, strict=True))
        return {
            "tokens_per_step": self.tokens / self.steps if self.steps else None,
            "guesses_per_step": self.guesses / self.steps if self.steps else None,
            "by_position": [right / tried if tried else None for right, tried in pairs],
            "tried": list(self.tried),
        }

    def predicted_gain(self, prices: GuessPrices, batch: int) -> float | None:
        """Times the speed without guesses, of steps of so many rows: these tokens and numbers of
        guesses a step, at the prices of the cost model. None: there were no steps."""
        if not self.steps:
            return None
        context, tokens = round(self.context / self.steps), self.tokens / self.steps
        seconds = sum(
            prices.seconds(batch, context, k, tokens) * steps
            for k, steps in self.by_guesses.items()
        )
        return prices.plain_seconds(batch, context) * self.tokens / seconds

    def restart(self) -> None:
        self.steps = self.tokens = self.guesses = 0
        self.tried, self.right = [], []
        self.by_guesses, self.context = {}, 0
