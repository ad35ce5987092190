"""Which numbers are in these packed blocks? The stored values exactly, in float32.

Each function takes blocks, [N, bytes of a block] uint8 on any device, and gives [N, numbers of a
block]. A product is rounded before its sum, as in ggml's own reference, so results are the same
bit for bit everywhere. Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h .
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from ridgeline.errors import check
from ridgeline.loader.gguf_layout import BY_NAME
from ridgeline.quantization.gguf_blocks import (
    AFFINE,
    fields,
    half,
    nibbles,
    pairs,
    single_bits,
    unpack,
)

PLAIN: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def decode(kind: str, raw_RB: torch.Tensor) -> torch.Tensor:
    """The numbers of rows of bytes, [R, C]: those of plain types in their dtype, others in
    float32. `kind` is in the words of the format, `raw_RB` uint8 with whole blocks in a row."""
    rows = len(raw_RB)
    if kind in PLAIN:
        return raw_RB.contiguous().view(PLAIN[kind])
    layout = BY_NAME[kind]
    check(raw_RB.shape[1] % layout.num_bytes == 0, "whole blocks", kind=kind, got=raw_RB.shape)
    blocks = raw_RB.reshape(-1, layout.num_bytes)
    return _DECODERS[kind](blocks).reshape(rows, -1)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return nibbles(blocks[:, 4:]).float().mul_(half(blocks, 0)).add_(half(blocks, 2))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    q = nibbles(blocks[:, 8:]) | (single_bits(blocks[:, 4:8]) << 4)
    return q.float().mul_(half(blocks, 0)).add_(half(blocks, 2))


# The K types have 256 numbers in a block: 16 groups of 16, or 8 of 32, with scales of their own.


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    both = blocks[:, :16].unsqueeze(-1)
    scale = half(blocks, 80).unsqueeze(-1) * (both & 15).float()
    low = half(blocks, 82).unsqueeze(-1) * (both >> 4).float()
    return pairs(blocks[:, 16:80]).float().mul_(scale).sub_(low)


def _scales_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of 8 groups, [N, 8, 1] each: 6 bits in 12 bytes, and two float16."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    scale, low = half(blocks, 0) * scales.float(), half(blocks, 2) * minima.float()
    return scale.unsqueeze(-1), low.unsqueeze(-1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, low = _scales_k(blocks)
    q = fields(blocks[:, 16:].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, 32)
    return q.float().mul_(scale).sub_(low)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, low = _scales_k(blocks)
    lower = fields(blocks[:, 48:].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, 32)
    upper = fields(blocks[:, 16:48], 1, 8).reshape(-1, 8, 32)
    return (lower | (upper << 4)).float().mul_(scale).sub_(low)


_DECODERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{kind: partial(unpack, kind) for kind in AFFINE},
    "Q4_1": _q4_1,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}
check(BY_NAME.keys() == PLAIN.keys() | _DECODERS.keys(), "every type has a decoder")
