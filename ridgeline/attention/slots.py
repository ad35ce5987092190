"""At which slots of the cache do these tokens of a request lie?

Letters: B requests, M blocks per table row, L tokens per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch


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
