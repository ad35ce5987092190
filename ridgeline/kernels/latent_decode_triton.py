"""Latent attention of a few new tokens, on a GPU: the keys of a request are split over programs,
whose sums a second kernel merges. Of very few tokens the products before and behind are ours, too:
a library's kernels begin only when all before them have ended.

A program takes some rows (a query token and a head each) of a request over its share of the keys: a
tile of cached vectors is loaded once, as keys and as values. How many shares there are depends on
the shapes alone, so that a step can be captured. Letters as in `latent_decode`; U keys of a tile, Q
rows of a program, X splits, Y of them that are loaded together.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ridgeline.errors import check
from ridgeline.kernels.arrival_triton import await_inputs
from ridgeline.kernels.latent_decode import LatentQueries
from ridgeline.kernels.launching import launches_early
from ridgeline.kernels.paged_decode import DecodeBatch

LOG2_E = 1.4426950408889634
MOST_SPLITS = 64
ABSORBED = 64  # numbers of a query that a program computes
VALUES = 16  # of a head, of a program that merges splits
MERGED = 8  # splits that it loads together
WAVES = 2  # programs for each multiprocessor, where there are enough keys


@dataclass(frozen=True, slots=True)
class LatentWork:
    """Scratch for up to so many tokens in so many splits, shared by layers that run one after the
    other."""

    splits: int
    sums_TXHC: torch.Tensor
    logs_TXH: torch.Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    keys: int
    warps: int
    stages: int


def tile_for(num_rows: int, itemsize: int) -> Tile:
    """By the rows of a request, as measured on an H100 with 16 and 128 heads."""
    rows = min(64, max(16, triton.next_power_of_2(num_rows)))
    if itemsize == 4:
        return Tile(16, 16, 4, 1)
    return Tile(64, 64, 8, 1) if rows == 64 else Tile(rows, 32, 4, 2)


def make_work(
    device: torch.device, *, num_heads: int, size: int, max_requests: int, max_new: int
) -> LatentWork:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return work_of(
        device,
        num_heads=num_heads,
        size=size,
        max_requests=max_requests,
        max_new=max_new,
        processors=processors,
    )


def work_of(
    device: torch.device,
    *,
    num_heads: int,
    size: int,
    max_requests: int,
    max_new: int,
    processors: int,
) -> LatentWork:
    """For a device with so many processors."""
    rows = max_new * num_heads
    programs = max_requests * triton.cdiv(rows, min(64, max(16, triton.next_power_of_2(rows))))
    splits = min(MOST_SPLITS, max(1, WAVES * processors // programs))
    tokens = max_requests * max_new if splits > 1 else 0
    with torch.inference_mode(mode=False):
        return LatentWork(
            splits,
            torch.empty(tokens, splits, num_heads, size, dtype=torch.float32, device=device),
            torch.empty(tokens, splits, num_heads, dtype=torch.float32, device=device),
        )


def latent_decode_triton(
    q: LatentQueries,
    cache_NSW: torch.Tensor,
    batch: DecodeBatch,
    scale: float,
    work: LatentWork,
) -> torch.Tensor:
    tokens, heads, size = q.latent_THC.shape
    # Heads first, as the products in front and behind have them.
    out_THC = q.latent_THC.new_empty((heads, tokens, size)).transpose(0, 1)
    _launch_decode(q, cache_NSW, batch, scale, work, out_THC)
    if work.splits > 1:
        _merge(work, out_THC, None, launches_early(out_THC.device))
    return out_THC


def _launch_decode(
    q: LatentQueries,
    cache_NSW: torch.Tensor,
    batch: DecodeBatch,
    scale: float,
    work: LatentWork,
    out_THC: torch.Tensor,
) -> None:
    """Into `out_THC`, or with several splits into the scratch."""
    q_THC, q_THR = q.latent_THC, q.rotated_THR
    _, heads, size = q_THC.shape
    rows = batch.max_new * heads
    tile = tile_for(rows, q_THC.element_size())
    num_requests, splits = len(batch.seq_lens_B), work.splits
    sums, logs = (out_THC, out_THC) if splits == 1 else (work.sums_TXHC, work.logs_TXH)
    tables, pdl = batch.block_tables_BM, launches_early(q_THC.device)
    _decode_kernel[(num_requests, triton.cdiv(rows, tile.rows), splits)](
        q_THC, q_THR, cache_NSW, out_THC, sums, logs, tables, batch.rows_B, batch.seq_lens_B,
        batch.query_start_B1, scale * LOG2_E, q_THC.stride(0), q_THC.stride(1), q_THR.stride(0),
        q_THR.stride(1), out_THC.stride(0), out_THC.stride(1), cache_NSW.stride(0),
        cache_NSW.stride(1), tables.stride(0), tables.shape[1], HEADS=heads, SIZE=size,
        ROTATED=q_THR.shape[2], BLOCK_C=max(16, triton.next_power_of_2(size)),
        BLOCK_R=max(16, triton.next_power_of_2(q_THR.shape[2])), BLOCK_SIZE=cache_NSW.shape[1],
        ROWS=tile.rows, BLOCK_U=tile.keys, SPLITS=splits, MAX_NEW=batch.max_new,
        PRECISION="ieee" if q_THC.dtype == torch.float32 else "tf32", PDL=pdl, num_warps=tile.warps,
        num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip


def latent_attend_triton(
    q_THD: torch.Tensor,
    keys_HPC: torch.Tensor,
    values_HVC: torch.Tensor,
    cache_NSW: torch.Tensor,
    batch: DecodeBatch,
    scale: float,
    work: LatentWork,
) -> torch.Tensor:
    """[T, H, V]: see `latent_attend`. The work must have several splits."""
    (tokens, heads, _), (_, plain, size) = q_THD.shape, keys_HPC.shape
    check(work.splits > 1, "values are computed by who merges splits", splits=work.splits)
    q_THC, pdl = q_THD.new_empty(tokens, heads, size), launches_early(q_THD.device)
    _absorb_kernel[(heads, triton.cdiv(size, ABSORBED))](
        q_THD, keys_HPC, q_THC, tokens, q_THD.stride(0), q_THD.stride(1), keys_HPC.stride(0),
        keys_HPC.stride(1), HEADS=heads, PLAIN=plain, SIZE=size,
        BLOCK_P=triton.next_power_of_2(plain), BLOCK_C=ABSORBED, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    queries = LatentQueries(q_THC, q_THD[..., plain:])
    _launch_decode(queries, cache_NSW, batch, scale, work, q_THC)
    out_THV = q_THD.new_empty(tokens, heads, values_HVC.shape[1])
    _merge(work, out_THV, values_HVC, pdl)
    return out_THV


def _merge(work: LatentWork, out: torch.Tensor, values_HVC: torch.Tensor | None, pdl: bool) -> None:
    """What the splits have left, into [T, H, C]; or its values, into [T, H, V]."""
    (tokens, heads, width), (_, splits, _, size) = out.shape, work.sums_TXHC.shape
    rows = 1 if values_HVC is None else VALUES
    strides = (0, 0) if values_HVC is None else values_HVC.stride()[:2]
    _merge_kernel[(tokens, heads, 1 if values_HVC is None else triton.cdiv(width, rows))](
        work.sums_TXHC, work.logs_TXH, values_HVC, out, out.stride(0), out.stride(1), *strides,
        HEADS=heads, SIZE=size, WIDTH=width, BLOCK_C=max(16, triton.next_power_of_2(size)),
        BLOCK_V=rows, SPLITS=splits, BLOCK_X=triton.next_power_of_2(splits),
        STEP=min(MERGED, triton.next_power_of_2(splits)), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _decode_kernel(
    q, q_rotated, cache, out, sums, logs, tables, table_rows, seq_lens, query_start, scale_log2,
    q_token, q_head, r_token, r_head, out_token, out_head, cache_block, cache_slot, table_row,
    table_width, HEADS: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_U: tl.constexpr, SPLITS: tl.constexpr, MAX_NEW: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    request = tl.program_id(0)
    split = tl.program_id(2)
    length = tl.load(seq_lens + request)
    first_row = tl.load(query_start + request)
    num_new = tl.minimum(tl.load(query_start + request + 1) - first_row, MAX_NEW)
    row_Q = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    new_Q = row_Q // HEADS
    head_Q = row_Q % HEADS
    asked_Q1 = (new_Q < num_new)[:, None]
    token_Q = (first_row + new_Q).to(tl.int64)
    place_C = tl.arange(0, BLOCK_C)
    place_R = tl.arange(0, BLOCK_R)
    in_C = place_C < SIZE
    in_R = place_R < ROTATED
    q_QC = tl.load(
        q + (token_Q * q_token + head_Q * q_head)[:, None] + place_C[None, :],
        mask=asked_Q1 & in_C[None, :],
        other=0.0,
    )
    q_QR = tl.load(
        q_rotated + (token_Q * r_token + head_Q * r_head)[:, None] + place_R[None, :],
        mask=asked_Q1 & in_R[None, :],
        other=0.0,
    )
    named = request.to(tl.int64)
    if table_rows is not None:
        named = tl.load(table_rows + request).to(tl.int64)
    table = tables + named * table_row
    tiles = (length + BLOCK_U - 1) // BLOCK_U
    share = (tiles + SPLITS - 1) // SPLITS * BLOCK_U
    begin = split * share
    end = tl.minimum(begin + share, length)
    position_Q = length - num_new + new_Q
    best_Q = tl.full((ROWS,), float("-inf"), tl.float32)
    total_Q = tl.zeros((ROWS,), tl.float32)
    sum_QC = tl.zeros((ROWS, BLOCK_C), tl.float32)
    place_U = tl.arange(0, BLOCK_U)
    for first in tl.range(begin, end, BLOCK_U):
        key_U = first + place_U
        inside_U = key_U < end
        has_block_U = inside_U & (key_U // BLOCK_SIZE < table_width)
        block_U = tl.load(table + key_U // BLOCK_SIZE, mask=has_block_U, other=0).to(tl.int64)
        slot_U = block_U * cache_block + (key_U % BLOCK_SIZE) * cache_slot
        at_UC = cache + slot_U[:, None] + place_C[None, :]
        key_UC = tl.load(at_UC, mask=inside_U[:, None] & in_C[None, :], other=0.0).to(q_QC.dtype)
        at_UR = cache + SIZE + slot_U[:, None] + place_R[None, :]
        key_UR = tl.load(at_UR, mask=inside_U[:, None] & in_R[None, :], other=0.0).to(q_QC.dtype)
        score_QU = tl.dot(q_QR, tl.trans(key_UR), input_precision=PRECISION)
        score_QU = tl.dot(q_QC, tl.trans(key_UC), score_QU, input_precision=PRECISION) * scale_log2
        seen_QU = inside_U[None, :] & (key_U[None, :] <= position_Q[:, None])
        score_QU = tl.where(seen_QU, score_QU, float("-inf"))
        new_best_Q = tl.maximum(best_Q, tl.max(score_QU, 1))
        reference_Q = tl.where(new_best_Q == float("-inf"), 0.0, new_best_Q)
        weight_QU = tl.exp2(score_QU - reference_Q[:, None])
        fade_Q = tl.exp2(best_Q - reference_Q)
        total_Q = total_Q * fade_Q + tl.sum(weight_QU, 1)
        if MAX_NEW > 1:  # what is not cached yet may be NaN, and 0 times that is NaN
            key_UC = tl.where(key_UC == key_UC, key_UC, 0.0)
        sum_QC = tl.dot(
            weight_QU.to(q_QC.dtype), key_UC, sum_QC * fade_Q[:, None], input_precision=PRECISION
        )
        best_Q = new_best_Q
    whole_Q = tl.where(total_Q == 0.0, 1.0, total_Q)
    mixed_QC = sum_QC / whole_Q[:, None]
    stored_QC = asked_Q1 & in_C[None, :]
    if SPLITS == 1:
        place_Q = token_Q * out_token + head_Q * out_head
        tl.store(out + place_Q[:, None] + place_C[None, :], mixed_QC.to(q_QC.dtype), mask=stored_QC)
    else:
        part_Q = (token_Q * SPLITS + split) * HEADS + head_Q
        tl.store(sums + part_Q[:, None] * SIZE + place_C[None, :], mixed_QC, mask=stored_QC)
        log_Q = tl.where(total_Q == 0.0, float("-inf"), best_Q + tl.log2(whole_Q))
        tl.store(logs + part_Q, log_Q, mask=new_Q < num_new)


@triton.jit(do_not_specialize=["tokens"])
def _absorb_kernel(
    q, keys, out, tokens, q_token, q_head, key_head, key_row, HEADS: tl.constexpr,
    PLAIN: tl.constexpr, SIZE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Queries of latent vectors: some columns of a head, for all tokens. Its weights are there
    whatever runs before, so they are loaded before it has ended."""
    head = tl.program_id(0)
    place_P = tl.arange(0, BLOCK_P)
    place_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_P, in_C = place_P < PLAIN, place_C < SIZE
    key_PC = tl.load(
        keys + head.to(tl.int64) * key_head + place_P[:, None] * key_row + place_C[None, :],
        mask=in_P[:, None] & in_C[None, :],
        other=0.0,
    )
    await_inputs(PDL)
    for token in range(tokens):
        q_P = tl.load(q + token * q_token + head * q_head + place_P, mask=in_P, other=0.0)
        sum_C = tl.sum(q_P.to(tl.float32)[:, None] * key_PC.to(tl.float32), 0)
        place = out + (token * HEADS + head) * SIZE + place_C
        tl.store(place, sum_C.to(out.dtype.element_ty), mask=in_C)


