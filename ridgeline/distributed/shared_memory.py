"""How do ranks on the CPUs of one host talk? Sums and gathers in memory that all have mapped.

The memory has no name: rank 0 makes it and the others open it by rank 0's descriptor, so nothing is
left in the file system however a rank ends. What is not a tensor of SUMS goes by gloo, which is
also how they meet.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
from collections.abc import Callable

import torch

from ridgeline.distributed.gloo import Gloo, nobody_knows
from ridgeline.errors import ConfigError
from ridgeline.kernels.cpu import native, recorder

SUMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 5}  # RlDtype
BUFFER_BYTES = 256 << 10  # of each of a rank's two; longer tensors go in pieces
SPIN_S = 50e-6  # a rank that waits longer for another lets its core go


class _Ranks(ctypes.Structure):
    """`RlRanks` of shared_memory.h."""

    _fields_ = (
        ("begin", ctypes.c_void_p),
        ("processes", ctypes.c_void_p),
        ("buffer_bytes", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
        ("timeout_ns", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("step", ctypes.c_uint32),
        ("waited_us", ctypes.c_uint32),
    )


class _Call(ctypes.Structure):
    """`RlRanksCall` of shared_memory.h."""

    _fields_ = (
        ("ranks", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_bytes", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


class _Columns(ctypes.Structure):
    """`RlColumnsCall` of shared_memory.h."""

    _fields_ = (
        ("rows", _Call),
        ("row_bytes", ctypes.c_int64),
        ("out_row_bytes", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
    )


class SharedMemory(Gloo):
    """A rank that has ended, is late or does something else than this one is an EngineFault."""

    captures = True
    devices = ("cpu",)

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        *,
        listener: socket.socket | None = None,
        timeout_s: float,
        alive: Callable[[], None] = nobody_knows,
    ) -> None:
        super().__init__(rank, size, address, listener=listener, timeout_s=timeout_s, alive=alive)
        self._size = size
        memory, problem = None, ""
        self._processes: list[int] = []
        made, num_bytes = -1, ctypes.c_int64()
        if (library := native.library()) is None:
            problem = f"there are no native CPU kernels ({native.why_no_library()})"
        elif library.rl_ranks_bytes(size, ctypes.c_int64(BUFFER_BYTES), ctypes.byref(num_bytes)):
            problem = f"{size} ranks are too many"
        elif rank == 0:
            made = os.memfd_create("ridgeline")
            os.ftruncate(made, num_bytes.value)
        ours = torch.tensor([os.getpid(), made])
        where = [(int(w[0]), int(w[1])) for w in super().all_gather(ours)]
        try:
            self._processes = [os.pidfd_open(process) for process, _ in where]
            memory = _open(*where[0], num_bytes.value)
        except OSError as error:
            problem = problem or f"rank 0's memory cannot be opened ({error.strerror})"
        failed = super().all_reduce(torch.tensor([bool(problem)], dtype=torch.int32)).item()
        if made >= 0:
            os.close(made)
        if library is None or memory is None or failed:
            self.close()
            raise ConfigError(
                f"rank {rank} cannot share memory with the others:"
                f" {problem or 'another rank says why'}; use --collective gloo"
            )
        self._sum, self._gather = library.rl_ranks_sum, library.rl_ranks_gather
        self._columns = library.rl_ranks_columns
        descriptors = (ctypes.c_int32 * size)(*self._processes)
        begin = torch.frombuffer(memory, dtype=torch.uint8)
        self._ranks = _Ranks(
            begin=begin.data_ptr(),
            processes=ctypes.addressof(descriptors),
            buffer_bytes=BUFFER_BYTES,
            spin_ns=int(SPIN_S * 1e9),
            timeout_ns=int(timeout_s * 1e9),
            rank=rank,
            size=size,
        )
        self._waited_us = 0
        self._kept = self._ranks, begin, descriptors
        self._leave = library.rl_ranks_leave

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in SUMS:
            return super().all_reduce(x)
        x = x.contiguous()
        call = _Call(ctypes.addressof(self._ranks), x.data_ptr(), 0, x.nbytes, SUMS[x.dtype])
        recorder.launch(self._sum, call, x, *self._kept)
        return x

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.contiguous()
        out = torch.empty((self._size, *x.shape), dtype=x.dtype)
        call = _Call(ctypes.addressof(self._ranks), x.data_ptr(), out.data_ptr(), x.nbytes, 0)
        recorder.launch(self._gather, call, x, out, *self._kept)
        return [out[rank] for rank in range(self._size)]

    def gather_columns(self, x_TC: torch.Tensor, out_TN: torch.Tensor) -> None:
        is_alike = out_TN.stride(1) == 1 and x_TC.dtype == out_TN.dtype
        if not is_alike:
            super().gather_columns(x_TC, out_TN)
            return
        x, size = x_TC.contiguous(), x_TC.dtype.itemsize
        rows = _Call(ctypes.addressof(self._ranks), x.data_ptr(), out_TN.data_ptr(), x.nbytes, 0)
        sizes = x.shape[1] * size, out_TN.shape[1] * size, out_TN.stride(0) * size
        call = _Columns(rows, *sizes)
        recorder.launch(self._columns, call, x, out_TN, *self._kept)

    def waited_s(self) -> float:
        """To be asked before the counter goes round: once in 71 minutes."""
        self._waited_us += (self._ranks.waited_us - self._waited_us) % (1 << 32)
        return self._waited_us * 1e-6

    def abandon(self) -> None:
        """A process that is stopped, and not ours to kill, has left as one that has ended."""
        super().abandon()
        for rank in range(self._size):
            if rank != self._ranks.rank:
                other = _Ranks.from_buffer_copy(self._ranks)
                other.rank = rank
                self._leave(ctypes.byref(other))

    def close(self) -> None:
        if hasattr(self, "_leave"):
            self._leave(ctypes.byref(self._ranks))
        for descriptor in self._processes:
            os.close(descriptor)
        self._processes = []
        super().close()


def _open(process: int, descriptor: int, num_bytes: int) -> mmap.mmap:
    opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
    try:
        return mmap.mmap(opened, num_bytes)
    finally:
        os.close(opened)
