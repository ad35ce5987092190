"""How does a kernel in CUDA C++ come to run, without a compiler at install?

The sources beside this file are compiled by NVRTC, which every CUDA build of torch brings, for the
device at hand and for the sizes that are asked for (`defines`). What was compiled is kept on disk
under a name that holds all it depends on. Interfaces: NVRTC and the CUDA driver API, by ctypes.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from ridgeline.errors import EngineFault
from ridgeline.kernels.cache import VARIABLE
from ridgeline.log import say

logger = logging.getLogger(__name__)

TensorMap = ctypes.Array[ctypes.c_uint64]  # CUtensorMap: 128 bytes, by value
Number = ctypes.c_int32 | ctypes.c_int64 | ctypes.c_uint32 | ctypes.c_uint64 | ctypes.c_float
Arg = torch.Tensor | Number | TensorMap

# CUtensorMapDataType; 1: any of one byte
MAP_TYPES = {1: 0, torch.int64: 5, torch.float16: 6, torch.bfloat16: 9}
MAP_ALIGNMENT = 64  # of a CUtensorMap
AS_THEY_ARE, SWIZZLE_128B = 0, 3  # CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B
PROMOTE_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
STATIC_SHARED_BYTES = 48 << 10  # more has to be asked for
INCLUDE = re.compile(r'^#include "(\w+\.cu)"$', re.MULTILINE)

_lock = Lock()


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a number, and a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"grid{axis}", ctypes.c_uint) for axis in "xyz"),
        *((f"block{axis}", ctypes.c_uint) for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled function, loaded on one device."""

    name: str
    device: torch.device
    function: ctypes.c_void_p

    def launch(
        self,
        grid: tuple[int, int, int],
        block: int,
        shared_bytes: int,
        args: Sequence[Arg],
        *,
        pdl: bool = False,
        cluster: int = 1,
    ) -> None:
        """On the device's current stream; a tensor stands for its address. `pdl`: it may begin
        before the kernel before it has ended. `cluster` blocks run together."""
        attributes = (_Attribute * 2)()
        count = 0
        if pdl:
            attributes[count].id, attributes[count].value[0] = EARLY, 1
            count += 1
        if cluster > 1:
            attributes[count].id, attributes[count].value[:3] = CLUSTER, (cluster, 1, 1)
            count += 1
        stream = torch.cuda.current_stream(self.device).cuda_stream
        config = _Config(*grid, block, 1, 1, shared_bytes, stream, attributes, count)
        held = [_value(arg) for arg in args]
        places = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        code = cuda_driver().cuLaunchKernelEx(ctypes.byref(config), self.function, places, None)
        check_driver(code, f"launching {self.name}")


def available() -> bool:
    """NVRTC and the driver are there."""
    try:
        _nvrtc(), cuda_driver()
    except EngineFault:
        return False
    return True


