"""What followed when the last few tokens stood in this text before? Guesses without a model.

Text that is repeated, quoted or edited is guessed well, all other hardly, at no cost but the check.
Source of the idea: Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

import torch

from ridgeline.kernels.look_up import LookUp
from ridgeline.speculation.look_up import LooksUp

MIN_MATCH, MAX_MATCH = 2, 4  # tokens


class NGram(LooksUp):
    """A DraftMethod: the longest match of the last 2 to 4 tokens, of equals the most recent, gives
    all guesses that are wanted."""

    name = "ngram"

    def __init__(self, device: torch.device, max_rows: int, max_guesses: int) -> None:
        super().__init__(device, max_rows, LookUp(MIN_MATCH, MAX_MATCH, max_guesses))
