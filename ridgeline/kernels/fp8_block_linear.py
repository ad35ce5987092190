"""x @ W.T with W in e4m3 and one scale for each block of 128 x 128 of it.

On NVIDIA GPUs that convert e4m3, x of 16 bits is multiplied by a kernel that widens W as it goes:
x is not rounded, and a block's scale is applied to its sums in float32. Other dtypes and devices
get W back in the dtype of x, some rows at a time.
Letters: M rows, K inputs, N outputs, P and Q blocks of outputs and of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from ridgeline.errors import check
from ridgeline.kernels.quantize_rows import E4M3, has_e4m3

# Measured on an H200 with the weights of an 8B model that are not in the L2 cache, in us; the best
# of some tiles / the library's product in bfloat16:
#     rows       qkv          o         gate_up         down
#        1  12.4 / 17.5   9.9 / 13.3   44.1 / 58.8   22.4 / 34.0
#       32  12.5 / 17.1   9.9 / 13.7   43.7 / 61.0   25.9 / 35.5
#       64  18.6 / 17.2  12.4 / 12.6   66.5 / 63.9   35.4 / 37.6
#      128  24.8 / 17.5  17.6 / 14.3   71.9 / 70.9   41.0 / 39.2
#      256  34.4 / 22.2  25.2 / 19.1  139.1 / 93.3   74.7 / 49.2
# so from 64 rows on it saves memory and no time.
BLOCK = 128  # rows and columns that share a scale
PIECE_NUMBERS = 1 << 22  # of W that are float32 at once
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
MULTIPROCESSORS = 132  # of an H100 or H200, for the choice of splits
MAX_SPLITS = 8


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """A weight is code * scale: `codes_NK` e4m3, `scale_PQ` float32. Blocks at the ends may be
    smaller."""

    codes_NK: torch.Tensor
    scale_PQ: torch.Tensor

    def __post_init__(self) -> None:
        blocks = tuple(num_blocks(size) for size in self.codes_NK.shape)
        is_right = self.codes_NK.dtype == E4M3 and self.scale_PQ.dtype == torch.float32
        check(is_right and self.scale_PQ.shape == blocks, "blocks of e4m3", got=self.scale_PQ.shape)

    def part(self, begin: int, end: int) -> Fp8Blocks:
        """Its rows from `begin`, which begins a block."""
        scale_PQ = self.scale_PQ[begin // BLOCK : num_blocks(end)]
        return Fp8Blocks(self.codes_NK[begin:end], scale_PQ)


@dataclass(frozen=True, slots=True)
class BlockTile:
    """Rows of x and rows of W that a program multiplies; `block_n` divides BLOCK. K is cut into
    `splits` parts."""

    block_m: int = 16
    block_n: int = 32
    warps: int = 4
    stages: int = 6
    splits: int = 1


def num_blocks(size: int) -> int:
    return -(-size // BLOCK)


def fp8_block_linear(
    x_MK: torch.Tensor, weight: Fp8Blocks, *, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ W.T + bias, added in float32 and rounded once, [M, N] in the dtype of x."""
    if not multiplies_blocks(x_MK):
        return _by_pieces(x_MK, weight, bias_N)
    from ridgeline.kernels.fp8_block_linear_triton import fp8_block_linear_triton

    tile = block_tile(x_MK.shape[0], *weight.codes_NK.shape)
    return fp8_block_linear_triton(x_MK, weight, tile=tile, bias_N=bias_N)


def multiplies_blocks(x_MK: torch.Tensor) -> bool:
    """Our kernel takes such rows."""
    return x_MK.dtype in SIXTEEN_BITS and has_e4m3(x_MK.device)


def block_tile(rows: int, outputs: int, inputs: int) -> BlockTile:
    """K in so many parts that each multiprocessor has some programs: see the figures above."""
    if rows <= 16:
        tile, a_multiprocessor = BlockTile(16, 128, stages=3), 7
    elif rows <= 32:
        tile, a_multiprocessor = BlockTile(32, 64, stages=3), 3
    elif rows <= 64:
        tile, a_multiprocessor = BlockTile(64, 64, stages=4), 2
    else:
        tile, a_multiprocessor = BlockTile(128, 64, stages=3), 2
    programs, splits = -(-rows // tile.block_m) * -(-outputs // tile.block_n), 1
    while (
        2 * splits * programs <= a_multiprocessor * MULTIPROCESSORS
        and 8 * splits <= num_blocks(inputs)
        and splits < MAX_SPLITS
    ):
        splits *= 2
    return replace(tile, splits=splits)


def dequantize_blocks(weight: Fp8Blocks) -> torch.Tensor:
    """[N, K] float32."""
    outputs, inputs = weight.codes_NK.shape
    scale_NQ = weight.scale_PQ.repeat_interleave(BLOCK, 0)[:outputs]
    scale_NK = scale_NQ.repeat_interleave(BLOCK, 1)[:, :inputs]
    return weight.codes_NK.float().mul_(scale_NK)


def _by_pieces(x_MK: torch.Tensor, weight: Fp8Blocks, bias_N: torch.Tensor | None) -> torch.Tensor:
    outputs, inputs = weight.codes_NK.shape
    step = piece_rows(inputs)
    if outputs <= step:
        return functional.linear(x_MK, dequantize_blocks(weight).to(x_MK.dtype), bias_N)
    y_MN = x_MK.new_empty(x_MK.shape[0], outputs)
    for begin in range(0, outputs, step):
        end = min(outputs, begin + step)
        some = dequantize_blocks(weight.part(begin, end)).to(x_MK.dtype)
        bias = None if bias_N is None else bias_N[begin:end]
        y_MN[:, begin:end] = functional.linear(x_MK, some, bias)
    return y_MN


def piece_rows(inputs: int) -> int:
    """Rows of W, in whole blocks, that are turned back at once."""
    return BLOCK * max(1, PIECE_NUMBERS // (BLOCK * max(1, inputs)))
