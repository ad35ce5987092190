"""What followed the longest passage that ends like this text does? Guesses without a model.

The longer a passage has been repeated, the farther it is trusted: the number of guesses grows with
the match, so that chance matches cost little and copies run at full length. Source of the idea:
Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", 2024;
there is no tree here, as all of a row is looked through in a few microseconds.
"""

from __future__ import annotations

import torch

from ridgeline.kernels.look_up import LookUp
from ridgeline.speculation.look_up import LooksUp

MIN_MATCH, MAX_MATCH = 1, 32  # tokens
GUESSES_PER_MATCH = 1


class Suffix(LooksUp):
    """A DraftMethod: the longest match of the last 1 to 32 tokens, of equals the most recent, gives
    as many guesses as tokens match."""

    name = "suffix"

    def __init__(self, device: torch.device, max_rows: int, max_guesses: int) -> None:
        rule = LookUp(MIN_MATCH, MAX_MATCH, max_guesses, GUESSES_PER_MATCH)
        super().__init__(device, max_rows, rule)
