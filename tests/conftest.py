"""Shared fixtures: where the third-party models and expectations are, and one compute thread."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.thinning import thin_out

torch.set_num_threads(1)

# The device that the correctness suite runs on; `make test-gpu` sets it to cuda.
TEST_DEVICE = os.environ.get("RIDGELINE_TEST_DEVICE", "cpu")

if TEST_DEVICE != "cpu":  # before XDG_CACHE_HOME changes
    from tests.gpu.sharing import share_kernels

    share_kernels()

# What somebody has calibrated on this machine must not change what the tests see. Set here, not in
# a fixture, so that it holds while modules are collected and in the processes that tests start.
_CACHE = tempfile.TemporaryDirectory(prefix="ridgeline-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name

NUM_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


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


@pytest.fixture(autouse=True)
def _keep_logging() -> Iterator[None]:
    """The commands set up the logger of the package, which other tests listen to."""
    logger = logging.getLogger("ridgeline")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    thin_out(items)
    if TEST_DEVICE != "cpu" and NUM_PROCESSES > 1:
        from tests.gpu.sharing import cut_into_pieces

        cut_into_pieces(items)


@pytest.fixture(scope="session", autouse=True)
def _no_warm_up() -> Iterator[None]:
    """On a GPU each test captures what it needs, and no more."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if TEST_DEVICE != "cpu":
            monkeypatch.setattr("ridgeline.build.WARM_UP_S", 0.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _share_of_the_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if TEST_DEVICE != "cpu" and NUM_PROCESSES > 1:
            from tests.gpu.sharing import take_share

            take_share(monkeypatch, NUM_PROCESSES)
        yield
