"""Where do the programs of one launch leave partial results for the last of them to merge?

Letters: P numbers, A tiles of the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ridgeline.errors import check


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch of one stream: launches that share it must not overlap. `partial_P` (float32) may
    hold anything; `arrivals_A` (int32) is zero before and after every launch."""

    partial_P: torch.Tensor
    arrivals_A: torch.Tensor

    def check_room(self, partials: int, tiles: int) -> None:
        room = self.partial_P.numel(), self.arrivals_A.numel()
        check(
            room[0] >= partials and room[1] >= tiles,
            "the workspace is large enough",
            has=room,
            needs=(partials, tiles),
        )


@lru_cache(maxsize=16)
def shared_workspace(device: torch.device) -> Workspace:
    """The one of the stream that the engine of this device runs on."""
    return make_workspace(device)


def make_workspace(
    device: torch.device, partials: int = 1 << 22, tiles: int = 1 << 13
) -> Workspace:
    """Room for `partials` numbers and `tiles` counters; 16 MiB unless told otherwise. Ordinary
    tensors even where the first to ask is in inference mode: who comes later may not be."""
    with torch.inference_mode(mode=False):
        return Workspace(
            torch.empty(partials, dtype=torch.float32, device=device),
            torch.zeros(tiles, dtype=torch.int32, device=device),
        )
