"""Which device does one stand on, and what is it like? Loads a tensor library only when asked."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.cost.hardware import Device
from ridgeline.records import find_record


def this_key(device: str = "auto", threads: int | None = None) -> str:
    """What the records of this machine's device are called."""
    from ridgeline.measure.machine import key_here

    return key_here(device, threads)


def as_it_is_now(recorded: Device, device: str = "auto") -> Device:
    """With no more memory than this process may have: limits may have come since."""
    from ridgeline.devices import open_device

    total = open_device(device).memory_total()
    return replace(recorded, memory_bytes=min(recorded.memory_bytes, total))


def this_device(device: str = "auto", threads: int | None = None) -> Device:
    """The machine one stands on: the figures of its calibration, else measured in seconds."""
    if (found := find_record(this_key(device, threads))) is not None:
        return as_it_is_now(found.device, device)
    from ridgeline.measure.machine import measured_here

    return measured_here(device, threads)
