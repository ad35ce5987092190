"""May a kernel begin while the one before it still runs, and what room does it have?

With programmatic dependent launch a kernel is sent off early, does what does not depend on others
(it calls weights into the cache, say) and waits before it reads what the kernel before has written.
All kernels here that can take part do, where the device can: compute capability 9.0 and later.
"""
# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ridgeline.errors import check

CAPABLE = (9, 0)
HOPPER_SHARED_BYTES = 227 << 10


@lru_cache(maxsize=16)
def launches_early(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= CAPABLE


@lru_cache(maxsize=16)
def has_warpgroup_products(device: torch.device) -> bool:
    """Of this generation alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == CAPABLE


@lru_cache(maxsize=16)
def shared_memory_bytes(device: torch.device) -> int:
    """What a program may have of a multiprocessor's; a Hopper's where there is no GPU."""
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES
    import triton

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


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
