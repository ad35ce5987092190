"""How do drafted tokens come into a step, and which of them come out of it? The small kernels of
steps with drafts; rows are those of a `History`.

A decode step with Q new tokens a row computes the newest token and Q - 1 drafts behind it. The
token that comes out at each position is compared with the draft that stands there: as long as they
are equal the next one counts too. Nothing here waits for the host. Of row 0, which is padding,
nothing is ever written. Letters: B rows of the step, N rows there is room for, L tokens of the
longest, Q new tokens of each row, T = B * Q of them row by row, M blocks per table row, g KV
groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Generic, ParamSpec, cast

import torch

from ridgeline.errors import check
from ridgeline.kernels.cpu.native import library
from ridgeline.kernels.step_inputs import StepInputs

P = ParamSpec("P")
PADDING_LENGTH = 2  # of row 0, which is nobody's: what is made of it is never looked at

NUM_COUNTS = 3  # columns of what `accept` tells before the tokens


class ByDevice(Generic[P]):
    """An operation in three forms: `reference` says what is done, `triton` and `native` name those
    for GPUs and for CPUs with the library, imported when they are first needed. Its first argument
    is a tensor on the device that decides."""

    def __init__(self, reference: Callable[P, None], triton: str, native: str) -> None:
        self._names = {"cuda": triton, "cpu": native}
        self._reference = reference
        self._opened: dict[str, Callable[P, None]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        device = cast(torch.Tensor, args[0]).device.type
        if device not in self._names or (device == "cpu" and library() is None):
            return self._reference(*args, **kwargs)
        if device not in self._opened:
            module, _, name = self._names[device].partition(":")
            self._opened[device] = getattr(import_module(module), name)
        return self._opened[device](*args, **kwargs)


def first_inputs(inputs: StepInputs, num_rows: int, num_new: int) -> StepInputs:
    """The views of larger buffers that `draft_inputs` fills for so many rows."""
    num = num_rows * num_new
    return StepInputs(
        inputs.token_ids_B[:num],
        inputs.positions_B[:num],
        inputs.next_positions_B[:num],
        inputs.seq_lens_B[:num_rows],
        inputs.slots_gB[:, :num],
    )


def enter_blocks_reference(
    rows_B: torch.Tensor, fresh_XB: torch.Tensor, tables_gNM: torch.Tensor
) -> None:
    """The rows' new blocks are entered into `tables_gNM` (int32). `fresh_XB` (int64) has 2 * g
    lines: for each group the new block, -1 where there is none, then its index in the row's table.
    """
    fresh_g2B = fresh_XB.view(len(tables_gNM), 2, -1)
    for table_NM, (blocks_B, places_B) in zip(tables_gNM, fresh_g2B, strict=True):
        is_new_B = blocks_B >= 0
        table_NM[rows_B[is_new_B], places_B[is_new_B]] = blocks_B[is_new_B].int()


enter_blocks = ByDevice(
    enter_blocks_reference,
    "ridgeline.kernels.drafts_triton:enter_blocks_triton",
    "ridgeline.kernels.cpu.drafts:enter_blocks",
)


def draft_inputs_reference(
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
    """Fills `out` with `num_new` tokens of each row, from `first` places after its newest token.

    `rows_B` and `limits_B` (int64) are places among N and how many drafts each has blocks for;
    what lies behind them goes to the null block. Tokens, positions, next positions and slots of
    `out` are row by row; its lengths, one for each row, count all of `num_new`. Positions stop at
    `max_positions` - 1, the last that there is a rotation for; next positions and lengths do not.
    `fresh_XB` is entered as by `enter_blocks`, and used.
    """
    if fresh_XB is not None:
        enter_blocks_reference(rows_B, fresh_XB, tables_gNM)
    rows_B1 = rows_B[:, None]
    newest_B1 = history.lens_N[rows_B1] - 1
    steps_Q = torch.arange(first, first + num_new, device=rows_B.device)
    positions_BQ = (newest_B1 + steps_Q).clamp(min=0)
    there_BQ = positions_BQ.clamp(max=history.tokens_NL.shape[1] - 1)
    out.token_ids_B.copy_(history.tokens_NL[rows_B1, there_BQ].flatten())
    out.positions_B.copy_(positions_BQ.clamp(max=max_positions - 1).flatten())
    out.next_positions_B.copy_(positions_BQ.flatten() + 1)
    out.seq_lens_B.copy_(positions_BQ[:, -1] + 1)
    places_BQ = positions_BQ // block_size
    width = tables_gNM.shape[2]
    has_block_BQ = (positions_BQ <= newest_B1 + limits_B[:, None]) & (places_BQ < width)
    for table_NM, slots_T in zip(tables_gNM, out.slots_gB, strict=True):
        blocks_BQ = table_NM[rows_B1, places_BQ.clamp(max=width - 1)].long().where(has_block_BQ, 0)
        slots_T.copy_((blocks_BQ * block_size + positions_BQ % block_size).flatten())


draft_inputs = ByDevice(
    draft_inputs_reference,
    "ridgeline.kernels.drafts_triton:draft_inputs_triton",
    "ridgeline.kernels.cpu.drafts:draft_inputs",
)


def accept(
    ids_T: torch.Tensor,
    is_sound_T: torch.Tensor,
    rows_B: torch.Tensor,
    limits_B: torch.Tensor,
    history: History,
    out_BY: torch.Tensor,
) -> None:
    """What came out of a step with Q = T / B new tokens a row is taken into its history.

    `ids_T` (int64): the token that comes out at each position, `is_sound_T` (bool): whether it
    could be drawn. Drafts that are equal to it are right, up to the first that is not, the row's
    limit or the number that was found; the row gets the ids of the right ones and one more. A row
    with an unsound one among these gets none. Its drafts are used up.

    `out_BY` (int64, Y >= Q + 3) is for the host: how many tokens the row got, how many drafts it
    had, 1 if the first of them was or would have been right, then the tokens, -1 behind them.
    """
    num, columns = len(rows_B), out_BY.shape[1]
    check(len(ids_T) % max(num, 1) == 0, "as many tokens of each row", rows=num, ids=len(ids_T))
    check(columns * num >= len(ids_T) + NUM_COUNTS * num, "room for all tokens", columns=columns)
    _accept(ids_T, is_sound_T, rows_B, limits_B, history, out_BY)


def accept_reference(
    ids_T: torch.Tensor,
    is_sound_T: torch.Tensor,
    rows_B: torch.Tensor,
    limits_B: torch.Tensor,
    history: History,
    out_BY: torch.Tensor,
) -> None:
    num, width = len(rows_B), history.tokens_NL.shape[1]
    ids_BQ, is_sound_BQ = ids_T.view(num, -1), is_sound_T.view(num, -1)
    num_new = ids_BQ.shape[1]
    steps_Q = torch.arange(num_new, device=rows_B.device)
    rows_B1, lens_B, found_B = rows_B[:, None], history.lens_N[rows_B], history.found_N[rows_B]
    places_BQ = lens_B[:, None] + steps_Q
    is_there_BQ = places_BQ < width
    drafts_BQ = history.tokens_NL[rows_B1, places_BQ.clamp(max=width - 1)]
    is_right_BQ = (ids_BQ == drafts_BQ) & is_sound_BQ & is_there_BQ
    most_B = torch.minimum(limits_B, found_B).clamp(max=num_new - 1)
    goes_on_BQ = (is_right_BQ & (steps_Q < most_B[:, None])).long().cumprod(1)
    num_B = 1 + goes_on_BQ.sum(1)
    num_B *= (is_sound_BQ | (steps_Q >= num_B[:, None])).all(1)
    is_new_BQ = steps_Q < num_B[:, None]
    out_BY.fill_(-1)
    out_BY[:, 0], out_BY[:, 1] = num_B, found_B
    out_BY[:, 2] = is_right_BQ[:, 0] & (found_B > 0)
    out_BY[:, NUM_COUNTS : NUM_COUNTS + num_new] = ids_BQ.where(is_new_BQ, -1)
    written_BQ = is_new_BQ & (rows_B1 != 0) & is_there_BQ
    at = rows_B1.expand_as(written_BQ)[written_BQ], places_BQ[written_BQ]
    history.tokens_NL[at] = ids_BQ[written_BQ].int()
    history.lens_N.index_add_(0, rows_B, num_B * (rows_B != 0)).clamp_(max=width)
    history.found_N.index_fill_(0, rows_B, 0)


_accept = ByDevice(
    accept_reference,
    "ridgeline.kernels.drafts_triton:accept_triton",
    "ridgeline.kernels.cpu.drafts:accept",
)


def put_drafts_reference(
    ids_B: torch.Tensor, rows_B: torch.Tensor, history: History, index: int
) -> None:
    """Draft number `index` (from 0) of each row is this id (int64), and the last that is found."""
    places_B = history.lens_N[rows_B] + index
    given_B = (rows_B != 0) & (places_B < history.tokens_NL.shape[1])
    history.tokens_NL[rows_B[given_B], places_B[given_B]] = ids_B[given_B].int()
    history.found_N[rows_B[given_B]] = index + 1


put_drafts = ByDevice(
    put_drafts_reference,
    "ridgeline.kernels.drafts_triton:put_drafts_triton",
    "ridgeline.kernels.cpu.drafts:put_drafts",
)


def tell_found_reference(rows_B: torch.Tensor, history: History, out_B: torch.Tensor) -> None:
    """`out_B` (int64, any stride) is how many drafts lie behind each row's tokens now."""
    out_B.copy_(history.found_N[rows_B])


tell_found = ByDevice(
    tell_found_reference,
    "ridgeline.kernels.drafts_triton:tell_found_triton",
    "ridgeline.kernels.cpu.drafts:tell_found",
)


@dataclass(frozen=True, slots=True)
class History:
    """`tokens_NL` (int32): a row's tokens, then its drafts, then anything. `lens_N` (int64): how
    many tokens it has; the newest, whose keys and values are not computed yet, is the last of
    them. `found_N` (int64): how many drafts lie behind them."""

    tokens_NL: torch.Tensor
    lens_N: torch.Tensor
    found_N: torch.Tensor


def make_history(
    num_rows: int, max_tokens: int, max_draft_tokens: int, device: torch.device
) -> History:
    """For rows of up to `max_tokens`. Row 0 is padding."""

    def whole(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    width = max(max_tokens, PADDING_LENGTH) + max_draft_tokens + 1
    history = History(whole(num_rows, width, dtype=torch.int32), whole(num_rows), whole(num_rows))
    history.lens_N[0] = PADDING_LENGTH
    return history
