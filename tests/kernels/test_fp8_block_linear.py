"""Products with blocks of e4m3 equal their reference; in bfloat16 they err as little as PyTorch.

Without a GPU the kernel runs through Triton's interpreter, in float32 and float16.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional

from ridgeline.errors import InternalError
from ridgeline.kernels import fp8_block_linear as module
from ridgeline.kernels.fp8_block_linear import (
    BlockTile,
    Fp8Blocks,
    block_tile,
    dequantize_blocks,
    fp8_block_linear,
)
from ridgeline.kernels.quantize_rows import E4M3
from tests.kernels.references import fp8_block_linear_reference

# A GPU if there is one, else the interpreter, which is chosen when the kernels are decorated.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")
ours = pytest.importorskip("ridgeline.kernels.fp8_block_linear_triton")

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
# NumPy, which the interpreter computes with, warns where a GPU gives infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, dtype)


def blocks(outputs: int, inputs: int) -> Fp8Blocks:
    """Scales of neighbours are far apart."""
    codes = (noise(outputs, inputs, seed=1) * 100).clamp(-448, 448).to(E4M3)
    shape = (-(-outputs // 128), -(-inputs // 128))
    return Fp8Blocks(codes, 10.0 ** noise(*shape, seed=2) / 1000)


@pytest.mark.every_pair
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "tile",
    [BlockTile(), BlockTile(32, 64, stages=3, splits=2), BlockTile(64, 128, stages=2, splits=4)],
)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 128, 128), (5, 200, 272), (33, 32, 100), (70, 260, 384)]
)
def test_products(
    rows: int, outputs: int, inputs: int, tile: BlockTile, dtype: torch.dtype
) -> None:
    weight, bias = blocks(outputs, inputs), noise(outputs, seed=3, dtype=dtype)
    x = noise(inputs, rows, seed=4, dtype=dtype).T  # not contiguous
    exact_weight = dequantize_blocks(weight).double()
    for addend in (None, bias):
        exact = x.double() @ exact_weight.T
        exact += 0 if addend is None else addend.double()
        got = ours.fp8_block_linear_triton(x, weight, tile=tile, bias_N=addend)
        assert (got.shape, got.dtype) == ((rows, outputs), dtype)
        plain = functional.linear(x, exact_weight.to(dtype), addend).double()
        allowed = 2 * (plain - exact).norm() + 1e-6 * exact.norm()
        assert (got.double() - exact).norm() <= allowed
        reference = fp8_block_linear_reference(x, weight, bias_N=addend)
        assert (reference.double() - exact).norm() <= allowed


def test_pieces_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = blocks(300, 130), noise(300, seed=3)
    x = noise(7, 130, seed=4)
    whole = fp8_block_linear_reference(x, weight, bias_N=bias)
    monkeypatch.setattr(module, "PIECE_NUMBERS", 1)
    torch.testing.assert_close(fp8_block_linear(x, weight, bias_N=bias), whole)
    assert fp8_block_linear(x[:0], weight).shape == (0, 300)


def test_a_tile_lies_in_one_block() -> None:
    for rows in (1, 16, 17, 40, 512):
        for outputs in (64, 4096, 28672):
            tile = block_tile(rows, outputs, 4096)
            assert 128 % tile.block_n == 0
            assert 1 <= tile.splits <= 8
    with pytest.raises(InternalError, match="in one block"):
        ours.fp8_block_linear_triton(noise(1, 128), blocks(128, 128), tile=BlockTile(16, 48))
    with pytest.raises(InternalError, match="x and W agree"):
        ours.fp8_block_linear_triton(noise(1, 120), blocks(128, 128), tile=BlockTile())
