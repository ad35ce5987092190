"""Is the library of native CPU kernels here, and at which level of instructions does it work?"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from ridgeline.errors import ConfigError, InternalError
from ridgeline.log import say

VARIABLE = "RIDGELINE_CPU_ISA"
LEVELS = ("none", "avx2", "avx512", "bf16", "amx")
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
# Of the interface between Python and the library: raise it with every change of a struct of
# arguments or of what a function makes of one. A library of another number is not used, since it
# would read other arguments than it is given. setup.py builds this number into the library.
ABI = 4

# Measured with the bundled model and its draft on two cores of an AMD EPYC with AVX-512.
MISSING = (
    "the native CPU kernels are missing: answers take about four times as long (166 tokens/s "
    "instead of 700) and drafts are off; install a C++ compiler (g++ or clang++), then run `make "
    "native` in a checkout, or install a wheel that was made for Linux on x86-64"
)

Fields = tuple[tuple[str, type], ...]
_FILE = Path(__file__).parent / "native_cpu.so"
_log = logging.getLogger(__name__)
STALE = "they were built for another version; run `make native`, or install Ridgeline anew"


class _Read(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_void_p),
        ("num_bytes", ctypes.c_int64),
        ("mixed", ctypes.c_uint64),
    )


def can_be_built() -> bool:
    """Whether this machine's compiler could make the library."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


@cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and why not."""
    try:
        found = ctypes.CDLL(str(_FILE))
    except OSError:
        return None, "not built" if can_be_built() else "they are for Linux on x86-64"
    if (number := _abi_of(found)) != ABI:
        return None, f"{STALE} (interface {number}, not {ABI})"
    for name in ("pool_set_threads", "pool_set_spin"):
        getattr(found, name).argtypes = [ctypes.c_int]
        getattr(found, name).restype = None
    found.isa_set.argtypes = [ctypes.c_int]
    found.rl_advise_huge.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    if found.isa_best() == 0:
        return None, "the processor has no AVX2"
    found.isa_set(LEVELS.index(wanted_level(os.environ, LEVELS[found.isa_best()])))
    found.pool_set_threads(torch.get_num_threads())
    return found, ""


def _abi_of(found: ctypes.CDLL) -> int:
    """0 of libraries from before there were numbers."""
    return int(found.rl_abi()) if hasattr(found, "rl_abi") else 0


def wanted_level(environ: Mapping[str, str], best: str) -> str:
    """What the environment asks for, else the best; ConfigError for a level that is unknown or that
    the processor has not got."""
    wanted = environ.get(VARIABLE, best)
    if wanted not in LEVELS:
        raise ConfigError(f"{VARIABLE}={wanted!r}; choose one of {', '.join(LEVELS)}")
    if LEVELS.index(wanted) > LEVELS.index(best):
        raise ConfigError(f"{VARIABLE}={wanted}: this processor has at most {best}")
    return wanted


def pointers(*names: str) -> Fields:
    """Fields of a structure that a kernel reads; so are the next two."""
    return tuple((name, ctypes.c_void_p) for name in names)


def numbers(*names: str) -> Fields:
    return tuple((name, ctypes.c_int64) for name in names)


def small_numbers(*names: str) -> Fields:
    return tuple((name, ctypes.c_int32) for name in names)


def library() -> ctypes.CDLL | None:
    """The kernels; None where torch has to do the work. ConfigError as of `wanted_level`."""
    found = _loaded()[0]
    return None if found is None or found.isa_level() == 0 else found


def why_no_library() -> str:
    """Why `library` is None."""
    return _loaded()[1] or f"{VARIABLE} is none"


def level() -> str:
    """The instructions in use: one of LEVELS; "none" without the library."""
    found = _loaded()[0]
    return LEVELS[found.isa_level()] if found is not None else LEVELS[0]


def best_level() -> str:
    found = _loaded()[0]
    return LEVELS[found.isa_best()] if found is not None else LEVELS[0]


def set_threads(threads: int) -> None:
    """How many threads a kernel may use, the caller among them."""
    found = _loaded()[0]
    if found is not None:
        found.pool_set_threads(threads)


def advise_huge(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, whose memory may get huge pages if it is in none yet. It is advice: nothing
    happens without the library, off the CPU or where the system does not want it."""
    found = _loaded()[0]
    if found is not None and tensor.device.type == "cpu":
        found.rl_advise_huge(tensor.data_ptr(), tensor.nbytes)
    return tensor


def fingerprint() -> str:
    """Tells one build of the library from another; "none" where torch does the work."""
    return "none" if library() is None else _digest()


@cache
def _digest() -> str:
    return hashlib.sha256(_FILE.read_bytes()).hexdigest()


def takes_words(tensor: torch.Tensor) -> bool:
    """`mixed_words` reads all of it: whole lines of 64 bytes on the CPU."""
    return (
        library() is not None
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.data_ptr() % 64 == 0
        and tensor.nbytes % 64 == 0
    )


def mixed_words(tensor: torch.Tensor) -> int:
    """64 bits that depend on every byte, and the same in every process: no proof against a forger,
    but as fast as memory is read."""
    found = library()
    if found is None or not takes_words(tensor):
        raise InternalError("only whole lines of memory are mixed, by the native kernels")
    call = _Read(tensor.data_ptr(), tensor.nbytes, 0)
    found.rl_read(ctypes.byref(call))
    return int(call.mixed)


def announce() -> None:
    """One line in the log: what multiplies. A library that is missing where it could be, or that
    is of another version, is a warning, which Python prints also where nobody set up a log."""
    found, reason = _loaded()
    if not _FILE.exists() and can_be_built():
        say(_log, logging.WARNING, MISSING)
    elif found is None:
        is_fault = reason.startswith(STALE)
        told = "no native CPU kernels, torch does the work"
        say(_log, logging.WARNING if is_fault else logging.INFO, told, because=reason)
    else:
        say(_log, logging.INFO, "native CPU kernels", kind=level(), threads=found.pool_threads())


@contextmanager
def at_level(name: str) -> Iterator[None]:
    """Work at a level for a while (tests); ConfigError if the processor has not got it."""
    found = _loaded()[0]
    before = level()
    if found is None or found.isa_set(LEVELS.index(name)) < 0:
        raise ConfigError(f"native CPU kernels cannot work at level {name!r} here")
    try:
        yield
    finally:
        found.isa_set(LEVELS.index(before))
