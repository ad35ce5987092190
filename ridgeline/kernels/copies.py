"""How do a few numbers reach a GPU, and come back, at the cost of microseconds?

By the driver's own calls. torch's take four times as long: on the host of an H200 20 us to send
eight numbers, 15 to fetch them and 14 to mark a place, as its allocator keeps track of each copy
through pinned memory. So whoever calls these keeps the pinned memory as it is until a mark that
was set behind the copy is reached. To fetch, a kernel writes into the host's memory: a copy by the
driver holds up what comes behind it for 10 us, this for 3.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from threading import get_ident

import torch

from ridgeline.kernels import nvrtc

THREADS = 256
MOST_BYTES = 64 << 10  # that a single block fetches; more of them are a copy by the driver
NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
NOT_READY = 600  # CUDA_ERROR_NOT_READY
WORD = 8  # bytes: the addresses that are fetched from are multiples of it


class Copies:
    """For the current stream of one GPU. EngineFault says what the driver said."""

    def __init__(self, device: torch.device) -> None:
        self._driver = nvrtc.cuda_driver()
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._stream = lru_cache(maxsize=8)(ctypes.c_void_p)
        self._context = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # the device has a context from here on
            code = self._driver.cuCtxGetCurrent(ctypes.byref(self._context))
        nvrtc.check_driver(code, "looking for the GPU's context")
        self._thread = get_ident()
        self._copy_out: nvrtc.Kernel | None = None
        if nvrtc.available():
            defines = {"THREADS": THREADS}
            self._copy_out = nvrtc.kernel("copy_out.cu", "copy_out", defines, self._device)

    def send(self, target: int, pinned: int, num_bytes: int) -> None:
        """From one address to another."""
        there, here = ctypes.c_void_p(target), ctypes.c_void_p(pinned)
        code = self._driver.cuMemcpyHtoDAsync_v2(
            there, here, ctypes.c_size_t(num_bytes), self._current()
        )
        nvrtc.check_driver(code, "sending numbers to the GPU")

    def fetch(self, pinned: int, source: int, num_bytes: int) -> None:
        """The same the other way."""
        here, there, stream = ctypes.c_void_p(pinned), ctypes.c_void_p(source), self._current()
        kernel = self._copy_out
        if kernel is None or num_bytes > MOST_BYTES or source % WORD or pinned % WORD:
            code = self._driver.cuMemcpyDtoHAsync_v2(
                here, there, ctypes.c_size_t(num_bytes), stream
            )
        else:
            args = (there, here, ctypes.c_longlong(num_bytes))
            places = (ctypes.c_void_p * 3)(*[ctypes.addressof(arg) for arg in args])
            code = self._driver.cuLaunchKernel(
                kernel.function, 1, 1, 1, THREADS, 1, 1, 0, stream, places, None
            )
        nvrtc.check_driver(code, "fetching numbers from the GPU")

    def make_event(self) -> ctypes.c_void_p:
        self._enter()
        event = ctypes.c_void_p()
        code = self._driver.cuEventCreate(ctypes.byref(event), NO_TIMING)
        nvrtc.check_driver(code, "making an event")
        return event

    def set_event(self, event: ctypes.c_void_p) -> None:
        code = self._driver.cuEventRecord(event, self._current())
        nvrtc.check_driver(code, "marking a place in a stream")

    def wait(self, event: ctypes.c_void_p) -> None:
        """Until the device has done what was asked of it before the event was set."""
        self._enter()
        nvrtc.check_driver(self._driver.cuEventSynchronize(event), "waiting for the GPU")

    def is_reached(self, event: ctypes.c_void_p) -> bool:
        """The device has done what was asked of it before, or has failed: `wait` would return."""
        self._enter()
        return int(self._driver.cuEventQuery(event)) != NOT_READY

    def drop_event(self, event: ctypes.c_void_p) -> None:
        self._driver.cuEventDestroy_v2(event)

    def _current(self) -> ctypes.c_void_p:
        self._enter()
        raw: int = torch._C._cuda_getCurrentRawStream(self._device.index)
        return self._stream(raw)

    def _enter(self) -> None:
        """Each thread has a current context of its own, which may be none."""
        if (thread := get_ident()) != self._thread:
            nvrtc.check_driver(self._driver.cuCtxSetCurrent(self._context), "changing threads")
            self._thread = thread
