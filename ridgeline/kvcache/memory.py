"""Where does the memory of a pool come from? Zeros, as many as it may ever need."""

from __future__ import annotations

import mmap
import sys
from math import prod

import torch

from ridgeline.kernels.cpu import native


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU the system hands out pages when they are first written, so that a large pool takes
    no time at start, and huge ones where it may. The whole of it counts as taken all the same."""
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or sys.platform != "linux" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = native.advise_huge(torch.frombuffer(pages, dtype=torch.uint8))
    return whole.view(dtype).view(shape)
