"""Paged decode attention in Triton: one launch, a fixed grid, any lengths.

The keys of a (request, KV head) are cut into tiles of `block_n` positions. All tiles of the batch,
in the order request, head, tile, are dealt out to the programs in equal contiguous ranges; which
range begins where is computed on the device once a step (`refresh`), so a captured graph holds for
any lengths. A program that has all tiles of a (request, head) writes the answer; otherwise it
leaves its part in the workspace, and the last one to arrive merges the parts in their order. Hence
results depend on the lengths of the whole batch in the last bits, but not on timing.
All query heads of a KV head, for all new tokens, are the rows of one product.

Launches that share a schedule must not overlap: the workspace and the counters are theirs in turn.
Letters: as in `paged_decode`; P programs, R rows of a product (Q * G and padding), U a tile's keys,
W parts that are merged at once.
"""
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ridgeline.errors import check
from ridgeline.kernels.arrival_triton import await_inputs
from ridgeline.kernels.launching import launches_early
from ridgeline.kernels.paged_decode import DecodeBatch
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

RECORD = 8  # int32 per program: request, head, tile, tiles to do, tiles of a full program, padding
MERGED_AT_ONCE = 8192  # float32 numbers of the workspace in registers
LEAST_ROWS = 16  # of tl.dot


@dataclass(frozen=True, slots=True)
class Config:
    """What tuning may change. `min_tiles`: a program has at least so many, if there are enough."""

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2
    min_tiles: int = 1


