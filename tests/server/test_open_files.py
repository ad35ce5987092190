"""Is the number of connections held against the files that may be open, and is that told?"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource

import pytest

from ridgeline.errors import ConfigError
from ridgeline.server import lifecycle
from ridgeline.server.config import Limits

FILES = 1000 + lifecycle.NUM_OWN_FILES


@pytest.mark.parametrize(
    ("soft", "hard", "connections", "told"),
    [
        (FILES, FILES, 1000, ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1000, ""),
        (256, resource.RLIM_INFINITY, 1000, "raised the limit of open files before=256"),
        (256, 5000, 1000, f"now={FILES}"),
        (256, 628, 500, f"open files to {FILES}"),
        (628, 628, 500, "max_connections=500 asked=1000 open_files=628"),
    ],
)
def test_open_files(
    soft: int, hard: int, connections: int, told: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    set_limits(monkeypatch, soft, hard)
    limits = Limits(max_connections=1000)
    with caplog.at_level(logging.INFO, "ridgeline"):
        assert lifecycle.with_open_files(limits).max_connections == connections
    assert told in caplog.text
    assert bool(told) == bool(caplog.text)


def set_limits(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
    """As the system would have it."""
    limits = [soft, hard]

    def change(which: int, wanted: tuple[int, int]) -> None:
        assert wanted[1] == hard
        limits[0] = wanted[0]

    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", change)


def test_too_few_open_files_for_anyone(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, 64, 64)
    with pytest.raises(ConfigError, match="only 64 files may be open"):
        lifecycle.with_open_files(Limits())


def test_running_out_of_files_is_told_without_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """What asyncio's own loop reports, when it cannot accept."""
    fault = OSError(errno.EMFILE, "Too many open files")
    loop = asyncio.new_event_loop()
    with caplog.at_level(logging.INFO):
        lifecycle._tell(loop, {"message": "socket.accept()", "exception": fault})
        lifecycle._tell(loop, {"message": "something else"})
    loop.close()
    assert [record.name for record in caplog.records] == [lifecycle.logger.name, "asyncio"]
