"""The kernels of `kernels.drafts` in Triton: rows are lanes. Who writes what lanes of the same
program read waits for them first."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ridgeline.errors import check
from ridgeline.kernels.arrival_triton import await_inputs
from ridgeline.kernels.drafts import History
from ridgeline.kernels.launching import launches_early
from ridgeline.kernels.step_inputs import StepInputs

BLOCK = 64

_COUNTS = tl.constexpr(3)  # of a row of `accept`, before its tokens


def _check_whole(*tensors: torch.Tensor) -> None:
    for x in tensors:
        is_known = x.dtype == torch.int64 and x.is_contiguous()
        check(is_known, "contiguous int64", dtype=x.dtype, shape=tuple(x.shape))


def check_history(history: History) -> None:
    check(history.tokens_NL.dtype == torch.int32, "tokens of 32 bits")
    check(history.tokens_NL.stride(1) == 1, "contiguous rows of tokens")
    _check_whole(history.lens_N, history.found_N)


def _check_tables(tables_gNM: torch.Tensor, fresh_XB: torch.Tensor | None) -> None:
    is_known = tables_gNM.dtype == torch.int32 and tables_gNM.is_contiguous()
    check(is_known, "contiguous tables of 32 bits", dtype=tables_gNM.dtype)
    if fresh_XB is not None:
        _check_whole(fresh_XB)
        check(len(fresh_XB) == 2 * len(tables_gNM), "two lines for each KV group")


def enter_blocks_triton(
    rows_B: torch.Tensor, fresh_XB: torch.Tensor, tables_gNM: torch.Tensor
) -> None:
    """A step begins with it, so there is no kernel before it to begin early beside."""
    _check_whole(rows_B)
    _check_tables(tables_gNM, fresh_XB)
    num_rows = len(rows_B)
    _enter_blocks[(triton.cdiv(num_rows, BLOCK),)](
        rows_B, fresh_XB, tables_gNM, num_rows, tables_gNM.stride(0), tables_gNM.stride(1),
        GROUPS=len(tables_gNM), BLOCK=BLOCK, num_warps=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _enter_blocks(
    rows_ptr, fresh_ptr, tables_ptr, num_rows, table_group, table_row, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < num_rows
    row = tl.load(rows_ptr + b, inside, 0)
    for group in tl.static_range(GROUPS):
        new = tl.load(fresh_ptr + 2 * group * num_rows + b, inside, -1)
        at = tl.load(fresh_ptr + (2 * group + 1) * num_rows + b, inside, 0)
        entry = tables_ptr + group * table_group + row * table_row + at
        tl.store(entry, new.to(tl.int32), inside & (new >= 0))


def draft_inputs_triton(
    rows_B: torch.Tensor, limits_B: torch.Tensor, history: History, tables_gNM: torch.Tensor,
    out: StepInputs, block_size: int, *, num_new: int, first: int, max_positions: int,
    fresh_XB: torch.Tensor | None = None, pdl: bool | None = None,
) -> None:  # fmt: skip
    _check_whole(rows_B, limits_B, out.token_ids_B, out.positions_B, out.next_positions_B)
    check_history(history)
    _check_tables(tables_gNM, fresh_XB)
    num_rows = len(rows_B)
    num = num_rows * num_new
    check(len(out.token_ids_B) == num and out.slots_gB.shape[1] == num, "a place for each token")
    check(len(out.seq_lens_B) == num_rows, "a length for each row", rows=num_rows)
    pdl = launches_early(rows_B.device) if pdl is None else pdl
    _draft_inputs[(triton.cdiv(num, BLOCK),)](
        rows_B, limits_B, limits_B if fresh_XB is None else fresh_XB, history.tokens_NL,
        history.lens_N, tables_gNM, out.token_ids_B, out.positions_B, out.next_positions_B,
        out.seq_lens_B, out.slots_gB, num_rows, num_new, first, max_positions,
        history.tokens_NL.stride(0), history.tokens_NL.shape[1], tables_gNM.stride(0),
        tables_gNM.stride(1), tables_gNM.shape[2], out.slots_gB.stride(0), BLOCK_SIZE=block_size,
        GROUPS=len(tables_gNM), FRESH=fresh_XB is not None, BLOCK=BLOCK, PDL=pdl, num_warps=2,
        launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_new", "first"])
def _draft_inputs(
    rows_ptr, limits_ptr, fresh_ptr, tokens_ptr, lens_ptr, tables_ptr, token_ids_ptr, positions_ptr,
    next_positions_ptr, seq_lens_ptr, slots_ptr, num_rows, num_new, first, max_positions, token_row,
    token_width, table_group, table_row, table_width, slots_group, BLOCK_SIZE: tl.constexpr,
    GROUPS: tl.constexpr, FRESH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = t < num_rows * num_new
    b, j = t // num_new, t % num_new
    if PDL:
        gdc_wait()  # and none behind it begins early: it might read these inputs before it waits
    row = tl.load(rows_ptr + b, inside, 0)
    limit = tl.load(limits_ptr + b, inside, 0)
    newest = tl.load(lens_ptr + row, inside, 2) - 1
    position = tl.maximum(newest + first + j, 0)
    place = tl.minimum(position, token_width - 1)
    token = tl.load(tokens_ptr + row * token_row + place, inside, 0)
    tl.store(token_ids_ptr + t, token.to(tl.int64), inside)
    tl.store(positions_ptr + t, tl.minimum(position, max_positions - 1), inside)
    tl.store(next_positions_ptr + t, position + 1, inside)
    tl.store(seq_lens_ptr + b, (position + 1).to(tl.int32), inside & (j == num_new - 1))
    at = position // BLOCK_SIZE
    has_block = inside & (position <= newest + limit) & (at < table_width)
    for group in tl.static_range(GROUPS):
        table = tables_ptr + group * table_group + row * table_row
        is_new = t < 0
        if FRESH:
            new = tl.load(fresh_ptr + 2 * group * num_rows + b, inside, -1)
            new_at = tl.load(fresh_ptr + (2 * group + 1) * num_rows + b, inside, 0)
            tl.store(table + new_at, new.to(tl.int32), inside & (new >= 0) & (j == 0))
            # Another lane enters it, perhaps in another program.
            is_new = (new >= 0) & (new_at == at)
        block = tl.load(table + at, has_block & (is_new == 0), 0).to(tl.int64)
        if FRESH:
            block = tl.where(has_block & is_new, new, block)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(slots_ptr + group * slots_group + t, slot, inside)


def accept_triton(
    ids_T: torch.Tensor, is_sound_T: torch.Tensor, rows_B: torch.Tensor, limits_B: torch.Tensor,
    history: History, out_BY: torch.Tensor, *, pdl: bool | None = None,
) -> None:  # fmt: skip
    _check_whole(ids_T, rows_B, limits_B)
    check(out_BY.dtype == torch.int64 and out_BY.stride(1) == 1, "lines of int64")
    check_history(history)
    is_known = is_sound_T.dtype == torch.bool and is_sound_T.is_contiguous()
    check(is_known and len(is_sound_T) == len(ids_T), "a mark for each token")
    num_rows = len(rows_B)
    lanes = triton.next_power_of_2(out_BY.shape[1] - 3)
    rows = max(1, 256 // lanes)
    pdl = launches_early(rows_B.device) if pdl is None else pdl
    _accept[(triton.cdiv(num_rows, rows),)](
        ids_T, is_sound_T, rows_B, limits_B, history.tokens_NL, history.lens_N, history.found_N,
        out_BY, num_rows, len(ids_T) // max(num_rows, 1), history.tokens_NL.stride(0),
        history.tokens_NL.shape[1], out_BY.stride(0), out_BY.shape[1], ROWS=rows, LANES=lanes,
        PDL=pdl, num_warps=2, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_new", "out_stride", "out_width"])
def _accept(
    ids_ptr, is_sound_ptr, rows_ptr, limits_ptr, tokens_ptr, lens_ptr, found_ptr, out_ptr, num_rows,
    num_new, token_row, token_width, out_stride, out_width, ROWS: tl.constexpr, LANES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = b < num_rows
    j = tl.arange(0, LANES)[None, :]
    await_inputs(PDL)
    row = tl.load(rows_ptr + b, inside, 0)
    length = tl.load(lens_ptr + row, inside, 0)
    found = tl.load(found_ptr + row, inside, 0)
    limit = tl.minimum(tl.load(limits_ptr + b, inside, 0), found)
    limit = tl.minimum(limit, num_new - 1)
    given = inside[:, None] & (j < num_new)
    ids = tl.load(ids_ptr + b[:, None] * num_new + j, given, -1)
    is_sound = tl.load(is_sound_ptr + b[:, None] * num_new + j, given, 0) != 0
    at = tokens_ptr + row[:, None] * token_row + length[:, None] + j
    is_there = given & (length[:, None] + j < token_width)
    draft_token = tl.load(at, is_there, -1)
    is_right = is_there & is_sound & (draft_token.to(tl.int64) == ids)
    tl.debug_barrier()  # all have read before one of them writes
    stops = (is_right == 0) | (j >= limit[:, None])
    num = 1 + tl.min(tl.where(stops, j, LANES), 1)
    num = tl.minimum(num, num_new)
    taken = given & (j < num[:, None])
    is_bad = tl.max((taken & (is_sound == 0)).to(tl.int32), 1) > 0
    num = tl.where(is_bad, 0, num)
    taken = given & (j < num[:, None])
    first_right = tl.max((is_right & (j == 0)).to(tl.int32), 1)
    out = out_ptr + b * out_stride
    tl.store(out, num.to(tl.int64), inside)
    tl.store(out + 1, found, inside)
    tl.store(out + 2, tl.where(found > 0, first_right, 0).to(tl.int64), inside)
    shown = inside[:, None] & (j < out_width - _COUNTS)
    tl.store(out[:, None] + _COUNTS + j, tl.where(taken, ids, -1), shown)
    is_real = inside & (row != 0)
    tl.store(at, ids.to(tl.int32), taken & is_there & is_real[:, None])
    tl.store(lens_ptr + row, tl.minimum(length + num, token_width), is_real)
    tl.store(found_ptr + row, tl.zeros_like(found), is_real)


def put_drafts_triton(
    ids_B: torch.Tensor,
    rows_B: torch.Tensor,
    history: History,
    index: int,
    *,
    pdl: bool | None = None,
) -> None:
    _check_whole(ids_B, rows_B)
    check_history(history)
    num_rows = len(rows_B)
    pdl = launches_early(rows_B.device) if pdl is None else pdl
    _put_drafts[(triton.cdiv(num_rows, BLOCK),)](
        ids_B, rows_B, history.tokens_NL, history.lens_N, history.found_N, num_rows, index,
        history.tokens_NL.stride(0), history.tokens_NL.shape[1], BLOCK=BLOCK, PDL=pdl, num_warps=2,
        launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "index"])
def _put_drafts(
    ids_ptr, rows_ptr, tokens_ptr, lens_ptr, found_ptr, num_rows, index, token_row, token_width,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < num_rows
    await_inputs(PDL)
    row = tl.load(rows_ptr + b, inside, 0)
    place = tl.load(lens_ptr + row, inside, 0) + index
    given = inside & (row != 0) & (place < token_width)
    ids = tl.load(ids_ptr + b, inside, 0)
    tl.store(tokens_ptr + row * token_row + place, ids.to(tl.int32), given)
    tl.store(found_ptr + row, tl.zeros_like(place) + index + 1, given)


def tell_found_triton(
    rows_B: torch.Tensor, history: History, out_B: torch.Tensor, *, pdl: bool | None = None
) -> None:
    _check_whole(rows_B)
    check_history(history)
    check(out_B.dtype == torch.int64 and len(out_B) == len(rows_B), "a number for each row")
    num_rows = len(rows_B)
    pdl = launches_early(rows_B.device) if pdl is None else pdl
    _tell_found[(triton.cdiv(num_rows, BLOCK),)](
        rows_B, history.found_N, out_B, num_rows, out_B.stride(0), BLOCK=BLOCK, PDL=pdl,
        num_warps=2, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "out_stride"])
def _tell_found(
    rows_ptr, found_ptr, out_ptr, num_rows, out_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < num_rows
    await_inputs(PDL)
    row = tl.load(rows_ptr + b, inside, 0)
    tl.store(out_ptr + b * out_stride, tl.load(found_ptr + row, inside, 0), inside)
