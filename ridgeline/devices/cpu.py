"""How do we run on the processor itself?"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ridgeline.devices.host_memory import host_memory
from ridgeline.log import say

if TYPE_CHECKING:
    from ridgeline.kernels.cpu.recorder import Arena

logger = logging.getLogger(__name__)


class CpuDevice:
    """The host's processor and memory (the container's share of it, where there is a limit)."""

    name = "cpu"
    best_dtype = "float32"

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._arena: Arena | None = None

    def describe(self) -> str:
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        except OSError:
            return platform.processor() or platform.machine()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return names[0] if names else platform.machine()

    def memory_total(self) -> int:
        return host_memory().total

    def memory_free(self) -> int:
        return host_memory().free

    def memory_bound(self) -> str:
        return host_memory().bound

    def upload(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def capture(self, launch: Callable[[], None], what: str = "a step") -> Callable[[], None]:
        """The native calls that it makes, replayed by one; or the call itself, where torch has to
        do a part of it. Nothing is computed here: ranks of which one records and another does not
        are in the same place afterwards."""
        from ridgeline.kernels.cpu import native
        from ridgeline.kernels.cpu.recorder import Arena, CannotRecord, Replay, record

        if native.library() is not None:
            self._arena = self._arena or Arena()
            try:
                return Replay(record(launch, self._arena))
            except CannotRecord as op:
                say(logger, logging.INFO, f"{what} is not recorded", because=f"torch does {op}")
        return launch

    def num_peers(self) -> int:
        return 0

    def synchronize(self) -> None:
        """Every call has returned with its result."""
