"""How much of the host's memory may this process have, and which limit says so?

The machine has some, control groups (version 2 and 1, each level up to the root) and resource
limits allow some: the least of these is what there is. What others in the same group or on the same
machine use is not free. All of it is read from files under `root`, so that a folder can stand for a
machine. Names of files are plain text here: this is read each second, and pathlib interns each part
of a path that it makes, which fills Python's table of such names over an hour.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NO_LIMIT = 1 << 62  # version 1 says a number of this size, version 2 "max"
V2 = ("sys/fs/cgroup", "sys/fs/cgroup/unified")  # alone, or beside version 1
V1 = "sys/fs/cgroup/memory"
LIMITS_V2 = ("memory.max", "memory.high")
CACHE_V2, CACHE_V1 = ("inactive_file", "active_file"), ("total_inactive_file", "total_active_file")


_kept_bytes = 0


def keep_for_others(num_bytes: int) -> None:
    """Other processes on this host will need so much more, whatever this one is told to build."""
    global _kept_bytes
    _kept_bytes = num_bytes


def kept_for_others() -> int:
    return _kept_bytes


@dataclass(frozen=True, slots=True)
class Bound:
    """One limit, in bytes. `free` is what could be allocated below it now, by us and by others."""

    name: str
    limit: int
    free: int

    def text(self) -> str:
        used = max(0, self.limit - self.free)
        return f"{self.name} {self.limit / 2**20:.0f} MiB, {used / 2**20:.0f} MiB of it in use"


@dataclass(frozen=True, slots=True)
class HostMemory:
    """`bound` is in words, and empty where the machine itself has no more."""

    total: int
    free: int
    bound: str


def host_memory(root: Path = Path("/")) -> HostMemory:
    top = os.fspath(root)
    machine = _machine(top)
    bounds = (machine, *_groups(top), *_resource_limits(top))
    tightest = min(bounds, key=lambda bound: bound.free)
    return HostMemory(
        min(bound.limit for bound in bounds),
        max(0, tightest.free),
        "" if tightest is machine else tightest.text(),
    )


def _machine(root: str) -> Bound:
    """MemAvailable of the kernel: free memory and what it would give up for us."""
    table = _table(f"{root}/proc/meminfo")
    total = table.get("MemTotal:", 0) << 10 or PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")
    available = table.get("MemAvailable:")
    return Bound("machine", total, total if available is None else available << 10)


def _groups(root: str) -> Iterator[Bound]:
    """Each limit on the way from our own control group to the root."""
    try:
        lines = _text(f"{root}/proc/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        number, kinds, path = line.split(":", 2)
        if number == "0":
            for mount in V2:
                for folder in _upwards(f"{root}/{mount}", path):
                    yield from _bounds_v2(folder)
        elif "memory" in kinds.split(","):
            for folder in _upwards(f"{root}/{V1}", path):
                yield from _bounds_v1(folder)


def _upwards(mount: str, path: str) -> Iterator[str]:
    """A container may see its own group as the root, whatever the group's path says."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    folders = ("/".join((mount, *parts[:most])) for most in range(len(parts), -1, -1))
    yield from (folder for folder in folders if os.path.isdir(folder))


def _bounds_v2(folder: str) -> Iterator[Bound]:
    used = _number(f"{folder}/memory.current")
    for name in LIMITS_V2:
        limit = _number(f"{folder}/{name}")
        if limit is not None and used is not None:
            yield _bound(f"cgroup {name}", limit, used, _table(f"{folder}/memory.stat"), CACHE_V2)


def _bounds_v1(folder: str) -> Iterator[Bound]:
    """The second of them is the least on the way up, also of groups that a container cannot see."""
    used, table = _number(f"{folder}/memory.usage_in_bytes"), _table(f"{folder}/memory.stat")
    limits = {
        "memory.limit_in_bytes": _number(f"{folder}/memory.limit_in_bytes"),
        "hierarchical_memory_limit": table.get("hierarchical_memory_limit"),
    }
    for name, limit in limits.items():
        if limit is not None and limit < NO_LIMIT and used is not None:
            yield _bound(f"cgroup {name}", limit, used, table, CACHE_V1)


def _bound(
    name: str, limit: int, used: int, table: Mapping[str, int], cache: tuple[str, ...]
) -> Bound:
    """Copies of files are given up for us, mapped weights among them."""
    return Bound(name, limit, limit - used + sum(table.get(kind, 0) for kind in cache))


def _resource_limits(root: str) -> Iterator[Bound]:
    """Of this process alone: addresses, and memory of its own."""
    try:
        pages = [int(word) for word in _text(f"{root}/proc/self/statm").split()]
    except (OSError, ValueError):
        return
    for name, kind, used in (
        ("RLIMIT_AS (ulimit -v)", resource.RLIMIT_AS, pages[0]),
        ("RLIMIT_DATA (ulimit -d)", resource.RLIMIT_DATA, pages[5]),
    ):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            yield Bound(name, limit, limit - used * PAGE_BYTES)


def _table(path: str) -> dict[str, int]:
    """Lines of `name number`, empty when there is no such file."""
    try:
        lines = _text(path).splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines)
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _number(path: str) -> int | None:
    """None where there is no such file, or no limit."""
    try:
        text = _text(path).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
