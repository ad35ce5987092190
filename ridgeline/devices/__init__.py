"""Which device runs the model? `open_device` turns a name into one; `wake_driver` begins earlier.

Nothing here imports torch before it is needed: who wakes a driver does it beside that import. The
driver finds its devices and makes a context: a second or more on a machine with many GPUs, in which
it needs no Python. torch uses the same (primary) context when it comes to that.
"""

from __future__ import annotations

import ctypes
from threading import Thread
from typing import TYPE_CHECKING, Any

from ridgeline.config import check_device

if TYPE_CHECKING:
    from ridgeline.devices.device import Device

__all__ = ["Device", "open_device", "wake_driver"]

DRIVER = "libcuda.so.1"
SUCCESS = 0


def __getattr__(name: str) -> Any:
    if name != "Device":
        raise AttributeError(f"module 'ridgeline.devices' has no attribute {name!r}")
    from ridgeline.devices import device

    return device.Device


def open_device(name: str) -> Device:
    """`auto` (a GPU if there is one, else the CPU), `cpu`, `cuda` or `cuda:N`.

    ConfigError for other names and for GPUs that are not there.
    """
    import torch

    from ridgeline.devices.cpu import CpuDevice
    from ridgeline.devices.cuda import CudaDevice

    check_device(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice()
    return CudaDevice(int(name.partition(":")[2] or 0))


def wake_driver(name: str, driver: str = DRIVER) -> Thread | None:
    """Begin to wake the GPU that `open_device(name)` will open; None when that is no GPU by its
    name. A driver that is not there or fails says nothing here: `open_device` says it."""
    kind, _, index = ("cuda" if name == "auto" else name).partition(":")
    if kind != "cuda" or not (index or "0").isdigit():
        return None
    thread = Thread(target=_wake, args=(int(index or 0), driver), name="wake")
    thread.start()
    return thread


def _wake(index: int, driver: str) -> None:
    try:
        cuda = ctypes.CDLL(driver)  # its calls leave Python to the others
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if cuda.cuInit(0) != SUCCESS or cuda.cuDeviceGet(ctypes.byref(device), index) != SUCCESS:
            return
        # Kept until the process ends, as torch would keep it.
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    except (OSError, AttributeError):
        return
