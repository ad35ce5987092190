"""Which device does a name mean?"""

from __future__ import annotations

import torch

from ridgeline.devices.cpu import CpuDevice
from ridgeline.devices.cuda import CudaDevice
from ridgeline.devices.device import Device
from ridgeline.errors import ConfigError


def open_device(name: str) -> Device:
    """`auto` (a GPU if there is one, else the CPU), `cpu`, `cuda` or `cuda:N`.

    ConfigError for other names and for GPUs that are not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice()
    kind, separator, index = name.partition(":")
    if kind != "cuda" or (separator and not index.isdigit()):
        raise ConfigError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N")
    return CudaDevice(int(index) if separator else 0)
