"""How are blocks of a GGUF file read that stay packed? Those that are codes around the middle of
their range and scales: of 32 numbers a float16 one, of the K types 16 for 256 numbers, each of them
a small integer times a float16.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h .
Letters: N blocks, B bytes, C numbers of a block, G groups of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ridgeline.architectures.quantization_scheme import Scheme
from ridgeline.architectures.scheme_methods import GGUF_BLOCKS
from ridgeline.kernels.quantized_matrix import QuantizedMatrix, join_bytes
from ridgeline.quantization.readers import Tensors, widened

Split = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
SIGN = 0x80  # signed bytes become unsigned ones around 128


@dataclass(frozen=True, slots=True)
class Affine:
    """`split` makes unsigned codes [N, C] and scales [N, G] of bytes [N, num_bytes]; the float16
    of a block is at byte `half_at`."""

    bits: int
    num_bytes: int
    half_at: int
    split: Split


# ------------------------------------------------------------------------ small numbers in bytes


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block, [N, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def fields(data: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """[..., B] bytes -> [..., count, B]: the first `bits` of each byte, then the next. B is a
    multiple of 4, because four bytes are cut at once: some times faster on a CPU."""
    # A copy even of what is contiguous, as in a single block: it might not begin at a word.
    words = data.clone(memory_format=torch.contiguous_format).view(torch.int32)
    mask = 0x01010101 * ((1 << bits) - 1)
    parts = [(words >> bits * place) & mask for place in range(count)]
    return torch.stack(parts, dim=-2).view(torch.uint8)


def nibbles(data: torch.Tensor) -> torch.Tensor:
    """[N, B] bytes -> [N, 2 B]: all lower halves, then all upper ones."""
    return fields(data, 4, 2).flatten(1)


def single_bits(data: torch.Tensor) -> torch.Tensor:
    """[N, B] bytes -> [N, 8 B], the lowest bit of a byte first: looked up, eight at once."""
    places = torch.arange(8, device=data.device)
    table = (torch.arange(256, device=data.device).unsqueeze(-1) >> places) & 1
    eights = table.to(torch.uint8).view(torch.int64).view(-1)
    return eights[data.int()].view(torch.uint8)


def pairs(data: torch.Tensor) -> torch.Tensor:
    """[N, 64] bytes -> [N, 16, 16] numbers of 2 bits: the groups of each half of a K block."""
    return fields(data.reshape(-1, 2, 32), 2, 4).reshape(-1, 16, 16)


# ------------------------------------------------------------------------ types of blocks


def _q8_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return blocks[:, 2:] ^ SIGN, half(blocks, 0)


def _q4_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return nibbles(blocks[:, 2:]), half(blocks, 0)


def _q5_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return nibbles(blocks[:, 6:]) | (single_bits(blocks[:, 2:6]) << 4), half(blocks, 0)


def _q3_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high = fields(blocks[:, :32], 1, 8).reshape(-1, 16, 16)
    codes = pairs(blocks[:, 32:96]) | (high << 2)
    lower = nibbles(blocks[:, 96:104])
    upper = fields(blocks[:, 104:108], 2, 4).reshape(-1, 16)
    scales = (lower | (upper << 4)).float() - 32.0
    return codes.flatten(1), half(blocks, 108) * scales


def _q6_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lower = fields(blocks[:, :128].reshape(-1, 2, 64), 4, 2).reshape(-1, 16, 16)
    codes = lower | (pairs(blocks[:, 128:192]) << 4)
    scales = blocks[:, 192:208].view(torch.int8).float()
    return codes.flatten(1), half(blocks, 208) * scales


AFFINE: Mapping[str, Affine] = {
    "Q8_0": Affine(8, 34, 0, _q8_0),
    "Q4_0": Affine(4, 18, 0, _q4_0),
    "Q5_0": Affine(5, 22, 0, _q5_0),
    "Q3_K": Affine(3, 110, 108, _q3_k),
    "Q6_K": Affine(6, 210, 208, _q6_k),
}


def read(scheme: Scheme, tensors: Tensors, outputs: int, inputs: int) -> QuantizedMatrix:
    kind = AFFINE[scheme.layout]
    codes, scale = kind.split(tensors[GGUF_BLOCKS].reshape(-1, kind.num_bytes))
    kept = 4 if kind.bits <= 4 else 8
    wide_OI = widened(codes, kind.bits).reshape(outputs, inputs)
    # Those of 32 numbers are float16 in the file, the products of the K types are not.
    scale_OG = scale.reshape(outputs, -1).to(getattr(torch, scheme.scale_dtype))
    return QuantizedMatrix(join_bytes(wide_OI, kept), scale_OG, None, inputs, kept, scheme.group)


def unpack(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """What such blocks mean, [N, C] float32."""
    affine = AFFINE[kind]
    codes, scale = affine.split(blocks)
    grouped = codes.reshape(*scale.shape, -1).float()
    return (grouped - float(1 << (affine.bits - 1))).mul_(scale[..., None]).flatten(1)
