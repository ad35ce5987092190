"""`step_inputs` and `remember` in Triton: a lane for each row; what a row writes to its table only
it reads."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.errors import check
from ridgeline.kernels.arrival_triton import await_inputs
from ridgeline.kernels.launching import launches_early
from ridgeline.kernels.step_inputs import StepInputs

BLOCK = 64


def step_inputs_triton(
    sent_XB: torch.Tensor,
    last_ids_N: torch.Tensor,
    tables_gNM: torch.Tensor,
    out: StepInputs,
    block_size: int,
) -> None:
    num_rows = sent_XB.shape[1]
    check(sent_XB.shape[0] == 2 + tables_gNM.shape[0], "a line of new blocks for each KV group")
    check(sent_XB.is_contiguous() and tables_gNM.is_contiguous(), "step inputs are contiguous")
    _step_inputs[(triton.cdiv(num_rows, BLOCK),)](
        sent_XB, last_ids_N, tables_gNM, out.token_ids_B, out.positions_B, out.next_positions_B,
        out.seq_lens_B, out.slots_gB, num_rows, tables_gNM.stride(0), tables_gNM.stride(1),
        out.slots_gB.stride(0), BLOCK_SIZE=block_size, GROUPS=tables_gNM.shape[0], BLOCK=BLOCK,
        num_warps=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _step_inputs(
    sent_ptr, last_ids_ptr, tables_ptr, token_ids_ptr, positions_ptr, next_positions_ptr,
    seq_lens_ptr, slots_ptr, num_rows, table_group, table_row, slots_group,
    BLOCK_SIZE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < num_rows
    row = tl.load(sent_ptr + b, inside, 0)
    position = tl.load(sent_ptr + num_rows + b, inside, 0)
    tl.store(token_ids_ptr + b, tl.load(last_ids_ptr + row, inside, 0), inside)
    tl.store(positions_ptr + b, position, inside)
    tl.store(next_positions_ptr + b, position + 1, inside)
    tl.store(seq_lens_ptr + b, (position + 1).to(tl.int32), inside)
    for group in tl.static_range(GROUPS):
        new = tl.load(sent_ptr + (2 + group) * num_rows + b, inside, -1)
        entry = tables_ptr + group * table_group + row * table_row + position // BLOCK_SIZE
        tl.store(entry, new.to(tl.int32), inside & (new >= 0))
        block = tl.load(entry, inside & (new < 0), 0).to(tl.int64)
        block = tl.where(new >= 0, new, block)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(slots_ptr + group * slots_group + b, slot, inside)


def remember_triton(
    ids_B: torch.Tensor,
    is_sound_B: torch.Tensor,
    rows_B: torch.Tensor,
    last_ids_N: torch.Tensor,
    token_ids_B: torch.Tensor,
    *,
    pdl: bool | None = None,
) -> None:
    num_rows = ids_B.shape[0]
    pdl = launches_early(ids_B.device) if pdl is None else pdl
    all_B = ids_B, is_sound_B, rows_B, token_ids_B
    check(all(x.is_contiguous() for x in all_B), "what is remembered is contiguous")
    _remember[(triton.cdiv(num_rows, BLOCK),)](
        ids_B, is_sound_B, rows_B, last_ids_N, token_ids_B, num_rows, BLOCK=BLOCK, PDL=pdl,
        num_warps=2, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _remember(
    ids_ptr, is_sound_ptr, rows_ptr, last_ids_ptr, token_ids_ptr, num_rows, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < num_rows
    await_inputs(PDL)
    token = tl.load(ids_ptr + b, inside, 0)
    is_sound = tl.load(is_sound_ptr + b, inside, 0) != 0
    tl.store(last_ids_ptr + tl.load(rows_ptr + b, inside, 0), token, inside)
    tl.store(token_ids_ptr + b, tl.where(is_sound, token, -1), inside)
