"""May a kernel begin while the one before it still runs?

With programmatic dependent launch a kernel is sent off early, does what does not depend on others
(it calls weights into the cache, say) and waits before it reads what the kernel before has written.
All kernels here that can take part do, where the device can: compute capability 9.0 and later.
"""

from __future__ import annotations

from functools import lru_cache

import torch

CAPABLE = (9, 0)


@lru_cache(maxsize=16)
def launches_early(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= CAPABLE


@lru_cache(maxsize=16)
def has_warpgroup_products(device: torch.device) -> bool:
    """Of this generation alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == CAPABLE
