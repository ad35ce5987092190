"""Which memories does a device have, from the smallest and fastest to the largest and slowest, and
what lives where?

What stays for long (weights, then keys and values) fills the device's memory first; what has no
room there lies in the host's, and what has none there on disk, and comes through the slower link
each time that it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.cost.hardware import Device

SRAM, LAST_CACHE, MEMORY, HOST, DISK = "SRAM", "last cache", "memory", "host memory", "disk"


@dataclass(frozen=True, slots=True)
class Tier:
    """`bytes_per_s` is how fast the arithmetic units are fed from it; None: no data sheet says."""

    name: str
    bytes: float
    bytes_per_s: float | None
    source: str


@dataclass(frozen=True, slots=True)
class Amount:
    """Something that is kept, of which `read_bytes` are read in a step."""

    name: str
    bytes: float
    read_bytes: float


@dataclass(frozen=True, slots=True)
class Placed:
    """The part of an amount that lies in a tier."""

    name: str
    tier: str
    bytes: float
    read_bytes: float


def tiers(device: Device, host_bytes: float, disk_bytes_per_s: float) -> tuple[Tier, ...]:
    """The fastest first. The processor of a host has no link to memory of its own."""
    found = []
    if device.sram is not None:
        sram = device.sram
        found.append(Tier(SRAM, sram.bytes, sram.bytes_per_s, device.sources.get("sram", "")))
    if device.l2_bytes:
        found.append(Tier(LAST_CACHE, device.l2_bytes, None, device.sources.get("l2_bytes", "")))
    said = device.sources.get("bandwidth", "")
    found.append(Tier(MEMORY, device.memory_bytes, device.bandwidth, said))
    if device.kind == "gpu":
        said = device.sources.get("host_link_bytes_per_s", "")
        found.append(Tier(HOST, host_bytes, device.host_link_bytes_per_s, said))
    found.append(Tier(DISK, float("inf"), disk_bytes_per_s, "as asked"))
    return tuple(found)


def place(amounts: Sequence[Amount], levels: Sequence[Tier], share: float) -> list[Placed]:
    """Each amount in turn, as much as has room, in the device's memory, of which `share` may be
    taken, then in slower tiers."""
    slow = [level.name for level in levels].index(MEMORY)
    room = [level.bytes * (share if level.name == MEMORY else 1.0) for level in levels]
    placed = []
    for amount in amounts:
        left = amount.bytes
        for i in range(slow, len(levels)):
            size = min(left, room[i])
            if size > 0:
                read = amount.read_bytes * size / amount.bytes
                placed.append(Placed(amount.name, levels[i].name, size, read))
                room[i] -= size
                left -= size
    return placed


def read_seconds(placed: Sequence[Placed], levels: Sequence[Tier]) -> dict[str, float]:
    """By tier: the time in which what lies there is read once for a step."""
    rate = {level.name: level.bytes_per_s for level in levels}
    found = dict.fromkeys(rate, 0.0)
    for one in placed:
        if speed := rate[one.tier]:
            found[one.tier] += one.read_bytes / speed
    return found
