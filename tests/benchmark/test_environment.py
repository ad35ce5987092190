"""Does a result say where and when it was made?"""

from __future__ import annotations

import platform
from datetime import UTC, datetime, timedelta

import pytest
import torch

from ridgeline import __version__
from ridgeline.benchmark.environment import environment


def test_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/x/ridgeline", "bench", "a b"])
    found = environment(torch.device("cpu"))
    assert found.command == "ridgeline bench 'a b'"
    assert found.ridgeline == __version__
    assert torch.__version__.startswith(found.packages["torch"])  # and may say how it was built
    assert found.python == platform.python_version()
    assert found.threads == torch.get_num_threads()
    assert found.device_name
    age = datetime.now(UTC) - datetime.fromisoformat(found.date)
    assert timedelta(0) <= age < timedelta(minutes=1)


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert environment(torch.device("cpu")).commit is None
