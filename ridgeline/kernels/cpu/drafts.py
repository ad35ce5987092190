"""The small kernels of steps with drafts, in C: the meaning of each is in `kernels.drafts`.

Letters: B rows of a step, T tokens of all of them, N rows of the history, L tokens of the longest,
M blocks per table row, g KV groups.
"""

from __future__ import annotations

import ctypes

import torch

from ridgeline.errors import check
from ridgeline.kernels.cpu.elementwise import DTYPES, Draw, check_draws, kernel_of
from ridgeline.kernels.cpu.native import numbers, pointers
from ridgeline.kernels.cpu.recorder import launch, pointer
from ridgeline.kernels.drafts import History
from ridgeline.kernels.draw_rows import Draws
from ridgeline.kernels.prompt_lookup import LookupRule
from ridgeline.kernels.step_inputs import StepInputs
from ridgeline.kernels.verified_rows import DraftOdds


class _Blocks(ctypes.Structure):
    _fields_ = (
        *pointers("places", "fresh", "tables"),
        *numbers("rows", "groups", "fresh_stride", "group_stride", "table_stride"),
    )


class _DraftInputs(ctypes.Structure):
    _fields_ = (
        *pointers("places", "limits", "fresh", "tokens", "lens", "tables"),
        *pointers("token_ids", "positions", "next_positions", "seq_lens", "slots"),
        *numbers("rows", "groups", "fresh_stride", "group_stride", "table_stride", "table_width"),
        *numbers("token_stride", "token_width", "slots_stride"),
        *numbers("block_size", "num_new", "first", "max_positions"),
    )


class _Accept(ctypes.Structure):
    _fields_ = (
        *pointers("ids", "is_sound", "places", "limits", "tokens", "lens", "found", "out"),
        *numbers("rows", "num_new", "token_stride", "token_width", "out_stride", "out_width"),
    )


class _Found(ctypes.Structure):
    _fields_ = (*pointers("places", "found", "out"), *numbers("rows", "out_stride"))


class _PutDrafts(ctypes.Structure):
    _fields_ = (
        *pointers("ids", "places", "tokens", "lens", "found"),
        *numbers("rows", "token_stride", "token_width", "index"),
    )


def check_whole(what: str, *tensors: torch.Tensor) -> None:
    """Lines of whole numbers of 64 bits, on the CPU."""
    for x in tensors:
        is_known = x.device.type == "cpu" and x.dtype == torch.int64
        check(is_known, "int64 on the CPU", kernel=what, dtype=x.dtype)
        check(x.stride(-1) == 1 or x.shape[-1] <= 1, "contiguous lines", kernel=what)


def check_history(what: str, history: History) -> None:
    tokens_NL = history.tokens_NL
    check(tokens_NL.dtype == torch.int32, "tokens of 32 bits", kernel=what, dtype=tokens_NL.dtype)
    check(tokens_NL.stride(1) == 1, "contiguous rows of tokens", kernel=what)
    check_whole(what, history.lens_N, history.found_N)


def _check_tables(what: str, tables_gNM: torch.Tensor, fresh_XB: torch.Tensor | None) -> None:
    is_known = tables_gNM.dtype == torch.int32 and tables_gNM.stride(2) == 1
    check(is_known, "tables of 32 bits", kernel=what, dtype=tables_gNM.dtype)
    if fresh_XB is not None:
        check_whole(what, fresh_XB)
        check(len(fresh_XB) == 2 * len(tables_gNM), "two lines for each group", kernel=what)


def enter_blocks(rows_B: torch.Tensor, fresh_XB: torch.Tensor, tables_gNM: torch.Tensor) -> None:
    """As `kernels.drafts.enter_blocks`."""
    check_whole("enter blocks", rows_B)
    _check_tables("enter blocks", tables_gNM, fresh_XB)
    arguments = _Blocks(
        pointer(rows_B), pointer(fresh_XB), pointer(tables_gNM), len(rows_B), len(tables_gNM),
        fresh_XB.stride(0), tables_gNM.stride(0), tables_gNM.stride(1),
    )  # fmt: skip
    launch(kernel_of("rl_enter_blocks"), arguments, rows_B, fresh_XB, tables_gNM)


