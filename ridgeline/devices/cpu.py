"""How do we run on the processor itself?"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

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
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = _cgroup_number("memory.max")
        return physical if limit is None else min(physical, limit)

    def memory_free(self) -> int:
        available = _available_bytes()
        limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
        if limit is None or used is None:
            return available
        return max(0, min(available, limit - used + _cgroup_file_cache()))

    def upload(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def capture(self, launch: Callable[[], None], what: str = "a step") -> Callable[[], None]:
        """The native calls that it makes, replayed by one; or the call itself, where torch has to
        do a part of it."""
        from ridgeline.kernels.cpu import native
        from ridgeline.kernels.cpu.recorder import Arena, CannotRecord, Replay, record

        if native.library() is not None:
            self._arena = self._arena or Arena()
            try:
                return Replay(record(launch, self._arena))
            except CannotRecord as op:
                say(logger, logging.INFO, f"{what} is not recorded", because=f"torch does {op}")
        launch()
        return launch

    def synchronize(self) -> None:
        """Every call has returned with its result."""


def _available_bytes() -> int:
    """MemAvailable of the kernel: free memory and what it would give up for us."""
    kilobytes = _table("/proc/meminfo").get("MemAvailable:")
    if kilobytes is not None:
        return kilobytes * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_file_cache() -> int:
    """Copies of files that the group is charged for and would give up; mapped weights are among
    them."""
    table = _table("/sys/fs/cgroup/memory.stat")
    return table.get("inactive_file", 0) + table.get("active_file", 0)


def _table(path: str) -> dict[str, int]:
    """Lines of `name number`, empty when there is no such file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines)
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _cgroup_number(name: str) -> int | None:
    """A limit of the control group (version 2), None where there is none."""
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
