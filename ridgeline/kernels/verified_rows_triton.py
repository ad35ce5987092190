"""`verified_rows` in Triton: three launches; the last works only where a draft token is rejected.

First every row gets its own draw. Then p and q are weighed at each position that is checked, one
program a chunk of a row, and the last of them keeps the draft or not. Then, where it is not kept,
what p has more than q is drawn from. Letters: B rows of the step, k drafts of each, T positions,
O = B * k, C chunks of a row, V vocabulary.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.errors import check
from ridgeline.kernels.arrival_triton import arrived_last, await_inputs, reset
from ridgeline.kernels.draw_rows import Draws
from ridgeline.kernels.draw_rows_triton import (
    BLOCK,
    draw_rows_triton,
    minus_gumbel,
    uniform,
)
from ridgeline.kernels.launching import Workspace, launches_early, make_workspace
from ridgeline.kernels.verified_rows import DraftOdds

# Those of `kernels.noise`, as signed numbers.
COINS = tl.constexpr(0xE7037ED1A0B428DB - (1 << 64))
REST = tl.constexpr(0x8EBC6AF09C88C6E3 - (1 << 64))
STATE = tl.constexpr(5)  # level and scale of p and of q, and if the rest is to be drawn from
LEAST = tl.constexpr(2.0**-126)


def verified_rows_triton(
    logits_TV: torch.Tensor, positions_T: torch.Tensor, draws: Draws, odds: DraftOdds, *,
    workspace: Workspace | None = None, block: int = BLOCK, pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    num_rows, num_draft_tokens, size = odds.logits_BkV.shape
    check(odds.logits_BkV.stride(2) == 1 or size == 1, "rows of logits are contiguous")
    check(odds.drafts_Bk.stride(1) == 1 or num_draft_tokens == 1, "a row's drafts are contiguous")
    pdl = launches_early(logits_TV.device) if pdl is None else pdl
    chunks, places = triton.cdiv(size, block), num_rows * num_draft_tokens
    most = 3 * len(logits_TV) * chunks
    room = workspace or make_workspace(logits_TV.device, most, len(logits_TV))
    ids_T, is_sound_T = draw_rows_triton(
        logits_TV, positions_T, draws, workspace=room, block=block, pdl=pdl
    )
    if places == 0:
        return ids_T, is_sound_T
    partial_O4C = logits_TV.new_empty(places, 4, chunks, dtype=torch.float32)
    state_O5 = logits_TV.new_empty(places, STATE.value, dtype=torch.float32)
    for kernel in (_weigh, _draw_rest):
        kernel[(places, chunks)](
            logits_TV, odds.logits_BkV, odds.drafts_Bk, odds.is_verified_B, positions_T,
            draws.keys_R, draws.temperatures_R, ids_T, partial_O4C, state_O5, room.arrivals_A,
            num_draft_tokens, size, logits_TV.stride(0), odds.logits_BkV.stride(0),
            odds.logits_BkV.stride(1), odds.drafts_Bk.stride(0), chunks, BLOCK=block,
            CHUNKS=triton.next_power_of_2(chunks), PDL=pdl, num_warps=8, launch_pdl=pdl,
        )  # fmt: skip
    return ids_T, is_sound_T


@triton.jit
def _mass(logits_ptr, v, size, temperature):
    """The largest of a chunk, NaN if there is one, and the sum of all odds to it."""
    x = tl.load(logits_ptr + v, v < size, float("-inf")).to(tl.float32)
    bad = tl.max((x != x).to(tl.int32), 0) > 0
    x = tl.where(x == x, x, float("-inf"))
    most = tl.max(x, 0)
    level = tl.where(tl.abs(most) < float("inf"), most, 0.0)
    each = tl.exp((x - level) / temperature)
    total = tl.sum(tl.where(x > float("-inf"), each, 0.0), 0)
    return tl.where(bad, float("nan"), most), total


@triton.jit
def _merged(most_ptr, sum_ptr, c, chunks, temperature):
    """(level, scale, is finite): odds are e^((logit - level) / temperature) * scale."""
    most = tl.load(most_ptr + c, c < chunks, float("-inf"), cache_modifier=".cg")
    total = tl.load(sum_ptr + c, c < chunks, 0.0, cache_modifier=".cg")
    bad = tl.max((most != most).to(tl.int32), 0) > 0
    most = tl.where(most == most, most, float("-inf"))
    level = tl.max(most, 0)
    is_finite = (tl.abs(level) < float("inf")) & (bad == 0)
    level = tl.where(is_finite, level, 0.0)
    each = tl.exp((most - level) / temperature) * total
    total = tl.sum(tl.where(most > float("-inf"), each, 0.0), 0)
    return level, 1.0 / tl.where(is_finite, total, 1.0), is_finite


@triton.jit
def _odds(logit, level, scale, temperature):
    return tl.exp((logit.to(tl.float32) - level) / temperature) * scale


@triton.jit
def _weigh(
    logits_ptr, draft_logits_ptr, drafts_ptr, is_verified_ptr, positions_ptr, keys_ptr,
    temperatures_ptr, ids_ptr, partial_ptr, state_ptr, arrivals_ptr, num_draft_tokens, size, stride,
    draft_row_stride, draft_stride, drafts_stride, chunks, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    await_inputs(PDL)
    b, j = place // num_draft_tokens, place % num_draft_tokens
    row = b * (num_draft_tokens + 1) + j
    draft_token = tl.load(drafts_ptr + b * drafts_stride + j)
    state = state_ptr + place * STATE
    is_verified = (tl.load(is_verified_ptr + b) != 0) & (draft_token >= 0) & (draft_token < size)
    if is_verified:
        p_ptr = logits_ptr + row * stride
        q_ptr = draft_logits_ptr + b * draft_row_stride + j * draft_stride
        temperature = tl.load(temperatures_ptr + row)
        v = chunk * BLOCK + tl.arange(0, BLOCK)
        most_p, sum_p = _mass(p_ptr, v, size, temperature)
        most_q, sum_q = _mass(q_ptr, v, size, temperature)
        places = partial_ptr + place * 4 * chunks
        tl.store(places + chunk, most_p)
        tl.store(places + chunks + chunk, sum_p)
        tl.store(places + 2 * chunks + chunk, most_q)
        tl.store(places + 3 * chunks + chunk, sum_q)
        if arrived_last(arrivals_ptr, place, chunks):
            c = tl.arange(0, CHUNKS)
            level_p, scale_p, is_p = _merged(places, places + chunks, c, chunks, temperature)
            q_places = places + 2 * chunks
            level_q, scale_q, is_q = _merged(q_places, q_places + chunks, c, chunks, temperature)
            odds_p = _odds(tl.load(p_ptr + draft_token), level_p, scale_p, temperature)
            odds_q = _odds(tl.load(q_ptr + draft_token), level_q, scale_q, temperature)
            key = tl.load(keys_ptr + row) ^ COINS
            coin = uniform(key, tl.load(positions_ptr + row), draft_token * 0)
            is_known = is_p & is_q
            is_kept = is_known & (coin * odds_q < odds_p)
            if is_kept:
                tl.store(ids_ptr + row, draft_token)
            tl.store(state, level_p)
            tl.store(state + 1, scale_p)
            tl.store(state + 2, level_q)
            tl.store(state + 3, scale_q)
            tl.store(state + 4, tl.where(is_known & (is_kept == 0), 1.0, 0.0))
            reset(arrivals_ptr, place)
    elif chunk == 0:
        tl.store(state + 4, 0.0)


@triton.jit
def _draw_rest(
    logits_ptr, draft_logits_ptr, drafts_ptr, is_verified_ptr, positions_ptr, keys_ptr,
    temperatures_ptr, ids_ptr, partial_ptr, state_ptr, arrivals_ptr, num_draft_tokens, size, stride,
    draft_row_stride, draft_stride, drafts_stride, chunks, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    await_inputs(PDL)
    state = state_ptr + place * STATE
    if tl.load(state + 4) > 0:
        b, j = place // num_draft_tokens, place % num_draft_tokens
        row = b * (num_draft_tokens + 1) + j
        temperature = tl.load(temperatures_ptr + row)
        v = chunk * BLOCK + tl.arange(0, BLOCK)
        inside = v < size
        p = tl.load(logits_ptr + row * stride + v, inside, float("-inf"))
        q_ptr = draft_logits_ptr + b * draft_row_stride + j * draft_stride
        q = tl.load(q_ptr + v, inside, float("-inf"))
        left = _odds(p, tl.load(state), tl.load(state + 1), temperature)
        left -= _odds(q, tl.load(state + 2), tl.load(state + 3), temperature)
        is_left = inside & (left > LEAST)
        key = tl.load(keys_ptr + row) ^ REST
        noise = minus_gumbel(key, tl.load(positions_ptr + row), v.to(tl.int64))
        score = tl.where(is_left, tl.log(tl.where(is_left, left, 1.0)) - noise, float("-inf"))
        best = tl.max(score, 0)
        token = tl.min(tl.where(is_left & (score == best), v, 1 << 24), 0)
        places = partial_ptr + place * 4 * chunks
        tl.store(places + chunk, best)
        tl.store(places + chunks + chunk, token.to(tl.float32))
        if arrived_last(arrivals_ptr, place, chunks):
            c = tl.arange(0, CHUNKS)
            given = c < chunks
            best_C = tl.load(places + c, given, float("-inf"), cache_modifier=".cg")
            token_C = tl.load(places + chunks + c, given, 0.0, cache_modifier=".cg")
            winner = tl.max(best_C, 0)
            chosen = tl.min(tl.where(given & (best_C == winner), token_C, 16777216.0), 0)
            if winner > float("-inf"):  # else the row's own draw stands
                tl.store(ids_ptr + row, chosen.to(tl.int64))
            reset(arrivals_ptr, place)
