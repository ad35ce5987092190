"""What else goes on on a GPU? Asked of NVIDIA's management library, which comes with the driver."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
SUCCESS, INSUFFICIENT_SIZE = 0, 7  # of nvmlReturn_t
SM_CLOCK = 1  # nvmlClockType_t
IDLE = 0x1  # of the clock's reasons, as those below
HELD_BY = {
    0x2: "its application clocks",
    0x4: "the power limit",
    0x8: "a hardware slowdown",
    0x10: "another GPU's clock",
    0x20: "heat",
    0x40: "heat",
    0x80: "the power supply",
}


@dataclass(frozen=True, slots=True)
class GpuState:
    """One reading. `num_processes` compute on it, this one among them; `held_by` is empty where its
    clock is free. `busy_share` is of the last moments."""

    busy_share: float
    num_processes: int
    clock_mhz: int
    max_clock_mhz: int
    held_by: str
    is_idle: bool


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuReader:
    """Reads one GPU, named by its uuid ("GPU-..."); None where the library cannot say."""

    def __init__(self, uuid: str, library: Any = None) -> None:
        self._handle = ctypes.c_void_p()
        self._library: Any = None
        try:
            nvml = ctypes.CDLL(LIBRARY) if library is None else library
            found = (
                nvml.nvmlInit_v2() == SUCCESS
                and nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._handle))
                == SUCCESS
            )
            self._library = nvml if found else None
        except (OSError, AttributeError):
            return

    def read(self) -> GpuState | None:
        if self._library is None:
            return None
        used, clock, most = _Utilization(), ctypes.c_uint(), ctypes.c_uint()
        reasons, number = ctypes.c_ulonglong(), ctypes.c_uint(0)
        nvml, handle, ref = self._library, self._handle, ctypes.byref
        try:
            codes = (
                nvml.nvmlDeviceGetUtilizationRates(handle, ref(used)),
                nvml.nvmlDeviceGetClockInfo(handle, SM_CLOCK, ref(clock)),
                nvml.nvmlDeviceGetMaxClockInfo(handle, SM_CLOCK, ref(most)),
                nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ref(reasons)),
            )
            # With room for none it says how many there are.
            listed = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ref(number), None)
        except AttributeError:
            return None
        if any(codes) or listed not in (SUCCESS, INSUFFICIENT_SIZE):
            return None
        held = next((why for bit, why in HELD_BY.items() if reasons.value & bit), "")
        is_idle = bool(reasons.value & IDLE)
        return GpuState(used.gpu / 100, number.value, clock.value, most.value, held, is_idle)
