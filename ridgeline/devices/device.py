"""What do we ask of a device, whichever it is?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Device(Protocol):
    """A place where tensors live. `name` is as asked for ("cpu", "cuda:0"); sizes are bytes."""

    name: str
    torch_device: torch.device
    best_dtype: str

    def describe(self) -> str:
        """A human name of the hardware."""
        ...

    def memory_total(self) -> int: ...

    def memory_free(self) -> int:
        """What could be allocated now, by us and by others."""
        ...

    def memory_bound(self) -> str:
        """What leaves less than the hardware has: a limit, or others. Empty: nothing."""
        ...

    def num_peers(self) -> int:
        """Other devices of this host whose memory this one can write to."""
        ...

    def upload(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Host numbers as a tensor on the device, in stream order, without waiting."""
        ...

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the host; waits for what computes it."""
        ...

    def capture(self, launch: Callable[[], None], what: str = "a step") -> Callable[[], None]:
        """Something that does what `launch` does, with the same tensors. `launch` may be called
        here and must not wait for the device. `what` it is, for the log."""
        ...

    def synchronize(self) -> None: ...
