"""One token for each position of a checked run, in C; the meaning is in `kernels.verified_rows`.

Letters: B rows of the step, k drafts of each, T = B * (k + 1) positions, V vocabulary.
"""

from __future__ import annotations

import ctypes

import torch

from ridgeline.errors import check
from ridgeline.kernels.cpu.elementwise import (
    DTYPES,
    Draw,
    check_draws,
    kernel_of,
    numbers,
    pointers,
)
from ridgeline.kernels.cpu.recorder import launch, pointer
from ridgeline.kernels.draw_rows import Draws
from ridgeline.kernels.verified_rows import DraftOdds


class _Check(ctypes.Structure):
    _fields_ = (
        ("draw", Draw),
        *pointers("draft_tokens", "draft_logits", "is_verified"),
        *numbers("rows", "num_draft_tokens", "draft_stride", "logits_row_stride", "logits_stride"),
        *numbers("draft_dtype"),
    )


def verified_rows(
    logits_TV: torch.Tensor, positions_T: torch.Tensor, draws: Draws, odds: DraftOdds
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.verified_rows`. Behind the first token of a row that was not drafted nothing is
    drawn: ids are 0, and sound."""
    rows, size = logits_TV.shape
    num_rows, num_draft_tokens, _ = odds.logits_BkV.shape
    check(0 < size < 1 << 31, "ids fit", size=size)
    for x, dtype in ((odds.drafts_Bk, torch.int64), (odds.is_verified_B, torch.bool)):
        check(x.dtype == dtype and x.device.type == "cpu", "on the CPU", dtype=x.dtype)
        check(x.stride(-1) == 1 or x.shape[-1] == 1, "contiguous lines")
    check_draws("check", rows, positions_T, draws)
    ids_T = torch.empty(rows, dtype=torch.int64)
    is_sound_T = torch.empty(rows, dtype=torch.bool)
    of_draws = draws.keys_R, draws.temperatures_R, draws.noisy_R
    arguments = _Check(
        Draw(
            pointer(logits_TV), pointer(positions_T), *map(pointer, of_draws),
            pointer(ids_T), pointer(is_sound_T),
            rows, size, logits_TV.stride(0), DTYPES[logits_TV.dtype],
        ),
        pointer(odds.drafts_Bk), pointer(odds.logits_BkV), pointer(odds.is_verified_B),
        num_rows, num_draft_tokens, odds.drafts_Bk.stride(0), odds.logits_BkV.stride(0),
        odds.logits_BkV.stride(1), DTYPES[odds.logits_BkV.dtype],
    )  # fmt: skip
    kept = logits_TV, positions_T, *of_draws, ids_T, is_sound_T
    of_odds = odds.drafts_Bk, odds.logits_BkV, odds.is_verified_B
    launch(kernel_of("rl_verify"), arguments, *kept, *of_odds)
    return ids_T, is_sound_T
