"""Where do the tokens of this step sit? Everything that attention and the layers get to know.

Letters: T packed tokens of the step, B requests, M blocks per table row, R rows that need logits.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(slots=True)
class ForwardBatch:
    """What the decoder gets for one step."""

    token_ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64
    layout: AttentionLayout
    logit_rows_R: torch.Tensor  # int64, rows of T whose logits are wanted
