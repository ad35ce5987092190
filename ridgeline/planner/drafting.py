"""What would guessing tokens change? The assumptions behind plans with speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Setup
from ridgeline.cost.speculation import (
    Acceptance,
    Drafter,
    DraftSteps,
    IndependentAcceptance,
    head_spec,
)
from ridgeline.formats import DRAFT_METHODS
from ridgeline.step import StepShape

ACCEPTANCE = DRAFT_METHODS["draft"].acceptance  # as an engine assumes it before it has measured


@dataclass(frozen=True, slots=True)
class Drafting:
    """`num_drafts` tokens are guessed a step, as many of them right as `acceptance` says. As a
    pricer: of steps whose decodes carry their guesses, drafting included."""

    target: Pricer
    drafter: Drafter
    num_drafts: int
    acceptance: Acceptance

    @property
    def tokens_per_step(self) -> float:
        return self.acceptance.tokens(self.num_drafts)

    @property
    def curve(self) -> tuple[float, ...]:
        """Tokens of a step by its number of guesses, from 1."""
        return tuple(self.acceptance.tokens(k) for k in range(1, self.num_drafts + 1))

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
    """For a model that `target` prices: guesses of a head of one layer."""
    head = Setup(
        head_spec(setup.spec), setup.device, setup.layout, setup.precision, setup.calibration
    )
    assumed = IndependentAcceptance(ACCEPTANCE)
    return Drafting(target, DraftSteps(Pricer(head)), num_drafts, assumed)
