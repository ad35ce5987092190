"""What do the methods have in common that look guesses up in what a row has already?

They have no model: nothing goes through `follow`, and a guess is chosen, not drawn.
"""

from __future__ import annotations

import torch

from ridgeline.errors import check
from ridgeline.kernels.look_up import LookUp, look_up, make_look_up_room
from ridgeline.speculation.contract import DraftMethod, GuessStep


class LooksUp(DraftMethod):
    """A DraftMethod but for its name."""

    looks_ahead = True

    def __init__(self, device: torch.device, max_rows: int, rule: LookUp) -> None:
        """For steps of up to `max_rows` rows, padding included."""
        check(max_rows > 0 and rule.max_guesses > 0, "rows and guesses", max_rows=max_rows)
        self.max_guesses = rule.max_guesses
        self._rule = rule
        self._room = make_look_up_room(device, max_rows)

    def guess(self, step: GuessStep, num_guesses: int) -> torch.Tensor | None:
        """They lie there since the step before."""
        return None

    def look_ahead(self, step: GuessStep) -> None:
        look_up(step.rows_B, step.history, self._rule, self._room)

    @property
    def num_bytes(self) -> int:
        return self._room.num_bytes
