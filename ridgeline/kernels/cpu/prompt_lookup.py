"""`look_up` in C; its meaning is in `kernels.prompt_lookup`."""

from __future__ import annotations

import ctypes

import torch

from ridgeline.kernels.cpu.drafts import check_history, check_whole
from ridgeline.kernels.cpu.elementwise import kernel_of, numbers, pointers
from ridgeline.kernels.cpu.recorder import launch, pointer
from ridgeline.kernels.history import History
from ridgeline.kernels.prompt_lookup import LookUp


class _LookUp(ctypes.Structure):
    _fields_ = (
        *pointers("places", "tokens", "lens", "found"),
        *numbers("rows", "token_stride", "token_width"),
        *numbers("min_match", "max_match", "max_draft_tokens", "drafts_per_match"),
    )


def look_up(rows_B: torch.Tensor, history: History, rule: LookUp) -> None:
    """As `kernels.prompt_lookup.look_up`."""
    check_whole("look up", rows_B)
    check_history("look up", history)
    tokens_NL = history.tokens_NL
    arguments = _LookUp(
        pointer(rows_B), pointer(tokens_NL), pointer(history.lens_N), pointer(history.found_N),
        len(rows_B), tokens_NL.stride(0), tokens_NL.shape[1], rule.min_match, rule.max_match,
        rule.max_draft_tokens, rule.drafts_per_match,
    )  # fmt: skip
    launch(kernel_of("rl_look_up"), arguments, rows_B, history)
