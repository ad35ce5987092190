"""What followed when the end of this text stood in it before? Prompt lookup drafts without a model.

Text that is repeated, quoted or edited is drafted well, all other hardly, at no cost but the step
that verifies. Sources of the ideas: Saxena, "Prompt Lookup Decoding", 2023; Oliaro et al.,
"SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", 2024; there is no tree
here, as all of a row is looked through in a few microseconds.
"""

from __future__ import annotations

import torch

from ridgeline.errors import check
from ridgeline.kernels.prompt_lookup import LookupRule, lookup, make_lookup_buffers
from ridgeline.speculation.contract import DraftMethod, DraftStep


class PromptLookup(DraftMethod):
    """By one rule, whatever its name. Draft tokens are chosen, not drawn."""

    looks_ahead = True

    def __init__(self, device: torch.device, max_rows: int, rule: LookupRule) -> None:
        """For steps of up to `max_rows` rows, padding included."""
        check(max_rows > 0 and rule.max_draft_tokens > 0, "rows and drafts", max_rows=max_rows)
        self.max_draft_tokens = rule.max_draft_tokens
        self._rule = rule
        self._room = make_lookup_buffers(device, max_rows)

    def look_ahead(self, step: DraftStep) -> None:
        lookup(step.rows_B, step.history, self._rule, self._room)

    @property
    def num_bytes(self) -> int:
        return self._room.num_bytes


class NGram(PromptLookup):
    """The longest match of the last 2 to 4 tokens, of equals the most recent, gives all draft
    tokens that are wanted."""

    name = "ngram"

    def __init__(self, device: torch.device, max_rows: int, max_draft_tokens: int) -> None:
        super().__init__(device, max_rows, LookupRule(2, 4, max_draft_tokens))


class Suffix(PromptLookup):
    """The longest match of the last 1 to 32 tokens, of equals the most recent, gives as many draft
    tokens as tokens match: the longer a passage has been repeated, the farther it is trusted, so
    that chance matches cost little and copies run at full length."""

    name = "suffix"

    def __init__(self, device: torch.device, max_rows: int, max_draft_tokens: int) -> None:
        super().__init__(device, max_rows, LookupRule(1, 32, max_draft_tokens, 1))
