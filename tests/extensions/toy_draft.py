"""A draft method from outside: what followed the newest token when it stood here last, in PyTorch.

Its table line: `DRAFT_METHODS["toy"] = LINE`. Letters: B rows of a step, L tokens of the longest,
k drafts.
"""

from __future__ import annotations

import torch

from ridgeline.formats import DraftMethodLine
from ridgeline.speculation.contract import DraftMethod, DraftStep

LINE = DraftMethodLine(
    "tests.extensions.toy_draft:Again",
    "",
    acceptance=0.5,
    text="what followed the same token",
    looks_ahead=True,
)


class Again(DraftMethod):
    name = "toy"
    looks_ahead = True

    def __init__(self, device: torch.device, max_rows: int, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens
        self._next_k = torch.arange(max_draft_tokens, device=device)

    def look_ahead(self, step: DraftStep) -> None:
        history, rows_B = step.history, step.rows_B
        tokens_BL, lens_B = history.tokens_NL[rows_B], history.lens_N[rows_B]
        newest_B1 = tokens_BL.gather(1, lens_B[:, None] - 1)
        places_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        is_same_BL = (tokens_BL == newest_B1) & (places_L < lens_B[:, None] - 1)
        last_B = torch.where(is_same_BL, places_L, -1).amax(1)
        found_B = (lens_B - 1 - last_B).clamp(max=self.max_draft_tokens)
        found_B = torch.where((last_B >= 0) & (rows_B > 0), found_B, 0)  # row 0 is padding
        targets_Bk = lens_B[:, None] + self._next_k
        drafts_Bk = tokens_BL.gather(1, last_B[:, None] + 1 + self._next_k)
        is_kept_Bk = self._next_k >= found_B[:, None]
        drafts_Bk = torch.where(is_kept_Bk, tokens_BL.gather(1, targets_Bk), drafts_Bk)
        history.tokens_NL[rows_B[:, None], targets_Bk] = drafts_Bk
        history.found_N[rows_B] = found_B

    @property
    def num_bytes(self) -> int:
        return self._next_k.numel() * self._next_k.element_size()
