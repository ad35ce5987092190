"""Which limit on the host's memory counts? On machines that are folders, and in a real group."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from ridgeline.devices.host_memory import HostMemory, host_memory

MB = 1 << 20
REAL_V1 = Path("/sys/fs/cgroup/memory")


def machine(root: Path, own: str, files: Mapping[str, object] = {}) -> HostMemory:
    """1 GB, 800 MB of it available; `own` is what /proc/self/cgroup says, `files` those below
    /sys/fs/cgroup."""
    numbers = f"MemTotal: {1000 << 10} kB\nMemFree: 7 kB\nMemAvailable: {800 << 10} kB\n"
    for name, text in (
        ("proc/meminfo", numbers),
        ("proc/self/cgroup", own),
        *((f"sys/fs/cgroup/{name}", text) for name, text in files.items()),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(text))
    return host_memory(root)


def v2(folder: str, limit: object, used: int, name: str = "memory.max") -> dict[str, object]:
    """A group whose file cache is 10 MB."""
    stat = f"anon 5\ninactive_file {4 * MB}\nactive_file {6 * MB}\n"
    return {
        f"{folder}/{name}": limit,
        f"{folder}/memory.current": used,
        f"{folder}/memory.stat": stat,
    }


def test_a_machine_without_limits(tmp_path: Path) -> None:
    assert machine(tmp_path, "0::/a\n") == HostMemory(1000 * MB, 800 * MB, "")
    assert machine(tmp_path, "0::/a\n", v2("a", "max", 7)) == HostMemory(1000 * MB, 800 * MB, "")


def test_without_any_of_these_files_there_is_the_machine(tmp_path: Path) -> None:
    found = host_memory(tmp_path)
    assert found.total == found.free == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert found.bound == ""


@pytest.mark.parametrize("name", ["memory.max", "memory.high"])
@pytest.mark.parametrize("tight", ["a", "a/b", "a/b/c"])
def test_each_level_counts(tmp_path: Path, tight: str, name: str) -> None:
    files = dict[str, object]()
    for folder in ("a", "a/b", "a/b/c"):
        files |= v2(folder, 512 * MB if folder == tight else "max", 112 * MB, name)
    found = machine(tmp_path, "0::/a/b/c\n", files)
    bound = f"cgroup {name} 512 MiB, 102 MiB of it in use"
    assert found == HostMemory(512 * MB, 410 * MB, bound)


def test_what_others_in_the_same_group_use_is_not_free(tmp_path: Path) -> None:
    """The outer limit is larger, but there is less of it left."""
    files = v2("a", 900 * MB, 850 * MB) | v2("a/b", 512 * MB, 112 * MB)
    found = machine(tmp_path, "0::/a/b\n", files)
    assert found == HostMemory(512 * MB, 60 * MB, "cgroup memory.max 900 MiB, 840 MiB of it in use")
    files |= v2("a", 900 * MB, 950 * MB)
    assert machine(tmp_path, "0::/a/b\n", files).free == 0


def test_a_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    for own in ("0::/\n", "0::/../../pod\n", "0::/docker/123\n"):
        found = machine(tmp_path, own, v2(".", 512 * MB, 112 * MB))
        assert (found.total, found.free) == (512 * MB, 410 * MB)


def test_version_1_beside_version_2(tmp_path: Path) -> None:
    own = "4:cpu,cpuacct:/x\n3:memory:/a/b\n1:name=systemd:/\n0::/s\n"
    no_limit = 9223372036854771712
    stat = f"inactive_file 1\ntotal_inactive_file {3 * MB}\ntotal_active_file {7 * MB}\n"
    files = {
        "memory/a/memory.limit_in_bytes": no_limit,
        "memory/a/memory.usage_in_bytes": 700 * MB,
        "memory/a/memory.stat": stat,
        "memory/a/b/memory.limit_in_bytes": 512 * MB,
        "memory/a/b/memory.usage_in_bytes": 112 * MB,
        "memory/a/b/memory.stat": stat + f"hierarchical_memory_limit {512 * MB}\n",
        "cpu,cpuacct/x/memory.limit_in_bytes": 1,
    }
    found = machine(tmp_path, own, files)
    bound = "cgroup memory.limit_in_bytes 512 MiB, 102 MiB of it in use"
    assert found == HostMemory(512 * MB, 410 * MB, bound)
    files["memory/a/b/memory.stat"] = stat + f"hierarchical_memory_limit {256 * MB}\n"
    found = machine(tmp_path, own, files)  # a group that cannot be seen from here
    assert (found.total, found.free) == (256 * MB, 154 * MB)
    assert "hierarchical_memory_limit" in found.bound
    assert machine(tmp_path, own, v2("unified/s", 100 * MB, 20 * MB)).free == 90 * MB


@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_limits_of_the_process(name: str) -> None:
    code = f"""
import resource
from ridgeline.devices.host_memory import host_memory
resource.setrlimit(resource.{name}, (256 << 20, 256 << 20))
found = host_memory()
print(found.total, found.free, found.bound)
held = bytearray(100 << 20)
print(found.free - host_memory().free)
"""
    first, second = run(code)
    total, free, bound = first.split(" ", 2)
    assert (int(total), name in bound) == (256 * MB, True)
    assert 0 < int(free) < 256 * MB
    assert int(second) == pytest.approx(100 * MB, abs=2 * MB)


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of version 1 that has 64 MB."""
    folder = REAL_V1 / f"ridgeline-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(64 * MB))
    except OSError as problem:
        pytest.skip(f"this machine lets nobody make a control group of version 1: {problem}")
    yield folder
    with suppress(OSError):
        folder.rmdir()


def test_a_real_group(group: Path) -> None:
    code = f"""
import os
open("{group}/cgroup.procs", "w").write(str(os.getpid()))
from ridgeline.devices.host_memory import host_memory
found = host_memory()
print(found.total, found.free, found.bound)
held = bytearray(os.urandom(1)) * (20 << 20)
print(found.free - host_memory().free)
"""
    first, second = run(code)
    total, free, bound = first.split(" ", 2)
    assert int(total) == 64 * MB
    assert 0 < int(free) <= 64 * MB
    assert bound.startswith("cgroup memory.limit_in_bytes 64 MiB, ")
    assert int(second) == pytest.approx(20 * MB, abs=4 * MB)


def run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