@triton.jit
def _merge_kernel(
    sums, logs, values, out, out_token, out_head, value_head, value_row, HEADS: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_X: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a token and a head: all that its splits mixed; with `values` some of its values. Splits
    without keys are not read, the others are loaded `STEP` at a time, none behind another."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place_C = tl.arange(0, BLOCK_C)
    in_C = place_C < SIZE
    place_V = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    if values is not None:
        value_VC = tl.load(
            values + head.to(tl.int64) * value_head + place_V[:, None] * value_row
            + place_C[None, :],
            mask=(place_V < WIDTH)[:, None] & in_C[None, :],
            other=0.0,
        )  # fmt: skip
    await_inputs(PDL)
    split_X = tl.arange(0, BLOCK_X)
    part = token * SPLITS * HEADS + head
    log_X = tl.load(logs + part + split_X * HEADS, mask=split_X < SPLITS, other=float("-inf"))
    best = tl.max(log_X, 0)
    best = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.exp2(log_X - best), 0)
    whole = tl.where(total == 0.0, 1.0, total)
    sum_YC = tl.zeros((STEP, BLOCK_C), tl.float32)
    for first in tl.static_range(0, BLOCK_X, STEP):
        split_Y = first + tl.arange(0, STEP)
        log_Y = tl.load(logs + part + split_Y * HEADS, mask=split_Y < SPLITS, other=float("-inf"))
        has_keys_Y = (log_Y > float("-inf")) | (log_Y != log_Y)
        at_Y = sums + (part + split_Y * HEADS) * SIZE
        mixed_YC = tl.load(
            at_Y[:, None] + place_C[None, :], mask=has_keys_Y[:, None] & in_C[None, :], other=0.0
        )
        sum_YC += mixed_YC * (tl.exp2(log_Y - best) / whole)[:, None]
    mixed_C = tl.sum(sum_YC, 0)
    place = out + token * out_token + head * out_head
    if values is None:
        tl.store(place + place_C, mixed_C.to(out.dtype.element_ty), mask=in_C)
    else:
        sum_V = tl.sum(value_VC.to(tl.float32) * mixed_C[None, :], 1)
        tl.store(place + place_V, sum_V.to(out.dtype.element_ty), mask=place_V < WIDTH)


