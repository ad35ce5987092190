"""The CUDA decode kernel, compiled for the CPU and run lane by lane, equals its definition.

What differs from a GPU is in cuda_on_cpu.h: the instructions, of which each has one line of C++.
"""
# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.errors import InternalError
from ridgeline.kernels import nvrtc
from ridgeline.kernels.paged_decode_cuda import Config, unsupported
from tests.kernels.decode_case import DecodeCase, Shape, check_case

pytest.importorskip("triton")
COMPILER = shutil.which("g++")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernel itself"),
]

CPU = torch.device("cpu")
HERE = Path(__file__).parent
LENGTHS = [1, 2, 0, 15, 16, 17, 48, 100]


@dataclass(frozen=True, slots=True)
class Emulated:
    """Stands for `nvrtc.Kernel`; programs run in an order of their own."""

    library: ctypes.CDLL

    def launch(
        self,
        grid: tuple[int, int, int],
        block: int,
        shared_bytes: int,
        args: Sequence[Any],
        *,
        pdl: bool = False,
    ) -> None:
        held = [
            ctypes.c_void_p(arg.data_ptr()) if isinstance(arg, torch.Tensor) else arg
            for arg in args
        ]
        places = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        order = list(range(grid[0]))
        random.Random(grid[0]).shuffle(order)
        programs = (ctypes.c_int * grid[0])(*order)
        self.library.launch(places, programs, grid[0], grid[1], block // 32)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Emulated]:
    folder = tmp_path_factory.mktemp("kernels")
    known: dict[tuple[Any, ...], Emulated] = {}

    def compile_it(
        source_file: str, name: str, defines: Mapping[str, int | str], device: torch.device
    ) -> Emulated:
        # With or without an early launch it is the same program here.
        words = tuple(sorted((key, value) for key, value in defines.items() if key != "DEPENDENT"))
        if words not in known:
            source = files("ridgeline.kernels") / "cuda" / source_file
            library = folder / f"{len(known)}.so"
            options = [f"-D{key}={value}" for key, value in (*words, ("DEPENDENT", 0))]
            subprocess.run(
                [
                    str(COMPILER),
                    *("-std=c++17", "-O1", "-w", "-shared", "-fPIC"),
                    *options,
                    f'-DSOURCE="{source}"',
                    str(HERE / "paged_decode_on_cpu.cpp"),
                    *("-o", str(library)),
                ],
                check=True,
            )
            known[words] = Emulated(ctypes.CDLL(str(library)))
        return known[words]

    return compile_it


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch, compiled: Callable[..., Emulated]) -> None:
    monkeypatch.setattr(nvrtc, "kernel", compiled)
    monkeypatch.setattr(nvrtc, "allow_shared", lambda kernel, num_bytes: None)


run = partial(check_case, device=CPU)


@pytest.mark.parametrize("num_programs", [1, 5, 40])
def test_ranges_of_steps(num_programs: int) -> None:
    run(LENGTHS, Shape(head_dim=128), num_programs=num_programs)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(kv_heads=1, group=1),
        Shape(kv_heads=3, group=4, block_size=32, dtype=torch.float16),
        Shape(kv_heads=1, group=8, head_dim=128, norms=False, named_rows=False),
        Shape(kv_heads=1, group=11, window=20),
    ],
    ids=str,
)
def test_shapes(shape: Shape) -> None:
    run([33, 1, 0, 70], shape, num_programs=3)


def test_windows() -> None:
    shape = Shape(window=33, block_size=32, head_dim=128, kv_heads=1)
    run([1, 200, 33, 0, 34, 50, 80], shape, num_programs=4)
    run([600], replace(shape, window=580), num_programs=2)


def test_more_steps_than_entries_are_asked_for_at_once() -> None:
    run([1100, 3, 530], Shape(kv_heads=1), config=Config(stages=2), num_programs=2)


def test_more_requests_than_are_known_at_once() -> None:
    run([1, 20, 0] * 24, Shape(kv_heads=1), config=Config(stages=4), num_programs=2)


def test_heads_of_several_ctas() -> None:
    run([17, 40], Shape(kv_heads=16, group=1), num_programs=3)


def test_what_does_not_fit_is_refused() -> None:
    case = DecodeCase([5, 9], Shape(), CPU)
    assert "CUDA" in (unsupported(CPU, torch.bfloat16, case.views(case.store), num_heads=4) or "")
    with pytest.raises(InternalError, match="the ring fits"):
        case.schedule(Config(stages=40), num_programs=1)
    schedule = case.schedule(num_programs=1)
    with pytest.raises(InternalError, match="the cache lies as"):
        case.launch(schedule, case.store.flip(0)[:, ::2], case.blank())
    odd = torch.zeros(2, 4, 65, dtype=torch.bfloat16)[..., :64]
    with pytest.raises(InternalError, match="answers lie on 16 bytes"):
        case.launch(schedule, case.store, odd)
