"""What takes a GPU's driver so long, and can it begin before torch is imported?

The driver finds its devices and makes a context: a second or more on a machine with many GPUs, in
which it needs no Python. torch uses the same (primary) context when it comes to that.
"""

from __future__ import annotations

import ctypes
from threading import Thread

DRIVER = "libcuda.so.1"
SUCCESS = 0


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