def kernel(
    source_file: str, name: str, defines: Mapping[str, int | str], device: torch.device
) -> Kernel:
    """The function `name` of `cuda/source_file`, compiled with these defines for this device.
    EngineFault says what the compiler said."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        return _kernel(source_file, name, tuple(sorted(defines.items())), index)


def allow_shared(found: Kernel, num_bytes: int) -> None:
    """Lets the kernel ask for so many bytes of shared memory at launch."""
    if num_bytes > STATIC_SHARED_BYTES:
        asked = ctypes.c_int(num_bytes)
        code = cuda_driver().cuFuncSetAttribute(found.function, DYNAMIC_SHARED, asked)
        check_driver(code, f"{num_bytes} bytes of shared memory for {found.name}")


@lru_cache(maxsize=8192)
def tensor_map(
    address: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = SWIZZLE_128B,
) -> TensorMap:
    """What the copy engine has to know of a tensor that it reads a box at a time, into swizzled
    rows of 128 bytes, or one number behind the other; zeros outside. The innermost axis comes
    first, whose numbers lie side by side; `strides`, in bytes, are those of the others. It depends
    on nothing else: it is kept."""
    # The driver wants an address that is a multiple of 64.
    room = (ctypes.c_uint64 * (16 + MAP_ALIGNMENT // 8))()
    made = (ctypes.c_uint64 * 16).from_buffer(room, -ctypes.addressof(room) % MAP_ALIGNMENT)
    rank = len(sizes)
    code = cuda_driver().cuTensorMapEncodeTiled(
        ctypes.byref(made), MAP_TYPES[dtype if dtype in MAP_TYPES else dtype.itemsize], rank,
        ctypes.c_void_p(address), (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides), (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank), 0, swizzle, PROMOTE_128B, 0,
    )  # fmt: skip
    check_driver(code, f"a tensor map of {sizes} with strides {strides}, box {box}")
    return made


@lru_cache(maxsize=1024)
def _kernel(
    source_file: str, name: str, defines: tuple[tuple[str, int | str], ...], index: int
) -> Kernel:
    device = torch.device("cuda", index)
    major, minor = torch.cuda.get_device_capability(device)
    architecture = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    code = machine_code(source_file, defines, architecture)
    driver = cuda_driver()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device)  # the device has a context from here on
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        check_driver(driver.cuModuleLoadData(ctypes.byref(module), code), f"loading {name}")
        found = driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        check_driver(found, f"finding {name}")
    return Kernel(name, device, function)


def machine_code(
    source_file: str, defines: Sequence[tuple[str, int | str]], architecture: str
) -> bytes:
    """Of `cuda/source_file` for `sm_90a`, say; kept on disk. It takes no device, so processes may
    compile beforehand what one of them is to launch."""
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "-default-device"]
    options += [f"-D{key}={value}" for key, value in sorted(defines)]
    return _compiled(read_source(source_file), source_file, options)


def _compiled(source: str, source_file: str, options: Sequence[str]) -> bytes:
    """From the disk if it is there."""
    asked = "\n".join([source, *options, str(_version())])
    key = hashlib.sha256(asked.encode()).hexdigest()[:32]
    path = cache_folder() / f"{Path(source_file).stem}-{key}.cubin"
    try:
        if (kept := path.read_bytes()).startswith(b"\x7fELF"):
            return kept
    except OSError:
        pass
    code = _compile(source, source_file, options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}.tmp")
        fresh.write_bytes(code)
        fresh.replace(path)
    except OSError as error:
        say(logger, logging.WARNING, "a compiled kernel is not kept", reason=str(error))
    return code


def read_source(source_file: str) -> str:
    """Of `cuda/source_file`; a line `#include "other.cu"` there stands for that file beside it."""
    text = (files(__package__) / "cuda" / source_file).read_text(encoding="utf-8")
    return INCLUDE.sub(lambda found: read_source(found[1]), text)


def cache_folder() -> Path:
    """Where compiled kernels are kept: beside Triton's, where those have a folder of their own.
    Deleting it costs a second at the next start."""
    if beside := os.environ.get(VARIABLE):
        return Path(beside) / "cuda"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ridgeline" / "cuda"


def _compile(source: str, source_file: str, options: Sequence[str]) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    made = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), source_file.encode(), 0, None, None
    )
    if made:
        raise EngineFault(f"NVRTC cannot read {source_file} (error {made})")
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), words)
    if failed:
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise EngineFault(f"{source_file} does not compile: {log.value.decode()[:2000]}")
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def _value(arg: Arg) -> Any:
    return ctypes.c_void_p(arg.data_ptr()) if isinstance(arg, torch.Tensor) else arg


def check_driver(code: int, doing: str) -> None:
    """EngineFault for what the driver did not do, in its words."""
    if code:
        text = ctypes.c_char_p()
        cuda_driver().cuGetErrorString(code, ctypes.byref(text))
        said = text.value.decode() if text.value else "unknown"
        raise EngineFault(f"{doing}: CUDA error {code}, {said}")


@cache
def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@cache
def cuda_driver() -> ctypes.CDLL:
    """EngineFault where there is none."""
    return _library(["libcuda.so.1", "libcuda.so", "nvcuda.dll"], "the CUDA driver")


@cache
def _nvrtc() -> ctypes.CDLL:
    if torch.version.cuda is None:
        raise EngineFault("this build of torch has no CUDA, so no NVRTC")
    major = torch.version.cuda.split(".")[0]
    name = f"libnvrtc.so.{major}"
    found = list(_beside_torch(name))
    for path in found:
        # NVRTC asks for this by name alone, and finds it if it is loaded.
        for builtins in sorted(path.parent.glob(f"libnvrtc-builtins.so.{major}*")):
            ctypes.CDLL(str(builtins))
    return _library([*map(str, found), name], "NVRTC")


def library_beside_torch(name: str, what: str) -> ctypes.CDLL:
    """EngineFault where there is none."""
    return _library([*map(str, _beside_torch(name)), name], what)


def _beside_torch(name: str) -> Iterator[Path]:
    """Where wheels put the library: in torch's own folder or in NVIDIA's packages."""
    for package, below in (("torch", "lib"), ("nvidia", "*/lib")):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            yield from sorted(Path(folder).glob(f"{below}/{name}*"))


def _library(names: Sequence[str], what: str) -> ctypes.CDLL:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise EngineFault(f"{what} was not found (looked for {', '.join(names)})")
