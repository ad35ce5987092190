"""How is a decode step run by one call? Native calls that are collected once and replayed in C.

What a CUDA graph is to kernels of a GPU, a `Recording` is to those of `kernels.cpu`: each of them
takes one pointer to a struct of its arguments, so that a call is two pointers. Whoever calls a
kernel does it by `launch`; while a step is recorded the call is only kept, with the tensors that it
reads and writes, which must then stay where they are. Torch cannot be replayed: while a step is
recorded it may make views and empty tensors, anything else raises CannotRecord.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.errors import EngineFault, InternalError
from ridgeline.kernels.cpu import native

_LINE = 64  # bytes
_CHUNK = 1 << 20  # bytes; more if a tensor needs it
# What a kernel that waits for ranks gives, by thousands (shared_memory.h); the rest is a rank.
_PER_RANK = 1000
_RANK_FAULTS = {
    1: "has ended while others wait for it",
    2: "has left while others wait for it",
    3: "is late: others have waited for it as long as they may",
    4: "does something else than the others, or with another number of bytes",
}


class CannotRecord(Exception):
    """Its argument is what torch was asked to do."""


class Kernel(Protocol):
    """A function of the library: `int f(const Arguments*)`, 0 for success."""

    def __call__(self, arguments: Any, /) -> Any: ...


CallHook = Callable[[str], AbstractContextManager[object]]


class _Call(ctypes.Structure):
    """`RecordedCall` of record.h."""

    _fields_ = (("kernel", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


class Recording:
    """The calls of a step, and all that they point to."""

    def __init__(self) -> None:
        self._calls: list[tuple[Kernel, ctypes.Structure]] = []
        self._kept: list[object] = []

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, kernel: Kernel, arguments: ctypes.Structure, kept: tuple[object, ...]) -> None:
        self._calls.append((kernel, arguments))
        self._kept.append(kept)

    def each(self) -> Iterator[tuple[Kernel, ctypes.Structure]]:
        return iter(self._calls)

    def calls(self) -> ctypes.Array[_Call]:
        """As `rl_replay` wants them; only good as long as the recording lives."""
        calls = (_Call * len(self._calls))()
        for call, (kernel, arguments) in zip(calls, self._calls, strict=True):
            call.kernel = ctypes.cast(kernel, ctypes.c_void_p).value  # type: ignore[arg-type]
            call.arguments = ctypes.addressof(arguments)
        return calls


class Replay:
    """Makes the calls of a recording again, in order."""

    def __init__(self, recording: Recording) -> None:
        self._kept = recording, recording.calls()
        self._address, self._num = ctypes.addressof(self._kept[1]), len(recording)
        self._replay = _replay()

    def __call__(self) -> None:
        if _call_hook is not None:
            for kernel, arguments in self._kept[0].each():
                _call(kernel, arguments)
        elif code := self._replay(self._address, self._num):
            raise _failed(code)


def _replay() -> Callable[[int, int], int]:
    library = native.library()
    if library is None:
        raise InternalError("native calls without the library")
    replay: Callable[[int, int], int] = library.rl_replay
    library.rl_replay.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    library.rl_replay.restype = ctypes.c_int
    return replay


_recording: Recording | None = None
_call_hook: CallHook | None = None


def launch(kernel: Kernel, arguments: ctypes.Structure, *kept: object) -> None:
    """Call the kernel, or keep the call for later while a step is recorded. `kept` are the tensors
    whose memory the arguments point to."""
    if _recording is None:
        _call(kernel, arguments)
    else:
        _recording.add(kernel, arguments, kept)


def _call(kernel: Kernel, arguments: ctypes.Structure) -> None:
    with nullcontext() if _call_hook is None else _call_hook(getattr(kernel, "__name__", "kernel")):
        code = kernel(ctypes.byref(arguments))
    if code:
        raise _failed(code)


def _failed(code: int) -> Exception:
    about, rank = divmod(code, _PER_RANK)
    if about:
        return EngineFault(f"rank {rank} {_RANK_FAULTS[about]}")
    return InternalError(f"a native kernel refused its arguments with code {code}")


@contextmanager
def call_hook(hook: CallHook) -> Iterator[None]:
    """Every native call, replayed ones too, happens inside what `hook` gives for its name."""
    global _call_hook
    _call_hook = hook
    try:
        yield
    finally:
        _call_hook = None


def is_recording() -> bool:
    return _recording is not None


class Arena:
    """Where recorded steps keep what lies between their kernels: as they run one after the other,
    each begins at the start of it. It grows to what the largest needs and is never given back."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        self._chunk = self._used = 0

    @property
    def num_bytes(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)

    def restart(self) -> None:
        self._chunk = self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Contiguous, and beginning at a line of the cache."""
        size = prod(shape) * dtype.itemsize
        while self._chunk < len(self._chunks):
            chunk = self._chunks[self._chunk]
            begin = -(-(chunk.data_ptr() + self._used) // _LINE) * _LINE - chunk.data_ptr()
            if begin + size <= len(chunk):
                self._used = begin + size
                return chunk[begin : begin + size].view(dtype).view(shape)
            self._chunk, self._used = self._chunk + 1, 0
        self._chunks.append(torch.empty(max(_CHUNK, size + _LINE), dtype=torch.uint8))
        return self.empty(shape, dtype)


def record(step: Callable[[], None], arena: Arena) -> Recording:
    """The native calls that `step` would make: none is made. CannotRecord if it does anything that
    a replay would leave out."""
    global _recording
    if _recording is not None:
        raise InternalError("a step is being recorded already")
    arena.restart()
    recording = _recording = Recording()
    try:
        with _OnlyViews(arena):
            step()
    finally:
        _recording = None
    return recording


class _OnlyViews(TorchDispatchMode):
    """Refuses what torch would compute, and takes memory from the arena."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch loads its compiler, which takes seconds, to keep it out of this class."""
        return False

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            return self._arena.empty(tuple(args[0]), kwargs.get("dtype") or torch.float32)
        if not _is_view(func._schema):
            raise CannotRecord(str(func))
        return func(*args, **kwargs)


def _is_view(schema: Any) -> bool:
    """All that it returns is what it was given, seen in another way."""
    returns = schema.returns
    return bool(returns) and all(
        back.alias_info is not None and not back.alias_info.is_write for back in returns
    )


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Where its first number lies."""
    return None if tensor is None else tensor.data_ptr()
