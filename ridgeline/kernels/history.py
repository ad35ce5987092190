"""Which tokens has each row, and which are drafted to come next? On the device, where steps with
drafts find out how far they got.

Letters: N rows there is room for, L tokens of the longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PADDING_LENGTH = 2  # of row 0, which is nobody's: what is made of it is never looked at


@dataclass(frozen=True, slots=True)
class History:
    """`tokens_NL` (int32): a row's tokens, then its drafts, then anything. `lens_N` (int64): how
    many tokens it has; the newest, whose keys and values are not computed yet, is the last of
    them. `found_N` (int64): how many drafts lie behind them."""

    tokens_NL: torch.Tensor
    lens_N: torch.Tensor
    found_N: torch.Tensor


def make_history(
    num_rows: int, max_tokens: int, max_draft_tokens: int, device: torch.device
) -> History:
    """For rows of up to `max_tokens`. Row 0 is padding."""

    def whole(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    width = max(max_tokens, PADDING_LENGTH) + max_draft_tokens + 1
    history = History(whole(num_rows, width, dtype=torch.int32), whole(num_rows), whole(num_rows))
    history.lens_N[0] = PADDING_LENGTH
    return history
