"""What would speculation gain if drafts were right so often? For benchmarks alone.

Drafts cost nothing and are any tokens; whether one is right is a coin and not the model's word. So
what comes out is nobody's text, and no law holds for it: no command line offers this method.
"""

from __future__ import annotations

import torch

from ridgeline.errors import ConfigError
from ridgeline.kernels.drafts import put_drafts
from ridgeline.kernels.noise import uniforms
from ridgeline.speculation.contract import DraftMethod, DraftStep


class Synthetic(DraftMethod):
    """A DraftMethod whose drafts are right with probability `rate`, each for itself, if the
    executor draws the ids of its steps with `synthetic_ids`."""

    name = "synthetic"

    def __init__(
        self, rate: float, *, max_draft_tokens: int, max_rows: int, device: torch.device
    ) -> None:
        """For steps of up to `max_rows` rows. ConfigError for a rate that is no probability."""
        if not 0.0 <= rate <= 1.0:
            raise ConfigError(f"speculate synthetic:{rate:g}: the rate must be in 0 .. 1")
        self.rate = rate
        self.max_draft_tokens = max_draft_tokens
        self._ids = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def draft(self, step: DraftStep, num_draft_tokens: int) -> torch.Tensor | None:
        """What already lies behind a row's tokens is as good a draft as any; the last one is put
        there to say how many there are."""
        put_drafts(self._ids[: len(step.rows_B)], step.rows_B, step.history, num_draft_tokens - 1)
        return None

    @property
    def num_bytes(self) -> int:
        return self._ids.numel() * self._ids.element_size()


def synthetic_ids(
    ids_T: torch.Tensor,
    drafts_T: torch.Tensor,
    keys_T: torch.Tensor,
    positions_T: torch.Tensor,
    rate: float,
) -> torch.Tensor:
    """The ids [T] of a step of synthetic drafts: with probability `rate` the draft, else another.

    All are int64 [T]. `drafts_T` is the draft for the place of each id, -1 where there is none:
    then the id stays. `keys_T` and `positions_T` choose the coin, the same one every time; keys of
    different rows should differ. Nothing is waited for.
    """
    others_T = torch.where(ids_T == drafts_T, (drafts_T - 1).abs(), ids_T)  # 0 becomes 1
    if rate == 0.0:  # no coin: it would take longer than the check of a small model
        return others_T
    is_right_T = uniforms(keys_T, positions_T, 1)[:, 0] < rate
    return torch.where(is_right_T & (drafts_T >= 0), drafts_T, others_T)
