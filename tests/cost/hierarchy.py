"""How large and how fast is each place that numbers can be in, from the chip out to the host?

Sources: NVIDIA A100 and H100 Tensor Core GPU Architecture whitepapers (units, bytes per unit, L2
bytes per clock); PCI Express base specification (transfers per second, line coding).
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.cost.hardware import Device

# Gigatransfers per second of one lane and share of them that is payload, by generation.
PCIE = {3: (8.0, 128 / 130), 4: (16.0, 128 / 130), 5: (32.0, 128 / 130)}


@dataclass(frozen=True, slots=True)
class Tier:
    """`bytes_per_s` None: not published. `capacity_bytes` None: that of another machine part."""

    name: str
    capacity_bytes: int | None
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class OnChip:
    """`units` multiprocessors with their own L1/shared memory, and the L2 that they share."""

    units: int
    bytes_per_unit: int
    bytes_per_clock: int  # of one unit
    l2_bytes_per_clock: int | None  # of all
    clock_hz: float


_A100 = OnChip(108, 192 << 10, 128, 5120, 1.41e9)
_H100 = OnChip(132, 256 << 10, 128, None, 1.83e9)
ON_CHIP = {
    "a100-40-sxm": _A100,
    "a100-80-sxm": _A100,
    "a100-80-pcie": _A100,
    "h100-sxm": _H100,
    "h200-sxm": _H100,
}


def tiers(device: Device) -> tuple[Tier, ...]:
    """Fastest and smallest first; the chip's own memory only where its structure is known."""
    found: list[Tier] = []
    chip = ON_CHIP.get(device.name)
    if chip is not None:
        speed = chip.units * chip.bytes_per_clock * chip.clock_hz
        found.append(Tier("on chip", chip.units * chip.bytes_per_unit, speed))
    l2_clock = None if chip is None else chip.l2_bytes_per_clock
    l2_speed = None if chip is None or l2_clock is None else l2_clock * chip.clock_hz
    found.append(Tier("last cache", device.l2_bytes, l2_speed))
    found.append(Tier("device memory", device.memory_bytes, device.bandwidth))
    if device.host_link_bytes_per_s:
        found.append(Tier("host memory", None, device.host_link_bytes_per_s))
    return tuple(found)


def pcie_bytes_per_s(generation: int, lanes: int = 16) -> float:
    """Peak of one direction; copies reach about four fifths of it."""
    transfers, payload = PCIE[generation]
    return transfers * 1e9 * lanes * payload / 8
