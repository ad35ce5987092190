"""Which device runs the model? `open_device` turns a name into one; `wake_driver` begins earlier.

Names resolve on first use: who wakes a driver does it beside the import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.devices.choose import open_device
    from ridgeline.devices.device import Device
    from ridgeline.devices.driver import wake_driver

_WHERE = {"Device": "device", "open_device": "choose", "wake_driver": "driver"}

__all__ = ["Device", "open_device", "wake_driver"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ridgeline.devices' has no attribute {name!r}")
    return getattr(import_module(f"ridgeline.devices.{_WHERE[name]}"), name)