def write_latent_triton(
    kv_TW: torch.Tensor, q_THR: torch.Tensor, weight_C: torch.Tensor, eps: float,
    table_L2R: torch.Tensor, positions_T: torch.Tensor, slots_T: torch.Tensor,
    cache_NSW: torch.Tensor, *, interleaved: bool,
) -> None:  # fmt: skip
    """See `write_latent_reference`."""
    tokens, heads, rotated = q_THR.shape
    size, half = len(weight_C), rotated // 2
    block_heads = min(triton.next_power_of_2(heads), 16)
    pdl = launches_early(kv_TW.device)
    _write_kernel[(tokens, 1 + triton.cdiv(heads, block_heads))](
        kv_TW, q_THR, weight_C, table_L2R, positions_T, slots_T, cache_NSW, eps, kv_TW.stride(0),
        q_THR.stride(0), q_THR.stride(1), cache_NSW.stride(1), HEADS=heads, SIZE=size, HALF=half,
        BLOCK_C=triton.next_power_of_2(size), BLOCK_F=triton.next_power_of_2(half),
        BLOCK_H=block_heads, NEXT=1 if interleaved else half, STEP=2 if interleaved else 1,
        LARGEST=torch.finfo(cache_NSW.dtype).max if cache_NSW.dtype.itemsize == 1 else 0.0, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _write_kernel(
    kv, q, weight, table, positions, slots, cache, eps, kv_token, q_token, q_head, cache_slot,
    HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_H: tl.constexpr, NEXT: tl.constexpr, STEP: tl.constexpr,
    LARGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    pair_F = tl.arange(0, BLOCK_F)
    in_F = pair_F < HALF
    angle = table + tl.load(positions + token) * 4 * HALF
    cos_F = tl.load(angle + pair_F, mask=in_F, other=0.0)
    sin_F = tl.load(angle + 3 * HALF + pair_F, mask=in_F, other=0.0)
    if part == 0:
        place_C = tl.arange(0, BLOCK_C)
        in_C = place_C < SIZE
        row = kv + token * kv_token
        x_C = tl.load(row + place_C, mask=in_C, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x_C * x_C, 0) / SIZE + eps)
        y_C = x_C * scale * tl.load(weight + place_C, mask=in_C, other=0.0).to(tl.float32)
        at = row + SIZE + pair_F * STEP
        first_F = tl.load(at, mask=in_F, other=0.0).to(tl.float32)
        second_F = tl.load(at + NEXT, mask=in_F, other=0.0).to(tl.float32)
        low_F = first_F * cos_F - second_F * sin_F
        high_F = second_F * cos_F + first_F * sin_F
        if LARGEST > 0:
            y_C = tl.minimum(tl.maximum(y_C, -LARGEST), LARGEST)
            low_F = tl.minimum(tl.maximum(low_F, -LARGEST), LARGEST)
            high_F = tl.minimum(tl.maximum(high_F, -LARGEST), LARGEST)
        slot = cache + tl.load(slots + token) * cache_slot
        tl.store(slot + place_C, y_C.to(cache.dtype.element_ty), mask=in_C)
        tl.store(slot + SIZE + pair_F, low_F.to(cache.dtype.element_ty), mask=in_F)
        tl.store(slot + SIZE + HALF + pair_F, high_F.to(cache.dtype.element_ty), mask=in_F)
    else:
        head_H = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        in_HF = (head_H < HEADS)[:, None] & in_F[None, :]
        row_H1 = q + token * q_token + (head_H * q_head)[:, None]
        at_HF = row_H1 + pair_F[None, :] * STEP
        first_HF = tl.load(at_HF, mask=in_HF, other=0.0).to(tl.float32)
        second_HF = tl.load(at_HF + NEXT, mask=in_HF, other=0.0).to(tl.float32)
        low_HF = first_HF * cos_F[None, :] - second_HF * sin_F[None, :]
        high_HF = second_HF * cos_F[None, :] + first_HF * sin_F[None, :]
        tl.debug_barrier()  # what one thread reads, another one may write
        out_HF = row_H1 + pair_F[None, :]
        tl.store(out_HF, low_HF.to(q.dtype.element_ty), mask=in_HF)
        tl.store(out_HF + HALF, high_HF.to(q.dtype.element_ty), mask=in_HF)
