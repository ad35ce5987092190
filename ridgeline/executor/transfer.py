"""How do host numbers reach the device, and results come back, without anybody waiting?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]

_ALIGNMENT = 16  # bytes; the largest element that a view of the packed buffer may have


class Transfer(Protocol):
    """`send` puts arrays on the device in stream order. `fetch` gives a host tensor whose numbers
    are there once the mark made after it `is reached`; with `is_kept` false it may be written to as
    soon as the call has returned."""

    def send(self, array: Array) -> torch.Tensor: ...

    def send_all(self, arrays: Sequence[Array]) -> list[torch.Tensor]: ...

    def send_into(self, array: Array, target: torch.Tensor) -> None:
        """All numbers of the array into a flat tensor of its dtype and size."""
        ...

    def fetch(self, tensor: torch.Tensor, *, is_kept: bool = True) -> torch.Tensor: ...

    def mark(self) -> Mark | None: ...


class Mark(Protocol):
    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it before the mark."""
        ...


class HostTransfer:
    """On the CPU the numbers are there already: tensors share the arrays' memory."""

    def send(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array)

    def send_all(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def send_into(self, array: Array, target: torch.Tensor) -> None:
        target.copy_(torch.from_numpy(array).view(-1))

    def fetch(self, tensor: torch.Tensor, *, is_kept: bool = True) -> torch.Tensor:
        return tensor if is_kept else tensor.clone()

    def mark(self) -> Mark | None:
        return None


class CudaTransfer:
    """Through pinned memory. torch's pinned allocator keeps a buffer until the copy that reads it
    has run, so each transfer takes a fresh one and nothing is ever waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, array: Array) -> torch.Tensor:
        return self.send_all([array])[0]

    def send_all(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """All arrays in one copy."""
        starts, size = [], 0
        for array in arrays:
            starts.append(size)
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        buffer = pinned.numpy()
        for array, start in zip(arrays, starts, strict=True):
            room = buffer[start : start + array.nbytes].view(array.dtype)
            np.copyto(room.reshape(array.shape), array)
        there = pinned.to(self._device, non_blocking=True)
        return [
            there[start : start + array.nbytes].view(_torch_dtype(array)).view(array.shape)
            for array, start in zip(arrays, starts, strict=True)
        ]

    def send_into(self, array: Array, target: torch.Tensor) -> None:
        pinned = torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
        np.copyto(pinned.numpy().reshape(array.shape), array)
        target.copy_(pinned, non_blocking=True)

    def fetch(self, tensor: torch.Tensor, *, is_kept: bool = True) -> torch.Tensor:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)

    def mark(self) -> Mark | None:
        event: Mark = torch.cuda.current_stream(self._device).record_event()
        return event


_TORCH_DTYPES = {
    "int64": torch.int64,
    "int32": torch.int32,
    "float32": torch.float32,
}


def _torch_dtype(array: Array) -> torch.dtype:
    return _TORCH_DTYPES[array.dtype.name]


def transfer_to(device: torch.device) -> Transfer:
    return CudaTransfer(device) if device.type == "cuda" else HostTransfer()
