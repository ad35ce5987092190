"""Where are the hidden states of many windows between two layers? In memory, or in a file when
they are large.

Letters: N windows, S tokens of a window, E hidden, B windows of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

PART_TOKENS = 4096  # computed at once


class States:
    """[N, S, E] float32, changed in place. `file`: kept there, which must not exist; whoever made
    it removes it."""

    def __init__(self, windows: int, tokens: int, width: int, file: Path | None = None) -> None:
        size = windows * tokens * width
        if file is None:
            flat = torch.empty(size)
        else:
            flat = torch.from_file(str(file), shared=True, size=size, dtype=torch.float32)
        self.all_NSE = flat.view(windows, tokens, width)

    @property
    def num_bytes(self) -> int:
        return self.all_NSE.numel() * 4

    def parts(self) -> Iterator[torch.Tensor]:
        """Views [B, S, E] that together are all."""
        step = max(1, PART_TOKENS // max(1, self.all_NSE.shape[1]))
        for begin in range(0, self.all_NSE.shape[0], step):
            yield self.all_NSE[begin : begin + step]

    def advance(self, change: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        """Each part becomes what `change` makes of it on the device."""
        for part_BSE in self.parts():
            part_BSE.copy_(change(part_BSE.to(device)))


def embed(states: States, windows_NS: torch.Tensor, embedding_VE: torch.Tensor) -> None:
    """Fill the states with rows of the embedding, of any float dtype."""
    done = 0
    for part_BSE in states.parts():
        ids_BS = windows_NS[done : done + len(part_BSE)]
        part_BSE.copy_(rows_of(embedding_VE, ids_BS))
        done += len(part_BSE)


def rows_of(embedding_VE: torch.Tensor, ids_BS: torch.Tensor) -> torch.Tensor:
    """[B, S, E] float32, of which only those rows are read."""
    return embedding_VE.index_select(0, ids_BS.flatten()).float().view(*ids_BS.shape, -1)


def cut(token_ids: Sequence[int], *, length: int, first: int | None, most: int) -> torch.Tensor:
    """Windows of `length` tokens, [N, length], each after the token `first` if there is one; what
    is left over at the end is dropped, and so is all that exceeds `most` windows."""
    body = length - (first is not None)
    starts = range(0, len(token_ids) - body + 1, body)
    head = [] if first is None else [first]
    rows = [[*head, *token_ids[start : start + body]] for start in starts[:most]]
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), length)
