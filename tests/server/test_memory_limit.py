"""In a control group with little memory, does the server refuse before the kernel kills?"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.server.running import PATIENCE_S, Running, until

MB = 1 << 20
GROUPS = Path("/sys/fs/cgroup/memory")
BODY = b'{"model": "demo:chat", "max_tokens": 1, "prompt": [' + b"70000, " * 500_000 + b"1]}"


@pytest.fixture
def group() -> Iterator[Path]:
    folder = GROUPS / f"ridgeline-server-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(-1))
    except OSError as problem:
        pytest.skip(f"this machine lets nobody make a control group of version 1: {problem}")
    yield folder
    until(lambda: not (folder / "cgroup.procs").read_text(), "the group to be empty")
    with suppress(OSError):
        folder.rmdir()


def serve(group: Path, *flags: str) -> subprocess.Popen[str]:
    join = f"import os; open('{group}/cgroup.procs', 'w').write(str(os.getpid()))"
    run = "from ridgeline.cli.main import console; console()"
    return subprocess.Popen(
        [sys.executable, "-c", f"{join}\n{run}", "serve", "--port=0", "--device=cpu", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def number(group: Path, name: str) -> int:
    return int((group / name).read_text().split()[-1])


def flood(url: str) -> Counter[int]:
    """24 clients send long lists of token ids at once."""

    def ask(_: int) -> int:
        return httpx.post(
            f"{url}/v1/completions",
            content=BODY,
            headers={"content-type": "application/json"},
            timeout=PATIENCE_S,
            trust_env=False,
        ).status_code

    with ThreadPoolExecutor(24) as pool:
        return Counter(pool.map(ask, range(72)))


@pytest.mark.slow
def test_refusals_come_before_the_kernels(group: Path) -> None:
    """Base and a fifth: not started. With room for its caches and 96 MiB of bodies: a flood of
    bodies of many times that is refused, and nothing is killed."""
    with serve(group) as process:
        base = started(process, group)
        limit = group / "memory.limit_in_bytes"
    limit.write_text(str(base * 6 // 5))
    with serve(group) as process:
        assert process.wait(PATIENCE_S) == 2
        assert process.stderr is not None
        text = process.stderr.read()
        assert "does not fit" in text
        assert "(cgroup memory.limit_in_bytes 2" in text
    limit.write_text(str(base + 450 * MB))
    with serve(group, "--max-held-body-bytes=96MiB") as process:
        started(process, group, flooded=True)
    assert number(group, "memory.failcnt") == 0
    assert "oom_kill 0" in (group / "memory.oom_control").read_text()


def started(process: subprocess.Popen[str], group: Path, *, flooded: bool = False) -> int:
    """Bytes of the group once the server is ready. Stops it."""
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    server = Running(process, url, group)
    until(server.is_ready, "the server to be ready")
    used = number(group, "memory.usage_in_bytes")
    if flooded:
        codes = flood(url)
        assert set(codes) == {400, 503}, codes
        assert server.is_ready()
    assert server.stop() == 0
    return used