def draft_inputs(
    rows_B: torch.Tensor,
    limits_B: torch.Tensor,
    history: History,
    tables_gNM: torch.Tensor,
    out: StepInputs,
    block_size: int,
    *,
    num_new: int,
    first: int,
    max_positions: int,
    fresh_XB: torch.Tensor | None = None,
) -> None:
    """As `kernels.drafts.draft_inputs`."""
    outs = out.token_ids_B, out.positions_B, out.next_positions_B, out.slots_gB
    check_whole("draft inputs", rows_B, limits_B, *outs)
    check_history("draft inputs", history)
    _check_tables("draft inputs", tables_gNM, fresh_XB)
    rows, groups, tokens_NL = len(rows_B), len(tables_gNM), history.tokens_NL
    check(out.seq_lens_B.shape == (rows,), "a length for each row", rows=rows)
    check(out.seq_lens_B.dtype == torch.int32, "lengths of 32 bits", dtype=out.seq_lens_B.dtype)
    for x in outs:
        check(x.shape[-1] == rows * num_new, "a place for each token", rows=rows, new=num_new)
    check(len(out.slots_gB) == groups, "slots of each group", groups=groups)
    arguments = _DraftInputs(
        pointer(rows_B), pointer(limits_B), pointer(fresh_XB), pointer(tokens_NL),
        pointer(history.lens_N), pointer(tables_gNM), pointer(out.token_ids_B),
        pointer(out.positions_B), pointer(out.next_positions_B), pointer(out.seq_lens_B),
        pointer(out.slots_gB), rows, groups, 0 if fresh_XB is None else fresh_XB.stride(0),
        tables_gNM.stride(0), tables_gNM.stride(1), tables_gNM.shape[2], tokens_NL.stride(0),
        tokens_NL.shape[1], out.slots_gB.stride(0), block_size, num_new, first, max_positions,
    )  # fmt: skip
    kept = rows_B, limits_B, fresh_XB, history, tables_gNM, out
    launch(kernel_of("rl_draft_inputs"), arguments, *kept)


def accept(
    ids_T: torch.Tensor,
    is_sound_T: torch.Tensor,
    rows_B: torch.Tensor,
    limits_B: torch.Tensor,
    history: History,
    out_BY: torch.Tensor,
) -> None:
    """As `kernels.drafts.accept`."""
    check_whole("accept", ids_T, rows_B, limits_B, out_BY)
    check_history("accept", history)
    is_known = is_sound_T.dtype == torch.bool and is_sound_T.is_contiguous()
    check(is_known and len(is_sound_T) == len(ids_T), "a mark for each token", kernel="accept")
    rows, tokens_NL = len(rows_B), history.tokens_NL
    arguments = _Accept(
        pointer(ids_T), pointer(is_sound_T), pointer(rows_B), pointer(limits_B),
        pointer(tokens_NL), pointer(history.lens_N), pointer(history.found_N), pointer(out_BY),
        rows, len(ids_T) // max(rows, 1), tokens_NL.stride(0), tokens_NL.shape[1],
        out_BY.stride(0), out_BY.shape[1],
    )  # fmt: skip
    kept = ids_T, is_sound_T, rows_B, limits_B, history, out_BY
    launch(kernel_of("rl_accept"), arguments, *kept)


def put_drafts(ids_B: torch.Tensor, rows_B: torch.Tensor, history: History, index: int) -> None:
    """As `kernels.drafts.put_drafts`."""
    check_whole("put drafts", ids_B, rows_B)
    check_history("put drafts", history)
    check(len(ids_B) == len(rows_B), "an id for each row", rows=len(rows_B))
    tokens_NL = history.tokens_NL
    arguments = _PutDrafts(
        pointer(ids_B), pointer(rows_B), pointer(tokens_NL), pointer(history.lens_N),
        pointer(history.found_N), len(rows_B), tokens_NL.stride(0), tokens_NL.shape[1], index,
    )  # fmt: skip
    launch(kernel_of("rl_put_drafts"), arguments, ids_B, rows_B, history)


def tell_found(rows_B: torch.Tensor, history: History, out_B: torch.Tensor) -> None:
    """As `kernels.drafts.tell_found`."""
    check_whole("tell found", rows_B)
    check_history("tell found", history)
    check(out_B.dtype == torch.int64 and len(out_B) == len(rows_B), "a number for each row")
    arguments = _Found(
        pointer(rows_B), pointer(history.found_N), pointer(out_B), len(rows_B), out_B.stride(0)
    )
    launch(kernel_of("rl_tell_found"), arguments, rows_B, history, out_B)


class _Lookup(ctypes.Structure):
    _fields_ = (
        *pointers("places", "tokens", "lens", "found"),
        *numbers("rows", "token_stride", "token_width"),
        *numbers("min_match", "max_match", "max_draft_tokens", "drafts_per_match"),
    )


def lookup(rows_B: torch.Tensor, history: History, rule: LookupRule) -> None:
    """As `kernels.prompt_lookup.lookup`."""
    check_whole("look up", rows_B)
    check_history("look up", history)
    tokens_NL = history.tokens_NL
    arguments = _Lookup(
        pointer(rows_B), pointer(tokens_NL), pointer(history.lens_N), pointer(history.found_N),
        len(rows_B), tokens_NL.stride(0), tokens_NL.shape[1], rule.min_match, rule.max_match,
        rule.max_draft_tokens, rule.drafts_per_match,
    )  # fmt: skip
    launch(kernel_of("rl_look_up"), arguments, rows_B, history)


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
