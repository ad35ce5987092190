"""On a GPU that others use, an engine plans with what they leave, and says what they hold."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from ridgeline.architectures import read_spec
from ridgeline.config import EngineConfig, ResolvedConfig
from ridgeline.devices.cuda import CudaDevice
from ridgeline.resolve import resolve
from tests.test_resolve import LLAMA_8B

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HELD = 20 * 10**9
OTHER = f"""
import sys, torch
held = torch.empty({HELD}, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""


def plan() -> tuple[int, ResolvedConfig]:
    """The bytes that an engine for an 8B model would take now; nothing is allocated."""
    resolved, memory = resolve(
        EngineConfig(model="m", device="cuda:0", memory_utilization=1.0),
        read_spec(LLAMA_8B),
        CudaDevice(0),
        model_path="m",
        model_name="m",
        revision=None,
        has_weights=True,
    )
    return sum(row.predicted for row in memory), resolved


def test_an_engine_plans_with_what_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the share of a test process is of no interest here
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("other test processes use the GPU, more or less from moment to moment")
    if torch.cuda.mem_get_info(0)[0] < 3 * HELD:
        pytest.skip("less than 60 GB of the GPU are free")
    alone, _ = plan()
    with subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "ready\n"
        beside, resolved = plan()
        other.stdin.close()
    assert HELD * 0.99 < alone - beside < HELD + (2 << 30)  # and the other's context
    (decision,) = (d for d in resolved.decisions if d.field == "num_blocks")
    assert "the memory left; others hold 2" in decision.because