def choose_config(
    max_requests: int, rows: int = LEAST_ROWS, max_new: int = 1, head_dim: int = 128
) -> Config:
    """For one new token the best of a sweep on one H200 (32 and 8 heads of 128, contexts of 192 and
    2048): small tiles fill the device when requests are few, and hide latency when they are many.
    With several, what keeps sums of so many rows in registers and the tiles of all programs of a
    multiprocessor in shared memory (compiled for one, not timed)."""
    if rows > 64:
        return Config(64, 8, 2, 1, 1)
    if rows == 64 or (rows == 32 and max_requests <= 2):
        return Config(32, 4, 3, 2, 1)
    if max_new > 1 and max_requests > 2:
        return Config(64 if head_dim <= 128 else 32, 4, 2, 2, 2)
    if max_requests <= 2:
        return Config(32, 2, 3, 2, 1)
    if max_requests <= 64:
        return Config(128, 4, 2, 2, 2)
    return Config(64, 2, 2, 4, 2)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Shapes that are compiled in, and what the kernel writes beside its result."""

    config: Config
    num_kv_heads: int
    group: int  # G
    head_dim: int
    max_requests: int
    max_new: int
    num_programs: int
    records: torch.Tensor  # [P, RECORD] int32
    parts: torch.Tensor  # [2 * P, R, D] float32, not normalised
    best: torch.Tensor  # [2 * P, R] float32, greatest score, in powers of two
    total: torch.Tensor  # [2 * P, R] float32, sum of weights
    arrived: torch.Tensor  # [B * K] int32, zero between launches


def make_schedule(
    device: torch.device, *, num_heads: int, num_kv_heads: int, head_dim: int, max_requests: int,
    max_new: int, config: Config | None = None, num_programs: int | None = None,
) -> Schedule:  # fmt: skip
    """`num_programs` None: as many as the device runs at a time."""
    rows = num_rows(num_heads // num_kv_heads, max_new)
    config = config or choose_config(max_requests, rows, max_new, head_dim)
    check(num_heads % num_kv_heads == 0, "query heads are a multiple of KV heads")
    if num_programs is None:
        cores = torch.cuda.get_device_properties(device).multi_processor_count
        num_programs = cores * config.programs_per_sm

    def blank(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Schedule(
        config=config, num_kv_heads=num_kv_heads, group=num_heads // num_kv_heads,
        head_dim=head_dim, max_requests=max_requests, max_new=max_new, num_programs=num_programs,
        records=blank(num_programs, RECORD, dtype=torch.int32),
        parts=blank(2 * num_programs, rows, head_dim), best=blank(2 * num_programs, rows),
        total=blank(2 * num_programs, rows),
        arrived=blank(max_requests * num_kv_heads, dtype=torch.int32),
    )  # fmt: skip


def num_rows(group: int, max_new: int) -> int:
    return max(LEAST_ROWS, 1 << (group * max_new - 1).bit_length())


def refresh(schedule: Schedule, batch: DecodeBatch) -> None:
    """Deal out the tiles of these lengths: once a step and window, before the layers."""
    num_requests = batch.seq_lens_B.shape[0]
    check(num_requests <= schedule.max_requests, "more requests than the schedule has room for")
    schedule_kernel[(schedule.num_programs,)](
        batch.seq_lens_B, batch.query_start_B1, schedule.records, num_requests,
        NUM_KV_HEADS=schedule.num_kv_heads, WINDOW=batch.window or 0,
        BLOCK_N=schedule.config.block_n, BLOCK_B=1 << (num_requests - 1).bit_length(),
        MIN_TILES=schedule.config.min_tiles, RECORD=RECORD, MAX_NEW=batch.max_new, num_warps=4,
    )  # fmt: skip


def paged_decode_triton(
    q_THD: torch.Tensor,
    kv: PagedKV,
    batch: DecodeBatch,
    scale: float,
    schedule: Schedule,
    out_THD: torch.Tensor,
) -> None:
    check_cache(kv)
    check(q_THD.stride(2) == out_THD.stride(2) == 1, "rows of D are contiguous")
    k_NSKD, shape = kv.k_NSKD, (kv.k_NSKD.shape[2], kv.head_dim)
    check(shape == (schedule.num_kv_heads, schedule.head_dim), "the schedule's KV shape")
    check(q_THD.shape[1] == schedule.num_kv_heads * schedule.group, "the schedule's query heads")
    check(batch.max_new <= schedule.max_new, "no more new tokens than the schedule has room for")
    config, rows = schedule.config, schedule.best.shape[1]
    asked = 1 << (schedule.group * batch.max_new - 1).bit_length()
    _decode_kernel[(schedule.num_programs,)](
        q_THD, k_NSKD, kv.v_NSKD, *scaling(kv), out_THD, batch.block_tables_BM,
        batch.seq_lens_B if batch.rows_B is None else batch.rows_B, batch.seq_lens_B,
        batch.query_start_B1, schedule.records, schedule.parts, schedule.best, schedule.total,
        schedule.arrived, scale * math.log2(math.e), q_THD.stride(0), q_THD.stride(1),
        out_THD.stride(0), out_THD.stride(1), k_NSKD.stride(0), k_NSKD.stride(1), k_NSKD.stride(2),
        *scaling_strides(kv), batch.block_tables_BM.stride(0), batch.block_tables_BM.shape[1],
        NUM_KV_HEADS=schedule.num_kv_heads, GROUP=schedule.group, ROWS=rows,
        HEAD_DIM=schedule.head_dim, BLOCK_SIZE=k_NSKD.shape[1], BLOCK_N=config.block_n,
        CODES=kv.code_bits, WINDOW=batch.window or 0, NAMED_ROWS=batch.rows_B is not None,
        ASKED=asked, MERGE=max(1, MERGED_AT_ONCE // (asked * schedule.head_dim)),
        STAGES=config.num_stages, PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32",
        RECORD=RECORD, MAX_NEW=batch.max_new, PDL=launches_early(q_THD.device),
        num_warps=config.num_warps, num_stages=config.num_stages,
        launch_pdl=launches_early(q_THD.device),
    )  # fmt: skip


@triton.jit
def _tiles_of(
    length, num_new, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, UNREAD: tl.constexpr = 0
):
    """First visible key and number of tiles from its tile on; one tile if there is no key, so that
    somebody writes the zeros."""
    first_key = length * 0
    if WINDOW > 0:
        first_key = tl.maximum(length - num_new - WINDOW + 1, 0)
    tiles = (length - UNREAD + BLOCK_N - 1) // BLOCK_N - first_key // BLOCK_N
    return first_key, tl.maximum(tiles, 1)


@triton.jit
def sound_values(v_UD, known_U):
    """Those known to be, and those of numbers alone. What an unseen one weighs is 0, and 0 times
    NaN would be in the sum of those that do not see it."""
    wide_UD = tl.abs(v_UD.to(tl.float32))
    most_U = tl.max(tl.where(wide_UD < float("inf"), 0.0, 1.0), 1)
    return known_U | (most_U == 0.0)


@triton.jit
def _own_piece(all_B, share, longest, num_programs, WHOLE: tl.constexpr, UNEVEN: tl.constexpr):
    """Tiles of a piece with which no program has two requests; 0: there is none."""
    piece = share * 0
    for i in tl.static_range(UNEVEN // 4 + 1):
        tried = tl.maximum((share + UNEVEN - 4 * i) // 4 * 4, share)
        fits = tl.sum((all_B + tried - 1) // tried, 0) <= num_programs
        piece = tl.where(fits, tried, piece)
    num_requests = tl.sum((all_B > 0).to(tl.int32), 0)
    is_short = (longest <= WHOLE) & (num_requests <= num_programs)
    return tl.where(is_short, WHOLE, piece)


@triton.jit
def schedule_kernel(
    seq_lens, query_start, records, num_requests, NUM_KV_HEADS: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, MIN_TILES: tl.constexpr, RECORD: tl.constexpr,
    MAX_NEW: tl.constexpr, WHOLE: tl.constexpr = 0, SLACK: tl.constexpr = 0,
    UNEVEN: tl.constexpr = 0, UNREAD: tl.constexpr = 0, tables=None, table_rows=None, table_row=0,
    BLOCK_SIZE: tl.constexpr = 0, HEAD: tl.constexpr = 0,
):  # fmt: skip
    """Where the range of tiles of each program begins; every program adds up all the lengths.

    Cuts cost a merge, and a range with the end of one request and the begin of the next two of
    them. Where there are programs enough, each request has its own: one, if none has more than
    WHOLE tiles, else as many as take equal pieces, of up to UNEVEN tiles more than if all were
    shared evenly. Else, where all are about as long as the longest, and that has no more than
    WHOLE, a program gets at least as many tiles as it. Where they are just as long, it gets up to
    SLACK tiles more if that leaves all whole. The last UNREAD tokens are in no tile.

    With HEAD, a record also has what is known of the request that its range begins with: length,
    first token, token after its last, row of the table, and the blocks of HEAD tiles from here."""
    program = tl.program_id(0)
    request_B = tl.arange(0, BLOCK_B)
    known_B = request_B < num_requests
    length_B = tl.load(seq_lens + request_B, mask=known_B, other=0)
    start_B = tl.load(query_start + request_B, mask=known_B, other=0)
    stop_B = tl.load(query_start + request_B + 1, mask=known_B, other=0)
    num_new_B = tl.minimum(stop_B - start_B, MAX_NEW)
    _, tiles_B = _tiles_of(length_B, num_new_B, WINDOW, BLOCK_N, UNREAD)
    all_B = tl.where(known_B, tiles_B * NUM_KV_HEADS, 0)
    end_B = tl.cumsum(all_B, 0)
    everything = tl.sum(all_B, 0)
    num_programs = tl.num_programs(0)
    share = tl.maximum((everything + num_programs - 1) // num_programs, MIN_TILES)
    longest = tl.max(all_B, 0)
    num_real = tl.sum((known_B & (length_B > 0)).to(tl.int32), 0)
    alike = (longest <= WHOLE) & (4 * num_real * longest <= 5 * everything)
    share = tl.where(alike, tl.maximum(share, longest), share)
    whole = (num_requests + num_programs - 1) // num_programs * longest
    fits = (everything == num_requests * longest) & (whole > share) & (whole <= share + SLACK)
    share = tl.where(fits, whole, share)
    first = program * share
    before_B = end_B <= first
    request = tl.sum(before_B.to(tl.int32), 0)
    inside = first - tl.sum(tl.where(before_B, all_B, 0), 0)
    count = tl.minimum(share, tl.maximum(everything - first, 0))
    if WHOLE > 0:
        piece = _own_piece(all_B, share, longest, num_programs, WHOLE, UNEVEN)
        pieces_B = (all_B + piece - 1) // tl.maximum(piece, 1)
        end_B = tl.cumsum(pieces_B, 0)
        before_B = end_B <= program
        number = program - tl.sum(tl.where(before_B, pieces_B, 0), 0)
        own = tl.sum(before_B.to(tl.int32), 0)
        left = tl.sum(tl.where(request_B == own, all_B, 0), 0) - number * piece
        is_own = piece > 0
        request = tl.where(is_own, own, request)
        inside = tl.where(is_own, number * piece, inside)
        count = tl.where(is_own, tl.minimum(piece, tl.maximum(left, 0)), count)
        share = tl.where(is_own, piece, share)
    tiles = tl.maximum(tl.sum(tl.where(request_B == request, tiles_B, 0), 0), 1)
    record = records + program * RECORD
    tl.store(record, request)
    tl.store(record + 1, inside // tiles)
    tl.store(record + 2, inside % tiles)
    tl.store(record + 3, count)
    tl.store(record + 4, share)
    if HEAD > 0:
        is_it_B = request_B == request
        length = tl.sum(tl.where(is_it_B, length_B, 0), 0)
        first_new = tl.sum(tl.where(is_it_B, start_B, 0), 0)
        after = tl.sum(tl.where(is_it_B, stop_B, 0), 0)
        new = tl.minimum(after - first_new, MAX_NEW)
        first_key, _ = _tiles_of(length, new, WINDOW, BLOCK_N, UNREAD)
        row = request
        if table_rows is not None:
            row = tl.load(table_rows + request, mask=request < num_requests, other=0).to(tl.int32)
        ahead_H = tl.arange(0, HEAD)
        tile_H = first_key // BLOCK_N + inside % tiles + ahead_H
        places_H = tables + row.to(tl.int64) * table_row + tile_H * BLOCK_N // BLOCK_SIZE
        block_H = tl.load(places_H, mask=tile_H * BLOCK_N < length, other=0)
        tl.store(record + 5, length)
        tl.store(record + 6, first_new)
        tl.store(record + 7, after)
        tl.store(record + 8, row)
        tl.store(record + 9 + ahead_H, block_H)


@triton.jit
def _decode_kernel(
    q, k, v, k_scales, v_scales, k_lows, v_lows, out, tables, table_rows, seq_lens, query_start,
    records, parts, best_parts, total_parts, arrived, scale_log2, q_row, q_head, out_row, out_head,
    kv_block, kv_slot, kv_head, scale_block, scale_slot, scale_head, table_row, table_width,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, CODES: tl.constexpr, WINDOW: tl.constexpr,
    NAMED_ROWS: tl.constexpr, ASKED: tl.constexpr, MERGE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, RECORD: tl.constexpr, MAX_NEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    program = tl.program_id(0)
    record = records + program * RECORD
    request = tl.load(record)
    head = tl.load(record + 1)
    tile = tl.load(record + 2)
    left = tl.load(record + 3)
    share = tl.load(record + 4)
    done = left * 0

    row_R = tl.arange(0, ROWS)
    new_R = row_R // GROUP
    member_R = row_R % GROUP
    dim_D = tl.arange(0, HEAD_DIM)
    code_D, shift_D = place_of_code(dim_D, HEAD_DIM, CODES)
    place_U = tl.arange(0, BLOCK_N)

    while left > 0:
        length = tl.load(seq_lens + request)
        first_row = tl.load(query_start + request)
        num_new = tl.minimum(tl.load(query_start + request + 1) - first_row, MAX_NEW)
        first_key, tiles = _tiles_of(length, num_new, WINDOW, BLOCK_N)
        count = tl.minimum(left, tiles - tile)
        asked_R1 = (new_R < num_new)[:, None]
        token_R = (first_row + new_R).to(tl.int64)
        query_head_R = head * GROUP + member_R
        q_RD = tl.load(
            q + (token_R * q_row + query_head_R * q_head)[:, None] + dim_D[None, :],
            mask=asked_R1,
            other=0.0,
        )
        q_RD = as_factor(q_RD, k)
        low_R = tl.zeros((ROWS,), tl.float32)
        all_R = low_R
        if CODES == 4:
            q_RD = rotated(q_RD, HEAD_DIM, PRECISION)
            all_R = tl.sum(q_RD.to(tl.float32), 1) * scale_log2
        position_R = length - num_new + new_R
        best_R = tl.full((ROWS,), float("-inf"), tl.float32)
        total_R = tl.zeros((ROWS,), tl.float32)
        sum_RD = tl.zeros((ROWS, HEAD_DIM), tl.float32)
        begin = first_key // BLOCK_N + tile
        named = request.to(tl.int64)
        if NAMED_ROWS:
            named = tl.load(table_rows + request).to(tl.int64)
        table = tables + named * table_row
        for i in tl.range(begin, begin + count, num_stages=STAGES):
            key_U = i * BLOCK_N + place_U
            inside_U = (key_U >= first_key) & (key_U < length)
            has_block_U = inside_U
            if MAX_NEW > 1:
                has_block_U = inside_U & (key_U // BLOCK_SIZE < table_width)
            block_U = tl.load(table + key_U // BLOCK_SIZE, mask=has_block_U, other=0).to(tl.int64)
            slot_U = block_U * kv_block + (key_U % BLOCK_SIZE) * kv_slot + head * kv_head
            slot_UD = slot_U[:, None] + code_D[None, :]
            k_UD = numbers(tl.load(k + slot_UD, inside_U[:, None], 0.0), shift_D, q_RD, CODES)
            v_UD = numbers(tl.load(v + slot_UD, inside_U[:, None], 0.0), shift_D, q_RD, CODES)
            score_RU = tl.dot(q_RD, tl.trans(k_UD), input_precision=PRECISION) * scale_log2
            if CODES > 0:
                at_U = block_U * scale_block + (key_U % BLOCK_SIZE) * scale_slot + head * scale_head
                k_scale_U = tl.load(k_scales + at_U, inside_U, 0.0).to(tl.float32)
                score_RU *= k_scale_U[None, :]
                v_scale_U = tl.load(v_scales + at_U, inside_U, 0.0).to(tl.float32)
                if CODES == 4:
                    k_low_U = low_of(tl.load(k_lows + at_U, inside_U, 0.0), k_scale_U)
                    score_RU += all_R[:, None] * k_low_U[None, :]
            seen_RU = inside_U[None, :] & (key_U[None, :] <= position_R[:, None])
            if WINDOW > 0:
                seen_RU = seen_RU & (key_U[None, :] > position_R[:, None] - WINDOW)
            score_RU = tl.where(seen_RU, score_RU, float("-inf"))
            # Of the new tokens' own keys, those of drafts without a block may be anything.
            if MAX_NEW > 1:
                seen_by_all = length - num_new + 1
                if (i + 1) * BLOCK_N > seen_by_all:
                    sound_U = sound_values(v_UD, key_U < seen_by_all)
                    if CODES > 0:
                        sound_U = sound_U & (tl.abs(v_scale_U) < float("inf"))
                        if CODES == 4:
                            its_low_U = tl.load(v_lows + at_U, inside_U, 0.0).to(tl.float32)
                            sound_U = sound_U & (tl.abs(its_low_U) < float("inf"))
                        v_scale_U = tl.where(sound_U, v_scale_U, 0.0)
                    v_UD = tl.where(sound_U[:, None], v_UD, 0.0).to(v_UD.dtype)
                    unsound_RU = seen_RU & ~sound_U[None, :]
                    score_RU = tl.where(unsound_RU, float("nan"), score_RU)
            most_RU = score_RU
            if CODES > 0:
                most_RU = score_RU + level_of_scales(v_scale_U)[None, :]
            new_best_R = tl.maximum(best_R, tl.max(most_RU, 1))
            # A row that has seen nothing subtracts 0, and stays at zero instead of becoming NaN.
            level_R = tl.where(new_best_R == float("-inf"), 0.0, new_best_R)
            weight_RU = tl.exp2(score_RU - level_R[:, None])
            fade_R = tl.exp2(best_R - level_R)
            total_R = total_R * fade_R + tl.sum(weight_RU, 1)
            if CODES == 4:
                v_low_U = low_of(tl.load(v_lows + at_U, inside_U, 0.0), v_scale_U)
                if MAX_NEW > 1:
                    v_low_U = tl.where(tl.abs(v_low_U) < float("inf"), v_low_U, 0.0)
                low_R = low_R * fade_R + tl.sum(weight_RU * v_low_U[None, :], 1)
            if CODES > 0:
                weight_RU *= v_scale_U[None, :]
            sum_RD = tl.dot(
                weight_RU.to(v_UD.dtype),
                v_UD,
                acc=sum_RD * fade_R[:, None],
                input_precision=PRECISION,
            )
            best_R = new_best_R
        if CODES == 4:
            sum_RD += low_R[:, None]

        if count == tiles:
            answer_RD = sum_RD / tl.where(total_R == 0.0, 1.0, total_R)[:, None]
            tl.store(
                out + (token_R * out_row + query_head_R * out_head)[:, None] + dim_D[None, :],
                answer_RD.to(out.dtype.element_ty),
                mask=asked_R1,
            )
        else:
            slot = 2 * program + (done > 0).to(tl.int32)
            here_R = slot * ROWS + row_R
            tl.store(best_parts + here_R, best_R, cache_modifier=".cg")
            tl.store(total_parts + here_R, total_R, cache_modifier=".cg")
            tl.store(
                parts + here_R[:, None] * HEAD_DIM + dim_D[None, :],
                sum_RD,
                mask=asked_R1,
                cache_modifier=".cg",
            )
            # All threads have stored before the one that counts releases what they stored.
            tl.debug_barrier()
            start = program * share + done - tile  # of this request and head, among all tiles
            first_program = start // share
            pieces = (start + tiles - 1) // share - first_program + 1
            counter = arrived + request * NUM_KV_HEADS + head
            if tl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1:
                tl.store(counter, 0)
                # Rows of padding, of which a product has many, are left out here.
                row_A = tl.arange(0, ASKED)
                late = (start > first_program * share).to(tl.int32)
                best_A = tl.full((ASKED,), float("-inf"), tl.float32)
                total_A = tl.zeros((ASKED,), tl.float32)
                sum_AD = tl.zeros((ASKED, HEAD_DIM), tl.float32)
                for j in range(0, pieces, MERGE):
                    piece_W = j + tl.arange(0, MERGE)
                    slot_W = 2 * (first_program + piece_W) + tl.where(piece_W == 0, late, 0)
                    there_WA = slot_W[:, None] * ROWS + row_A[None, :]
                    known_W1 = (piece_W < pieces)[:, None]
                    best_WA = tl.load(
                        best_parts + there_WA, known_W1, float("-inf"), cache_modifier=".cg"
                    )
                    total_WA = tl.load(total_parts + there_WA, known_W1, 0.0, cache_modifier=".cg")
                    part_WAD = tl.load(
                        parts + there_WA[:, :, None] * HEAD_DIM + dim_D[None, None, :],
                        known_W1[:, :, None] & (row_A // GROUP < num_new)[None, :, None],
                        0.0,
                        cache_modifier=".cg",
                    )
                    new_best_A = tl.maximum(best_A, tl.max(best_WA, 0))
                    level_A = tl.where(new_best_A == float("-inf"), 0.0, new_best_A)
                    fade_WA = tl.exp2(best_WA - level_A[None, :])
                    fade_A = tl.exp2(best_A - level_A)
                    total_A = total_A * fade_A + tl.sum(total_WA * fade_WA, 0)
                    sum_AD = sum_AD * fade_A[:, None] + tl.sum(part_WAD * fade_WA[:, :, None], 0)
                    best_A = new_best_A
                answer_AD = sum_AD / tl.where(total_A == 0.0, 1.0, total_A)[:, None]
                token_A = (first_row + row_A // GROUP).to(tl.int64)
                query_head_A = head * GROUP + row_A % GROUP
                tl.store(
                    out + (token_A * out_row + query_head_A * out_head)[:, None] + dim_D[None, :],
                    answer_AD.to(out.dtype.element_ty),
                    mask=(row_A // GROUP < num_new)[:, None],
                )

        left -= count
        done += count
        tile = tile * 0
        head += 1
        if head == NUM_KV_HEADS:
            head = head * 0
            request += 1
