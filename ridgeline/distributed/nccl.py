"""How do ranks on several GPUs talk? NVIDIA's NCCL, on the stream of whoever calls.

The library that torch brings is called directly: torch's own group moves each call to a stream of
its own and back, which costs more than a small sum, in captured steps too. Tensors of the CPU go by
gloo, which is also how the ranks meet.
"""

from __future__ import annotations

import ctypes
import socket
import threading
from collections.abc import Callable
from functools import cache

import torch

from ridgeline.distributed.gloo import Gloo, nobody_knows
from ridgeline.errors import ConfigError, EngineFault
from ridgeline.kernels.nvrtc import library_beside_torch

SUM, BYTES = 0, 1  # ncclSum, ncclUint8
DTYPES = {  # ncclDataType_t
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6,
    torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES


class _UniqueId(ctypes.Structure):
    """ncclUniqueId, which is passed by value."""

    _fields_ = (("content", ctypes.c_byte * ID_BYTES),)


class Nccl(Gloo):
    """Of the GPU that is current where it is made. What waits for a rank that has ended does so
    until it is abandoned."""

    captures = True
    devices = ("cuda",)

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
        self.size, self.timeout_s = size, timeout_s
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._comm = ctypes.c_void_p()
        torch.cuda.synchronize(self.device)  # the device has a context from here on
        self.meet(rank)

    def meet(self, rank: int) -> None:
        name, problem = _UniqueId(), ""
        try:
            if rank == 0:
                _check(_library().ncclGetUniqueId(ctypes.byref(name)), "making a name")
        except EngineFault as fault:
            problem = str(fault)
        told = torch.tensor([bool(problem), *bytes(name)], dtype=torch.uint8)
        told = self.broadcast(told, 0)
        if told[0]:
            raise ConfigError(f"ranks cannot talk by NCCL: {problem or 'rank 0 says why'}")
        name = _UniqueId.from_buffer_copy(bytes(told[1:].tolist()))
        with torch.cuda.device(self.device):
            code = _library().ncclCommInitRank(ctypes.byref(self._comm), self.size, name, rank)
        if code:
            raise ConfigError(f"rank {rank} cannot talk by NCCL: {_words(code)}")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return super().all_reduce(x)
        x = x.contiguous()
        sizes = ctypes.c_size_t(x.numel()), DTYPES[x.dtype], SUM
        self._call("ncclAllReduce", x, x, *sizes)
        return x

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        if not x.is_cuda:
            return super().all_gather(x)
        x = x.contiguous()
        out = x.new_empty((self.size, *x.shape))
        self._call("ncclAllGather", x, out, ctypes.c_size_t(x.nbytes), BYTES)
        return list(out.unbind())

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        if not x.is_cuda:
            return super().broadcast(x, source)
        x = x.contiguous()
        self._call("ncclBroadcast", x, x, ctypes.c_size_t(x.nbytes), BYTES, source)
        return x

    def abandon(self) -> None:
        """Whatever waits on the device ends. NCCL's call lasts until no captured step refers to
        this any more: a thread waits for it."""
        super().abandon()
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            abort = _library().ncclCommAbort
            threading.Thread(target=abort, args=(comm,), name="nccl-abort", daemon=True).start()

    def close(self) -> None:
        self.abandon()
        super().close()

    def _call(self, name: str, x: torch.Tensor, out: torch.Tensor, *sizes: object) -> None:
        """In the order of the current stream."""
        if not self._comm:
            raise EngineFault("the ranks do not talk any more")
        if not x.numel():
            return
        places = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        _check(getattr(_library(), name)(*places, *sizes, self._comm, stream), name)


def _check(code: int, doing: str) -> None:
    if code:
        raise EngineFault(f"{doing}: {_words(code)}")


def _words(code: int) -> str:
    library = _library()
    library.ncclGetLastError.restype = library.ncclGetErrorString.restype = ctypes.c_char_p
    said, last = library.ncclGetErrorString(code), library.ncclGetLastError(None)
    return f"NCCL error {code}, {(said or b'').decode()} ({(last or b'').decode().strip()})"


@cache
def _library() -> ctypes.CDLL:
    return library_beside_torch("libnccl.so.2", "NCCL")
