"""What a captured decode step begins with: tokens, positions and cache slots of its rows.

Each row has one new token: the one sampled last. All is read from what stays on the device, so a
step needs no more from the host than which rows it is for, where they stand and which blocks are
new. Letters: B rows of the step, N rows there is room for, M blocks per table row, g KV groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Of one step, written anew by each: `token_ids_B`, `positions_B` and `slots_B` (one per KV
    group; block * block_size + offset) are int64, `seq_lens_B` (the new token included) int32."""

    token_ids_B: torch.Tensor
    positions_B: torch.Tensor
    next_positions_B: torch.Tensor
    seq_lens_B: torch.Tensor
    slots_gB: torch.Tensor


def make_step_inputs(num_groups: int, num_rows: int, device: torch.device) -> StepInputs:
    def whole(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
    return StepInputs(
        whole(num_rows), whole(num_rows), whole(num_rows), lens, whole(num_groups, num_rows)
    )


def step_inputs(
    sent_XB: torch.Tensor,
    last_ids_N: torch.Tensor,
    tables_gNM: torch.Tensor,
    out: StepInputs,
    block_size: int,
) -> None:
    """Fills `out` for rows that all differ, or are padding.

    `sent_XB` (int64) has 2 + g lines: the rows' places among N; their new tokens' positions; and
    for each group the block that begins with this token, -1 where it has one already. New blocks
    are entered into `tables_gNM` (int32).
    """
    if sent_XB.is_cuda:
        from ridgeline.kernels.step_inputs_triton import step_inputs_triton

        step_inputs_triton(sent_XB, last_ids_N, tables_gNM, out, block_size)
    elif _runs_native(sent_XB):
        from ridgeline.kernels.cpu.elementwise import step_inputs as native_step_inputs

        native_step_inputs(sent_XB, last_ids_N, tables_gNM, out, block_size)
    else:
        step_inputs_reference(sent_XB, last_ids_N, tables_gNM, out, block_size)


def step_inputs_reference(
    sent_XB: torch.Tensor,
    last_ids_N: torch.Tensor,
    tables_gNM: torch.Tensor,
    out: StepInputs,
    block_size: int,
) -> None:
    rows_B, positions_B = sent_XB[0], sent_XB[1]
    out.token_ids_B.copy_(last_ids_N[rows_B])
    out.positions_B.copy_(positions_B)
    out.next_positions_B.copy_(positions_B + 1)
    out.seq_lens_B.copy_(positions_B + 1)
    places_B = positions_B // block_size
    for table_NM, new_B, slots_B in zip(tables_gNM, sent_XB[2:], out.slots_gB, strict=True):
        is_new_B = new_B >= 0
        table_NM[rows_B[is_new_B], places_B[is_new_B]] = new_B[is_new_B].int()
        slots_B.copy_(table_NM[rows_B, places_B] * block_size + positions_B % block_size)


def remember(
    ids_B: torch.Tensor,
    is_sound_B: torch.Tensor,
    places_B: torch.Tensor,
    last_ids_N: torch.Tensor,
    out_B: torch.Tensor,
) -> None:
    """What a captured decode step ends with: the rows at these places have a new last token, and
    `out_B` has all of them for the host, -1 where they are not sound."""
    if _runs_native(ids_B):
        from ridgeline.kernels.cpu.elementwise import remember as native_remember

        native_remember(ids_B, is_sound_B, places_B, last_ids_N, out_B)
    elif ids_B.is_cuda:
        from ridgeline.kernels.step_inputs_triton import remember_triton

        remember_triton(ids_B, is_sound_B, places_B, last_ids_N, out_B)
    else:
        last_ids_N.index_copy_(0, places_B, ids_B)
        out_B.copy_(ids_B.where(is_sound_B, -1))


def _runs_native(x: torch.Tensor) -> bool:
    if x.device.type != "cpu":
        return False
    from ridgeline.kernels.cpu.native import library

    return library() is not None
