"""How many rows are worked on at once, so that what lies between logits and tokens stays small?"""

from __future__ import annotations

import torch

# Few enough for a CPU's cache, enough to fill a GPU. What is done with them takes up to 36 bytes
# for each number on a CPU and 48 on a GPU, where sorting takes more.
NUMBERS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 23}


def parts(num_rows: int, logits_RV: torch.Tensor) -> list[slice]:
    """`num_rows` rows as wide as these logits, cut into pieces; one piece when they are few."""
    step = max(1, NUMBERS_AT_ONCE[logits_RV.device.type] // logits_RV.shape[1])
    return [slice(start, start + step) for start in range(0, max(1, num_rows), step)]
