"""`lookup` in Triton: a row is shared between programs, the last of which writes the drafts."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.errors import check
from ridgeline.kernels.arrival_triton import arrived_last, await_inputs, reset
from ridgeline.kernels.drafts import History
from ridgeline.kernels.drafts_triton import check_history
from ridgeline.kernels.launching import launches_early
from ridgeline.kernels.prompt_lookup import MOST_SPLITS, LookupBuffers, LookupRule

SPAN = 1024  # tokens of a row that a program looks at together
MOST_PROGRAMS = 512  # of a launch, about: what a GPU runs at once


def lookup_triton(
    rows_B: torch.Tensor,
    history: History,
    rule: LookupRule,
    room: LookupBuffers,
    *,
    span: int = SPAN,
    pdl: bool | None = None,
) -> None:
    check(rows_B.dtype == torch.int64 and rows_B.is_contiguous(), "contiguous int64")
    check_history(history)
    num_rows, width = len(rows_B), history.tokens_NL.shape[1]
    splits = max(1, min(MOST_SPLITS, MOST_PROGRAMS // max(num_rows, 1), triton.cdiv(width, span)))
    has_room = len(room.arrivals_B) >= num_rows and len(room.best_P) >= num_rows * splits
    check(has_room, "room for all rows", rows=num_rows, has=len(room.arrivals_B))
    pdl = launches_early(rows_B.device) if pdl is None else pdl
    _lookup[(num_rows, splits)](
        rows_B, history.tokens_NL, history.lens_N, history.found_N, room.best_P, room.arrivals_B,
        history.tokens_NL.stride(0), width, splits, rule.min_match, rule.max_match,
        rule.max_draft_tokens, rule.drafts_per_match, SPAN=span,
        SPLITS=triton.next_power_of_2(splits),
        DRAFT_TOKENS=triton.next_power_of_2(rule.max_draft_tokens), PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["splits", "min_match", "max_match", "max_draft_tokens", "drafts_per_match"]
)
def _lookup(
    rows_ptr, tokens_ptr, lens_ptr, found_ptr, best_ptr, arrivals_ptr, token_row, token_width,
    splits, min_match, max_match, max_draft_tokens, drafts_per_match, SPAN: tl.constexpr,
    SPLITS: tl.constexpr, DRAFT_TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    split = tl.program_id(1)
    await_inputs(PDL)
    row = tl.load(rows_ptr + b)
    num = tl.load(lens_ptr + row)
    tokens = tokens_ptr + row * token_row
    spans = tl.cdiv(num, SPAN)
    working = tl.minimum(spans, splits)  # programs that have something to look at
    if (row != 0) & (split < working):
        best = tl.zeros([SPAN], tl.int64)  # length of a match, then where it ends: most is best
        span = split.to(tl.int64)
        while span < spans:
            end = span * SPAN + tl.arange(0, SPAN)
            goes_on = (end > 0) & (end < num)
            length = tl.zeros([SPAN], tl.int64)
            back = 0
            while (back < max_match) & (tl.max(goes_on.to(tl.int32), 0) > 0):
                wanted = tl.load(tokens + tl.maximum(num - 1 - back, 0))
                there = goes_on & (end > back)
                token = tl.load(tokens + end - 1 - back, there, 0)
                goes_on = there & (token == wanted)
                length += goes_on.to(tl.int64)
                back += 1
            best = tl.maximum(best, tl.where(length > 0, (length << 32) | end, 0))
            span += splits
        tl.store(best_ptr + b * splits + split, tl.max(best, 0))
        if arrived_last(arrivals_ptr, b, working):
            s = tl.arange(0, SPLITS)
            places = best_ptr + b * splits + s
            winner = tl.max(tl.load(places, s < working, 0, cache_modifier=".cg"), 0)
            length = winner >> 32
            end = winner & 0xFFFFFFFF
            found = tl.minimum(max_draft_tokens, token_width - num)
            if drafts_per_match > 0:
                found = tl.minimum(found, drafts_per_match * length)
            found = tl.where((length >= min_match) & (length > 0), found, 0)
            i = tl.arange(0, DRAFT_TOKENS)
            period = tl.maximum(num - end, 1)
            draft_token = tl.load(tokens + end + i % period, i < found, 0)
            tl.store(tokens + num + i, draft_token, i < found)
            tl.store(found_ptr + row, found)
            reset(arrivals_ptr, b)
