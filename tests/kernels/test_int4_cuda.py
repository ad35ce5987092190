"""The CUDA kernels for few rows and weights of 4 bits, compiled for the CPU and run lane by lane,
equal their reference. What differs from a GPU is in int4_on_cpu.cpp and cuda_on_cpu.h. Clusters
and the kernel for some rows run on a GPU alone: tests/gpu.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from ridgeline.kernels import int4_linear_cuda
from ridgeline.kernels.int4_linear_cuda import stream, unpack
from ridgeline.kernels.int4_linear_records import form_of, pack_records
from ridgeline.kernels.quantized_matrix import QuantizedMatrix
from ridgeline.kernels.small_linear import Beside, InputNorm
from ridgeline.kernels.tiles import Tile
from tests.kernels.emulation import Compiled, Launch, on_cpu
from tests.kernels.references import small_linear_reference
from tests.kernels.test_int4_linear import matrix_of

pytestmark = on_cpu
BOUND = {torch.bfloat16: 6e-3, torch.float16: 1e-3}  # of the largest number


def run(library: ctypes.CDLL, launch: Launch) -> None:
    library.launch(launch.arguments, launch.grid[0], launch.warps, launch.shared_bytes)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("kernels"), "int4_on_cpu.cpp", run)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch, compiled: Compiled) -> None:
    compiled.stand_in(monkeypatch)
    monkeypatch.setattr(int4_linear_cuda, "multiprocessors", lambda device: 3)


def noise(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same rows, further apart, with NaN between them."""
    wide = x.new_full((x.shape[0], x.shape[1] + 64), torch.nan)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def check_stream(
    tile: Tile, rows: int, matrix: QuantizedMatrix, kind: str, dtype: torch.dtype = torch.bfloat16
) -> None:
    gated, inputs = "gated" in kind, matrix.inputs
    width = matrix.outputs // 2 if gated else matrix.outputs
    norm = InputNorm(noise(inputs, seed=3, dtype=dtype), 1e-5) if "norm" in kind else None
    residual = noise(rows, width, seed=4, dtype=dtype) if "residual" in kind else None
    bias = noise(matrix.outputs, seed=5, dtype=dtype) if "bias" in kind else None
    x = spread(noise(rows, inputs, seed=1, dtype=dtype))
    out = spread(x.new_full((rows, width), torch.nan))
    beside = Beside(norm=norm, bias_N=bias, gated=gated, residual_MO=residual, out_MO=out)
    stream(x, pack_records(matrix), tile=tile, **beside)
    want = small_linear_reference(
        x.float(), matrix.dequantize(), norm=norm, bias_N=bias, gated=gated, residual_MO=residual
    )
    off = (out.float() - want).abs().max()
    assert off <= BOUND[dtype] * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("rows", [1, 3, 8, 11])
def test_plain(rows: int) -> None:
    """Several groups for a program; a warp that has more of K than another."""
    check_stream(Tile(16, 128, 1, 4, 2, stream=True), rows, matrix_of(112, 896, 128), "plain")


@pytest.mark.parametrize("kind", ["norm+gated", "residual+bias", "bias+gated+residual"])
def test_what_stands_beside_it(kind: str) -> None:
    for tile, outputs in ((Tile(32, 128, 1, 2, 3, stream=True), 96), (
        Tile(64, 128, 1, 3, 2, per_sm=2, stream=True), 160)):  # fmt: skip
        check_stream(tile, 3, matrix_of(outputs, 384, 128, seed=1), kind)


@pytest.mark.parametrize("kind", ["norm", "gated"])
def test_slots_of_several_records(kind: str) -> None:
    for block_k, inputs in ((256, 768), (512, 1024)):
        tile = Tile(32, block_k, 1, 2, 2, stream=True)
        check_stream(tile, 2, matrix_of(96, inputs, 64, zeros=True), kind)


@pytest.mark.parametrize("kind", ["plain", "norm+gated"])
def test_meeting_before_the_last_group(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups, two more, and one."""
    tile = Tile(32, 128, 1, 2, 2, stream=True)
    monkeypatch.setattr(int4_linear_cuda, "SUMS_BYTES", 2 * 2 * 2 * 32 * 3 * 4)
    outputs = 15 * (32 if "gated" in kind else 16) * 2 - 32
    assert int4_linear_cuda.stream_cut(
        tile, 2, form_of(matrix_of(outputs, 128, 128)), units=3, gated="gated" in kind
    ).held == 2  # fmt: skip
    check_stream(tile, 2, matrix_of(outputs, 128, 128), kind)


def test_more_warps_than_records() -> None:
    check_stream(Tile(16, 128, 1, 4, 3, stream=True), 2, matrix_of(32, 256, 64), "norm")


FORMS = [
    (32, torch.bfloat16, True, torch.bfloat16),
    (64, torch.float16, False, torch.bfloat16),
    (128, torch.float32, True, torch.float16),
    (32, torch.float16, True, torch.float16),
]


@pytest.mark.parametrize(("group", "scale_dtype", "zeros", "dtype"), FORMS, ids=str)
def test_forms(group: int, scale_dtype: torch.dtype, zeros: bool, dtype: torch.dtype) -> None:
    matrix = matrix_of(32, 256, group, scale_dtype=scale_dtype, zeros=zeros)
    check_stream(Tile(32, 128, 1, 2, 2, stream=True), 2, matrix, "plain", dtype)
    got = unpack(pack_records(matrix), dtype, 16, 32)
    assert torch.equal(got, matrix.dequantize()[16:].to(dtype))
