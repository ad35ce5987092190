"""Where do the tokens of this step sit? Everything that attention and the layers get to know.

Letters: T packed tokens of the step, B requests, M blocks per table row, N rows of all tables, L
tokens per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(slots=True)
class AttentionLayout:
    """One step seen by attention, the same for all layers of a KV group.

    Requests are packed one after the other: request b owns rows query_start[b] ..
    query_start[b + 1] of every [T, ...] tensor. `query_lens[b]` tokens are new and
    `seq_lens[b]` counts them and everything before. Lists are on the host, tensors on the device.
    Slots of a block table that lie outside a window or past the end hold arbitrary numbers, NaN
    included, and must not reach the result.
    """

    query_lens: list[int]
    seq_lens: list[int]
    query_start: list[int]  # B + 1
    block_tables_BM: tuple[torch.Tensor, ...]  # int32, one per KV group, padded with NULL_BLOCK
    slots_T: tuple[torch.Tensor, ...]  # int64, block * block_size + offset, one per KV group
    block_size: int
    # int32, if they were sent with the others: where each request begins, and how long those with
    # one new token are (0 for all others).
    query_start_B1: torch.Tensor | None = None
    decode_lens_B: torch.Tensor | None = None


@dataclass(slots=True)
class DecodeLayout:
    """A step with `num_new` new tokens for each request, of which the host knows no more than B:
    the same tensors with other contents are another step, so it can be captured once and replayed.

    Rows may be padding: those of a request whose table has null blocks alone. New tokens that have
    no block lie behind those that have one; what is cached of them may be anything, NaN included,
    their positions may be past the end of the table, and none of it reaches the tokens before.
    """

    rows_B: torch.Tensor  # int64, where in the tables each request's row is
    tables_NM: tuple[torch.Tensor, ...]  # int32, one per KV group
    seq_lens_B: torch.Tensor  # int32, with all new tokens
    query_start_B1: torch.Tensor  # int32: 0, num_new, .. B * num_new
    slots_T: tuple[torch.Tensor, ...]  # int64, one per KV group
    block_size: int
    num_new: int = 1


@dataclass(slots=True)
class MixedLayout:
    """Any step of up to T tokens, of which the host's part lies in tensors of fixed sizes, so that
    it can be captured too. Tokens past the end are padding: they write to the null block, and
    nobody answers them.

    `decodes` are the requests with one new token; None: the step has none. `work`, one per KV
    group, is what the backend's `prefill_work` made of the others, filled up with zeros; None: all
    are decodes, or `is_whole`: all tokens are those of one prompt with nothing before it.
    """

    decodes: DecodeLayout | None
    work: tuple[torch.Tensor, ...] | None
    tables_NM: tuple[torch.Tensor, ...]  # int32, one per KV group
    slots_T: tuple[torch.Tensor, ...]  # int64, one per KV group
    num_tokens: int  # T
    block_size: int
    is_whole: bool = False


@dataclass(slots=True)
class LogitsIndices:
    """The tokens of a step whose hidden states are asked for. `is_last`: the step is one request's,
    and this is its last token."""

    rows_R: torch.Tensor  # int64
    is_last: bool = False


@dataclass(slots=True)
class ForwardBatch:
    """What the decoder gets for one step. What the last layer does behind its attention is done for
    those at `logits_indices` alone; None: all in order."""

    token_ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64
    layout: AttentionLayout | DecodeLayout | MixedLayout
    logits_indices: LogitsIndices | None = None


# ------------------------------------------------------------------------ slots of the cache


def slots_of_range(table_M: torch.Tensor, start: int, stop: int, block_size: int) -> torch.Tensor:
    """Slots of the positions [start, stop) of one request, int64."""
    first, last = start // block_size, -(-stop // block_size)
    slots = _slots_of_blocks(table_M[first:last], block_size)
    return slots[start - first * block_size : stop - first * block_size]


def slots_of_ranges(
    table_BM: torch.Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    width: int,
    block_size: int,
) -> torch.Tensor:
    """Slots of the positions [start, start + length) of each request, [B, width] int64. Shorter
    rows are filled up with the slot of their own last position."""
    firsts = [start // block_size for start in starts]
    inner = [start % block_size for start in starts]
    num_blocks = max(-(-(i + n) // block_size) for i, n in zip(inner, lengths, strict=True))
    if any(firsts):
        columns = _column(firsts, table_BM.device) + torch.arange(
            num_blocks, device=table_BM.device
        )
        table_BM = table_BM.gather(1, columns.clamp_max_(table_BM.shape[1] - 1))
    slots = _slots_of_blocks(table_BM[:, :num_blocks], block_size)
    ends = [i + n - 1 for i, n in zip(inner, lengths, strict=True)]
    places_BL = torch.arange(width, device=table_BM.device)
    if any(inner):
        places_BL = places_BL + _column(inner, table_BM.device)
    return slots.gather(1, torch.minimum(places_BL, _column(ends, table_BM.device)))


def _slots_of_blocks(blocks: torch.Tensor, block_size: int) -> torch.Tensor:
    """[..., M] -> [..., M * block_size]"""
    slots = torch.add(_offsets(block_size, blocks.device), blocks[..., None], alpha=block_size)
    return slots.flatten(-2)


def _column(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, device=device)[:, None]


@lru_cache(maxsize=8)
def _offsets(block_size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(block_size, device=device)
