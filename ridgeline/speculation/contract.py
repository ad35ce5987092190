"""What does a draft method have to do?

Letters: B rows of a step, N rows there is room for, M blocks per table row, g KV groups, k drafts
of a row, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.attention.layout import ForwardBatch
from ridgeline.kernels.drafts import History
from ridgeline.kernels.draw_rows import Draws


@dataclass(frozen=True, slots=True)
class DraftStep:
    """Rows whose next tokens are to be drafted; a captured step reads all of it anew.

    `rows_B` (int64) are their places among N, different from each other but for padding (row 0);
    `limits_B` (int64): how many drafts of each count; there may be no block for what lies behind
    them, so that keys and values of those go to the null block. `draws`: how drafts of models are
    drawn (None: all greedily); the keys are those of the request's own noise where drafts are
    checked against the token that this noise draws, and others where they are checked by their
    odds.
    """

    rows_B: torch.Tensor
    limits_B: torch.Tensor
    history: History
    tables_gNM: torch.Tensor  # int32
    block_size: int
    draws: Draws | None


class DraftMethod:
    """Draft tokens lie in `history` behind a row's tokens, and `found_N` says how many there are.

    Prompt lookup finds them at the end of the step before (`look_ahead`), so that the host learns
    with its result how many there are; a model makes them at the beginning of the step that
    verifies them (`draft`). Nothing here may wait for the device; on a captured step all of it is
    recorded once and replayed.
    """

    name: str
    max_draft_tokens: int  # draft tokens of one row in one step
    looks_ahead = False  # `look_ahead` finds the draft tokens; else `draft` makes them
    needs_tokens = False  # has a cache of its own: each computed token has to go through `follow`
    taps: tuple[int, ...] = ()  # layers of the target whose states it reads by `take_states`

    def draft(self, step: DraftStep, num_draft_tokens: int) -> torch.Tensor | None:
        """Draft so many tokens of each row, at least 1. The logits [B, k, V] that they were drawn
        from, in the serving dtype, valid until the step has ended; None: they were chosen, not
        drawn."""
        return None

    def look_ahead(self, step: DraftStep) -> None:
        """Leave up to `max_draft_tokens` tokens behind each row's own; `limits_B` is not asked."""

    def follow(self, batch: ForwardBatch) -> None:
        """These tokens are computed by a step that drafts nothing: prompts, or what a row has
        computed meanwhile."""

    def make_room(self, num_rows: int) -> None:
        """Rows have places below this number, from now on."""

    def take_states(
        self, tapped_nTE: torch.Tensor, batch: ForwardBatch, rows_T: torch.Tensor, history: History
    ) -> None:
        """A step of these tokens of these rows has run, and what came out is in the history.
        `tapped_nTE`: the target's states before the layers `taps`."""

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """These blocks (int64) of the model's cache are copied."""

    @property
    def num_bytes(self) -> int:
        """All that it keeps on the device beside the model: weights and cache."""
        return 0
