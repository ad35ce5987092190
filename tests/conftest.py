"""Shared fixtures: where the third-party models and expectations are, and one compute thread."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

# What somebody has calibrated on this machine must not change what the tests see. Set here, not in
# a fixture, so that it holds while modules are collected and in the processes that tests start.
_CACHE = tempfile.TemporaryDirectory(prefix="ridgeline-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name

# The device that the correctness suite runs on; `make test-gpu` sets it to cuda.
TEST_DEVICE = os.environ.get("RIDGELINE_TEST_DEVICE", "cpu")


def find_shared() -> Path | None:
    """The folder of third-party models and texts, which is never part of the repository:
    RIDGELINE_SHARED, else `shared` beside the checkout."""
    named = os.environ.get("RIDGELINE_SHARED")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared"
    return folder if (folder / "models").is_dir() else None


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of third-party material; tests that need it are skipped without it."""
    folder = find_shared()
    if folder is None:
        pytest.skip("needs the shared models and texts (set RIDGELINE_SHARED)")
    return folder
