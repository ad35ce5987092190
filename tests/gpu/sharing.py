"""How do many test processes share one GPU?

Each takes a share of its memory, kernels are compiled once for all, and what takes longest begins
first: test files are cut into pieces that go to whichever process is free.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import MutableMapping
from pathlib import Path

import pytest
import torch

from ridgeline.devices.cuda import CudaDevice
from ridgeline.kernels.cache import VARIABLE

# Files in the order in which they begin, by their names' beginnings; others follow.
FIRST = (
    "tests/gpu/test_deterministic",
    "tests/gpu/test_kernel_cache",
    "tests/gpu/test_sampling",
    "tests/kernels/test_fp8",
    "tests/kernels/test_paged_prefill",
    "tests/kernels/test_small",
    "tests/kernels/",
    "tests/gpu/",
    "tests/attention/",
    "tests/executor/",
    "tests/test_",
)
ALONE = FIRST[:3]  # each test of these is a piece
PIECE = 16  # tests; a piece makes the fixtures of its module anew


def share_kernels(environ: MutableMapping[str, str] = os.environ) -> None:
    """Before anything is compiled: one folder for all processes, which the next run finds too."""
    home = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    environ.setdefault(VARIABLE, str(home / "ridgeline-tests"))


def cut_into_pieces(items: list[pytest.Item]) -> None:
    """Sort the tests and name the piece of each, for `--dist loadgroup --no-loadscope-reorder`."""

    def place(item: pytest.Item) -> int:
        return next((i for i, head in enumerate(FIRST) if item.nodeid.startswith(head)), len(FIRST))

    items.sort(key=place)
    seen: Counter[str] = Counter()
    for item in items:
        module = item.nodeid.split("::")[0]
        number = seen[module] // (1 if item.nodeid.startswith(ALONE) else PIECE)
        item.add_marker(pytest.mark.xdist_group(f"{module}-{number}"))
        seen[module] += 1


def take_share(monkeypatch: pytest.MonkeyPatch, num_processes: int) -> None:
    """Let the device have as much memory as one of so many processes may use. What tests start as
    processes of their own has to fit into a share that is left over."""

    def total(device: CudaDevice) -> int:
        return torch.cuda.mem_get_info(device.torch_device)[1] // (num_processes + 2)

    def free(device: CudaDevice) -> int:
        return max(1, total(device) - torch.cuda.memory_allocated(device.torch_device))

    monkeypatch.setattr(CudaDevice, "memory_total", total)
    monkeypatch.setattr(CudaDevice, "memory_free", free)
