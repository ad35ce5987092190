"""Paged prefill attention in Triton: one launch, a program for each tile of rows and KV head.

A program walks the tiles of keys that its rows may see, with the online softmax in powers of two.
Only the tiles at the ends of that range, which a row may see in part, pay for masks: keys outside
the range are never loaded, whatever lies in their slots. Where a tile's keys are dealt out, every
program leaves its part in the workspace and the last one to arrive merges them in their order, so
that timing does not change the result.
Letters: as in `paged_prefill`; R rows of a tile, U keys of a tile.
"""
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ridgeline.errors import check
from ridgeline.kernels.arrival_triton import await_inputs
from ridgeline.kernels.launching import launches_early
from ridgeline.kernels.paged_kv import PagedKV
from ridgeline.kernels.paged_kv_triton import (
    as_factor,
    check_cache,
    level_of_scales,
    low_of,
    numbers,
    place_of_code,
    rotated,
    scaling,
    scaling_strides,
)
from ridgeline.kernels.paged_prefill import MOST_PROGRAMS, RECORD, Config, PrefillBatch


def paged_prefill_triton(
    q_THD: torch.Tensor,
    kv: PagedKV,
    batch: PrefillBatch,
    config: Config,
    scale: float,
    out_THD: torch.Tensor,
) -> None:
    k_NSKD, head_dim = kv.k_NSKD, kv.head_dim
    num_items, num_kv_heads = batch.work_WR.shape[0], k_NSKD.shape[2]
    check_cache(kv)
    check(q_THD.stride(2) == out_THD.stride(2) == 1, "rows of D are contiguous")
    check(batch.work_WR.is_contiguous() and batch.work_WR.shape[1] == RECORD, "records in a row")
    check(q_THD.shape[1] % num_kv_heads == 0, "query heads are a multiple of KV heads")
    check(scale > 0, "the scale is positive", scale=scale)
    workspace, part_size = batch.workspace, config.block_m * (head_dim + 2)
    if workspace is not None:
        # Where keys are dealt out, no more programs than these take part.
        dealt = min(num_items, max(1, MOST_PROGRAMS // num_kv_heads)) * num_kv_heads
        workspace.check_room(dealt * part_size, dealt)
    _prefill_kernel[(num_items * num_kv_heads,)](
        q_THD, k_NSKD, kv.v_NSKD, *scaling(kv), out_THD, batch.block_tables_BM, batch.work_WR,
        None if workspace is None else workspace.partial_P,
        None if workspace is None else workspace.arrivals_A, scale * math.log2(math.e),
        q_THD.stride(0), q_THD.stride(1), out_THD.stride(0), out_THD.stride(1), k_NSKD.stride(0),
        k_NSKD.stride(1), k_NSKD.stride(2), *scaling_strides(kv), batch.block_tables_BM.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=q_THD.shape[1] // num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_SIZE=k_NSKD.shape[1], BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        CODES=kv.code_bits, WINDOW=batch.window or 0, PARTS=workspace is not None,
        STAGES=config.num_stages, PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32",
        RECORD=RECORD, PDL=launches_early(q_THD.device), num_warps=config.num_warps,
        num_stages=config.num_stages, launch_pdl=launches_early(q_THD.device),
    )  # fmt: skip


@triton.jit
def _read(tile, place_U, low, high, BLOCK_N: tl.constexpr, LOW: tl.constexpr):
    """The keys that stand at the places of a tile."""
    key_U = tl.minimum(tile * BLOCK_N + place_U, high - 1)
    if LOW:
        key_U = tl.maximum(key_U, low)
    return key_U


@triton.jit
def _walk(
    begin, end, q_RD, best_R, total_R, sum_RD, low_R, all_R, k, v, k_scales, v_scales, k_lows,
    v_lows, table, position_R, low, high, scale_log2, kv_block, kv_slot, scale_block, scale_slot,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, CODES: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, BLIND: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the tiles [begin, end) of keys, of which only [low, high) are read: what lies in other
    slots may be NaN, so a place outside stands for the nearest key inside, and weighs nothing.
    Without MASKED every row sees every key of the tiles; with BLIND, a row may have seen nothing
    yet. Blocks are looked up a tile ahead, so that a copy never waits for its address."""
    LOW: tl.constexpr = MASKED and WINDOW > 0
    code_D, shift_D = place_of_code(tl.arange(0, HEAD_DIM), HEAD_DIM, CODES)
    place_U = tl.arange(0, BLOCK_N)
    block_U = tl.load(table + _read(begin, place_U, low, high, BLOCK_N, LOW) // BLOCK_SIZE)
    for i in tl.range(begin, end, num_stages=STAGES):
        if MASKED or BLOCK_N % BLOCK_SIZE != 0:
            inner_U = _read(i, place_U, low, high, BLOCK_N, LOW) % BLOCK_SIZE
        else:
            inner_U = place_U % BLOCK_SIZE  # the same in every tile
        inner_UD = (inner_U * kv_slot)[:, None] + code_D[None, :]
        if CODES > 0:
            at_U = block_U.to(tl.int64) * scale_block + inner_U * scale_slot
        block_UD = (block_U.to(tl.int64) * kv_block)[:, None]
        block_U = tl.load(table + _read(i + 1, place_U, low, high, BLOCK_N, LOW) // BLOCK_SIZE)
        k_UD = numbers(tl.load(k + inner_UD + block_UD), shift_D, q_RD, CODES)
        score_RU = tl.dot(q_RD, tl.trans(k_UD), input_precision=PRECISION)
        if CODES > 0:
            k_scale_U = tl.load(k_scales + at_U).to(tl.float32)
            score_RU *= k_scale_U[None, :]
            v_scale_U = tl.load(v_scales + at_U).to(tl.float32)
            if CODES == 4:
                k_low_U = low_of(tl.load(k_lows + at_U), k_scale_U)
                score_RU += all_R[:, None] * k_low_U[None, :]
        if MASKED:
            key_U = i * BLOCK_N + place_U
            seen_RU = key_U[None, :] <= position_R[:, None]
            if WINDOW > 0:
                seen_RU = seen_RU & (key_U[None, :] > position_R[:, None] - WINDOW)
            score_RU = tl.where(seen_RU, score_RU, float("-inf"))
        if CODES > 0:
            most_RU = score_RU * scale_log2 + level_of_scales(v_scale_U)[None, :]
            new_best_R = tl.maximum(best_R, tl.max(most_RU, 1))
        else:
            new_best_R = tl.maximum(best_R, tl.max(score_RU, 1) * scale_log2)
        level_R = new_best_R
        if MASKED and BLIND:
            # A row that has seen nothing subtracts 0, and stays at zero instead of becoming NaN.
            level_R = tl.where(new_best_R == float("-inf"), 0.0, new_best_R)
        weight_RU = tl.exp2(score_RU * scale_log2 - level_R[:, None])
        fade_R = tl.exp2(best_R - level_R)
        total_R = total_R * fade_R + tl.sum(weight_RU, 1)
        if CODES == 4:
            v_low_U = low_of(tl.load(v_lows + at_U), v_scale_U)
            low_R = low_R * fade_R + tl.sum(weight_RU * v_low_U[None, :], 1)
        if CODES > 0:
            weight_RU *= v_scale_U[None, :]
        v_UD = numbers(tl.load(v + inner_UD + block_UD), shift_D, q_RD, CODES)
        sum_RD = tl.dot(
            weight_RU.to(v_UD.dtype),
            v_UD,
            acc=sum_RD * fade_R[:, None],
            input_precision=PRECISION,
        )
        best_R = new_best_R
    return best_R, total_R, sum_RD, low_R


@triton.jit
def _merge(
    part, partials, row_R, index, count, best_R, total_R, sum_RD, arrivals, counter,
    SIZE: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Leave this part; the last to arrive gets the whole. Parts of a tile are STEP apart."""
    dim_D = tl.arange(0, HEAD_DIM)
    inside_RD = row_R[:, None] * HEAD_DIM + dim_D[None, :]
    mine = partials + (part + index * STEP).to(tl.int64) * SIZE
    tl.store(mine + row_R, best_R, cache_modifier=".cg")
    tl.store(mine + BLOCK_M + row_R, total_R, cache_modifier=".cg")
    tl.store(mine + 2 * BLOCK_M + inside_RD, sum_RD, cache_modifier=".cg")
    # All threads have stored before the one that counts releases what they stored.
    tl.debug_barrier()
    finished = tl.atomic_add(arrivals + counter, 1, sem="acq_rel") == count - 1
    if finished:
        tl.store(arrivals + counter, 0)
        best_R = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total_R = tl.zeros((BLOCK_M,), tl.float32)
        sum_RD = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
        for j in range(0, count):
            other = partials + (part + j * STEP).to(tl.int64) * SIZE
            other_best_R = tl.load(other + row_R, cache_modifier=".cg")
            other_total_R = tl.load(other + BLOCK_M + row_R, cache_modifier=".cg")
            other_RD = tl.load(other + 2 * BLOCK_M + inside_RD, cache_modifier=".cg")
            new_best_R = tl.maximum(best_R, other_best_R)
            level_R = tl.where(new_best_R == float("-inf"), 0.0, new_best_R)
            fade_R = tl.exp2(best_R - level_R)
            other_fade_R = tl.exp2(other_best_R - level_R)
            total_R = total_R * fade_R + other_total_R * other_fade_R
            sum_RD = sum_RD * fade_R[:, None] + other_RD * other_fade_R[:, None]
            best_R = new_best_R
    return finished, total_R, sum_RD


@triton.jit
def _prefill_kernel(
    q, k, v, k_scales, v_scales, k_lows, v_lows, out, tables, work, partials, arrivals, scale_log2,
    q_row, q_head, out_row, out_head, kv_block, kv_slot, kv_head, scale_block, scale_slot,
    scale_head, table_row, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CODES: tl.constexpr,
    WINDOW: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    RECORD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    head = tl.program_id(0) % NUM_KV_HEADS
    record = work + (tl.program_id(0) // NUM_KV_HEADS) * RECORD
    request = tl.load(record)
    first_token = tl.load(record + 1)
    num_new = tl.load(record + 2)
    length = tl.load(record + 3)
    first_row = tl.load(record + 4)
    begin = tl.load(record + 5)
    end = tl.load(record + 6)

    row_R = tl.arange(0, BLOCK_M)
    new_R = (first_row + row_R) // GROUP
    asked_R1 = (new_R < num_new)[:, None]
    token_R = (first_token + new_R).to(tl.int64)
    query_head_R = head * GROUP + (first_row + row_R) % GROUP
    dim_D = tl.arange(0, HEAD_DIM)
    q_RD = tl.load(
        q + (token_R * q_row + query_head_R * q_head)[:, None] + dim_D[None, :],
        mask=asked_R1,
        other=0.0,
    )
    q_RD = as_factor(q_RD, k)
    low_R = tl.zeros((BLOCK_M,), tl.float32)
    all_R = low_R
    if CODES == 4:
        q_RD = rotated(q_RD, HEAD_DIM, PRECISION)
        all_R = tl.sum(q_RD.to(tl.float32), 1)
    cached = length - num_new
    position_R = cached + new_R
    first = cached + first_row // GROUP
    last = cached + (tl.minimum(first_row + BLOCK_M, num_new * GROUP) - 1) // GROUP
    high = tl.maximum(last + 1, 1)  # of an item that does nothing, too
    low = first * 0
    whole_begin = begin
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0)
        seen_by_all = tl.maximum(last - WINDOW + 1, 0)
        whole_begin = tl.minimum(tl.maximum((seen_by_all + BLOCK_N - 1) // BLOCK_N, begin), end)
    whole_end = tl.maximum(tl.minimum((first + 1) // BLOCK_N, end), whole_begin)
    table = tables + request.to(tl.int64) * table_row
    k += head * kv_head
    v += head * kv_head
    if CODES > 0:
        k_scales += head * scale_head
        v_scales += head * scale_head
    if CODES == 4:
        k_lows += head * scale_head
        v_lows += head * scale_head
    best_R = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total_R = tl.zeros((BLOCK_M,), tl.float32)
    sum_RD = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    stop = whole_begin
    for third in tl.static_range(3):  # the tiles in the middle are seen whole, by all rows
        if third > 0 or WINDOW > 0:
            best_R, total_R, sum_RD, low_R = _walk(
                begin, stop, q_RD, best_R, total_R, sum_RD, low_R, all_R, k, v, k_scales, v_scales,
                k_lows, v_lows, table, position_R, low, high, scale_log2, kv_block, kv_slot,
                scale_block, scale_slot, HEAD_DIM, BLOCK_SIZE, BLOCK_N, CODES, WINDOW, third != 1,
                third != 1 and (WINDOW > 0 or PARTS), STAGES, PRECISION,
            )  # fmt: skip
        begin = stop
        stop = whole_end if third == 0 else end
    if CODES == 4:
        sum_RD += low_R[:, None]
    finished = True
    if PARTS:
        count = tl.load(record + 9)
        if count > 1:
            part = tl.load(record + 7) * NUM_KV_HEADS + head
            finished, total_R, sum_RD = _merge(
                part, partials, row_R, tl.load(record + 8), count, best_R, total_R, sum_RD,
                arrivals, part, BLOCK_M * (HEAD_DIM + 2), NUM_KV_HEADS, BLOCK_M, HEAD_DIM,
            )  # fmt: skip
    if finished:
        answer_RD = sum_RD / tl.where(total_R == 0.0, 1.0, total_R)[:, None]
        tl.store(
            out + (token_R * out_row + query_head_R * out_head)[:, None] + dim_D[None, :],
            answer_RD.to(out.dtype.element_ty),
            mask=asked_R1,
        )
