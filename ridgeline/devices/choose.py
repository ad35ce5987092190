"""Which device does a name mean?"""

from __future__ import annotations

import torch

from ridgeline.config import check_device
from ridgeline.devices.cpu import CpuDevice
from ridgeline.devices.cuda import CudaDevice
from ridgeline.devices.device import Device


def open_device(name: str) -> Device:
    """`auto` (a GPU if there is one, else the CPU), `cpu`, `cuda` or `cuda:N`.

    ConfigError for other names and for GPUs that are not there.
    """
    check_device(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice()
    return CudaDevice(int(name.partition(":")[2] or 0))
