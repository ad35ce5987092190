"""What would guessing tokens change? The assumptions behind plans with speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Setup
from ridgeline.cost.speculation import DraftSteps, expected_tokens, head_spec
from ridgeline.step import StepShape

ACCEPTANCE = 0.7  # of each guess, when all before it were right: assumed, not measured


@dataclass(frozen=True, slots=True)
class Drafting:
    """A draft head of one layer guesses `num_drafts` tokens a step. As a pricer: of steps whose
    decodes carry their guesses, drafting included."""

    target: Pricer
    drafter: DraftSteps
    num_drafts: int

    @property
    def tokens_per_step(self) -> float:
        return expected_tokens(ACCEPTANCE, self.num_drafts)

    def seconds(self, shape: StepShape) -> float:
        decodes = [context for new, context in shape if new == 1]
        if not decodes:
            return self.target.seconds(shape)
        rows = 1 + self.num_drafts
        checked = tuple((rows, context) if new == 1 else (new, context) for new, context in shape)
        num_logits = len(shape) + self.num_drafts * len(decodes)
        return self.target.seconds(checked, num_logits) + self.draft_seconds(shape)

    def draft_seconds(self, shape: StepShape) -> float:
        """Guessing alone, for the rows of `shape` that make a token."""
        contexts = [context for _, context in shape]
        if not contexts:
            return 0.0
        mean = round(sum(contexts) / len(contexts))
        return self.drafter.seconds(len(contexts), mean, self.num_drafts)


def drafting(setup: Setup, target: Pricer, num_drafts: int) -> Drafting:
    """For a model that `target` prices."""
    head = Setup(
        head_spec(setup.spec), setup.device, setup.layout, setup.precision, setup.calibration
    )
    return Drafting(target, DraftSteps(Pricer(head)), num_drafts)
