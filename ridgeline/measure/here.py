"""Which device does one stand on, and what is it like? Loads a tensor library only when asked."""

from __future__ import annotations

from ridgeline.cost.hardware import Device
from ridgeline.records import find_record


def this_key(device: str = "auto", threads: int | None = None) -> str:
    """What the records of this machine's device are called."""
    from ridgeline.measure.machine import key_here

    return key_here(device, threads)


def this_device(device: str = "auto", threads: int | None = None) -> Device:
    """The machine one stands on: the figures of its calibration, else measured in seconds."""
    if (found := find_record(this_key(device, threads))) is not None:
        return found.device
    from ridgeline.measure.machine import measured_here

    return measured_here(device, threads)
