"""CUDA kernels that g++ compiles for the CPU, in the place of those that nvrtc compiles.

A file `.._on_cpu.cpp` beside this one includes a kernel's source, SOURCE, behind `cuda_on_cpu.h`,
which has what differs from a GPU: the instructions, of which each has one line of C++. Of source
`x.cu` RUNS_X is defined. It exports `launch`, which a test's `Run` calls.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.kernels import nvrtc

COMPILER = shutil.which("g++")
HERE = Path(__file__).parent
on_cpu = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves"),
]


@dataclass(frozen=True, slots=True)
class Launch:
    """`arguments`: a place for each, as the driver takes them."""

    arguments: ctypes.Array[ctypes.c_void_p]
    grid: tuple[int, int, int]
    warps: int
    shared_bytes: int


Run = Callable[[ctypes.CDLL, Launch], None]


@dataclass(frozen=True, slots=True)
class Emulated:
    """Stands for `nvrtc.Kernel`."""

    library: ctypes.CDLL
    run: Run

    def launch(
        self,
        grid: tuple[int, int, int],
        block: int,
        shared_bytes: int,
        args: Sequence[Any],
        *,
        pdl: bool = False,
        cluster: int = 1,
    ) -> None:
        assert cluster == 1
        held = [
            ctypes.c_void_p(arg.data_ptr()) if isinstance(arg, torch.Tensor) else arg
            for arg in args
        ]
        places = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        self.run(self.library, Launch(places, grid, block // 32, shared_bytes))


@dataclass(frozen=True, slots=True)
class Compiled:
    """Stands for `nvrtc.kernel`: what `wrapper` includes, compiled once into `folder`."""

    folder: Path
    wrapper: str
    run: Run
    known: dict[tuple[Any, ...], Emulated] = field(default_factory=dict)

    def __call__(
        self, source_file: str, name: str, defines: Mapping[str, int | str], device: torch.device
    ) -> Emulated:
        # With or without an early launch it is the same program here.
        words = (source_file, *sorted({**defines, "DEPENDENT": 0}.items()))
        if words not in self.known:
            options = [f"-D{key}={value}" for key, value in words[1:]]
            options.append(f"-DRUNS_{Path(source_file).stem.upper()}")
            source = files("ridgeline.kernels") / "cuda" / source_file
            library = self.folder / f"{len(self.known)}.so"
            subprocess.run(
                [
                    str(COMPILER),
                    *("-std=c++17", "-O1", "-w", "-shared", "-fPIC"),
                    *options,
                    f'-DSOURCE="{source}"',
                    str(HERE / self.wrapper),
                    *("-o", str(library)),
                ],
                check=True,
            )
            self.known[words] = Emulated(ctypes.CDLL(str(library)), self.run)
        return self.known[words]

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nvrtc, "kernel", self)
        monkeypatch.setattr(nvrtc, "allow_shared", lambda kernel, num_bytes: None)
