"""How do host numbers reach the device, and results come back, without anybody waiting?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ridgeline.errors import EngineFault
from ridgeline.kernels.copies import MOST_BYTES, Copies

Array = np.ndarray[Any, np.dtype[Any]]
Event = Any  # a handle of the driver

MOST_KINDS = 256  # of buffers that are kept: sizes and dtypes
MOST_SENT = 1 << 20  # bytes of one copy through a buffer that is kept
MOST_UNMARKED = 64  # buffers in use, with no mark behind them yet: who never sets one gets no more
_ALIGNMENT = 16  # bytes; the largest element that a view of the packed buffer may have


class Transfer:
    """`send` puts arrays on the device in stream order. `fetch` gives a host tensor whose numbers
    are there once the mark made after it is reached, and until that is released; with `is_kept`
    false the tensor may be written to as soon as the call has returned.

    On the CPU, which this class is for, the numbers are there already: tensors share the arrays'
    memory."""

    def send(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array)

    def send_all(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def send_into(self, array: Array, target: torch.Tensor) -> None:
        """All numbers of the array into a flat tensor of its dtype and size."""
        target.copy_(torch.from_numpy(array).view(-1))

    def fetch(self, tensor: torch.Tensor, *, is_kept: bool = True) -> torch.Tensor:
        return tensor if is_kept else tensor.clone()

    def mark(self) -> Mark | None:
        return None


_Key = tuple[torch.dtype, torch.Size]


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Host memory that the device reads or writes, as one copy has it."""

    key: _Key
    tensor: torch.Tensor
    array: Array
    address: int


class Mark:
    """A place in the stream, and the buffers of the copies before it."""

    __slots__ = ("_buffers", "_event", "_owner")

    def __init__(self, owner: CudaTransfer, event: Event, buffers: list[_Buffer]) -> None:
        self._owner, self._event, self._buffers = owner, event, buffers

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it before the mark."""
        if self._event is not None:
            self._owner.calls.wait(self._event)

    def is_reached(self) -> bool:
        """Nobody would have to wait."""
        return self._event is None or self._owner.calls.is_reached(self._event)

    def release(self) -> None:
        """Nobody reads any more what was fetched before this mark, and after the one before."""
        if self._event is not None:
            self._owner.take_back(self._event, self._buffers)
            self._event, self._buffers = None, []

    def __del__(self) -> None:
        """Nobody has waited for this step: its copies may be under way."""
        if self._event is not None:
            with suppress(EngineFault):
                self.synchronize()
                self._owner.calls.drop_event(self._event)


class CudaTransfer(Transfer):
    """Through pinned memory, without waiting. Few numbers, as each step has them, go by the
    driver's own calls through buffers of ours, which are used again once the mark behind them is
    released. All else is left to torch, whose allocator keeps a buffer until its copy has run."""

    def __init__(self, device: torch.device, calls: Copies | None = None) -> None:
        self._device = device
        self.calls = Copies(device) if calls is None else calls
        self._pins = device.type == "cuda"
        self._used: list[_Buffer] = []  # since the last mark
        self._free: dict[_Key, list[_Buffer]] = {}
        self._events: list[Event] = []

    def send(self, array: Array) -> torch.Tensor:
        return self.send_all([array])[0]

    def send_all(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """All arrays in one copy."""
        starts, size = [], 0
        for array in arrays:
            starts.append(size)
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        kept = self._take_some(torch.uint8, size)
        if kept is None:
            pinned = torch.empty(size, dtype=torch.uint8, pin_memory=self._pins)
            buffer = pinned.numpy()
        else:
            buffer = kept.array
        for array, start in zip(arrays, starts, strict=True):
            room = buffer[start : start + array.nbytes].view(array.dtype)
            np.copyto(room.reshape(array.shape), array)
        if kept is None:
            there = pinned.to(self._device, non_blocking=True)
        else:
            there = torch.empty(size, dtype=torch.uint8, device=self._device)
            self.calls.send(there.data_ptr(), kept.address, size)
        return [
            there[start : start + array.nbytes].view(_torch_dtype(array)).view(array.shape)
            for array, start in zip(arrays, starts, strict=True)
        ]

    def send_into(self, array: Array, target: torch.Tensor) -> None:
        kept = self._take_some(target.dtype, array.size) if _is_plain(target) else None
        if kept is None:
            pinned = torch.empty(target.shape, dtype=target.dtype, pin_memory=self._pins)
            np.copyto(pinned.numpy().reshape(array.shape), array)
            target.copy_(pinned, non_blocking=True)
            return
        np.copyto(kept.array[: array.size].reshape(array.shape), array)
        self.calls.send(target.data_ptr(), kept.address, array.nbytes)

    def fetch(self, tensor: torch.Tensor, *, is_kept: bool = True) -> torch.Tensor:
        if not _is_plain(tensor) or not 0 < tensor.nbytes <= MOST_BYTES:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pins)
            return pinned.copy_(tensor, non_blocking=True)
        buffer = self._take((tensor.dtype, tensor.shape))
        self.calls.fetch(buffer.address, tensor.data_ptr(), tensor.nbytes)
        return buffer.tensor

    def mark(self) -> Mark | None:
        event = self._events.pop() if self._events else self.calls.make_event()
        self.calls.set_event(event)
        used, self._used = self._used, []
        return Mark(self, event, used)

    def take_back(self, event: Event, buffers: list[_Buffer]) -> None:
        """The device is done with them, and so is the host."""
        self._events.append(event)
        if len(self._free) > MOST_KINDS:
            self._free.clear()
        for buffer in buffers:
            self._free.setdefault(buffer.key, []).append(buffer)

    def _take_some(self, dtype: torch.dtype, num: int) -> _Buffer | None:
        """With room for so many numbers: a power of two of them, so that there are few kinds."""
        if not 0 < num * dtype.itemsize <= MOST_SENT or len(self._used) >= MOST_UNMARKED:
            return None
        return self._take((dtype, torch.Size((1 << (num - 1).bit_length(),))))

    def _take(self, key: _Key) -> _Buffer:
        free = self._free.get(key)
        if free:
            buffer = free.pop()
        else:
            tensor = torch.empty(key[1], dtype=key[0], pin_memory=self._pins)
            buffer = _Buffer(key, tensor, tensor.numpy(), tensor.data_ptr())
        self._used.append(buffer)
        return buffer


def _is_plain(tensor: torch.Tensor) -> bool:
    """The driver can copy it as it is."""
    return tensor.is_contiguous() and tensor.dtype in _PLAIN


_TORCH_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}
_PLAIN = frozenset(_TORCH_DTYPES.values())


def _torch_dtype(array: Array) -> torch.dtype:
    return _TORCH_DTYPES[array.dtype.name]


def transfer_to(device: torch.device) -> Transfer:
    return CudaTransfer(device) if device.type == "cuda" else Transfer()
