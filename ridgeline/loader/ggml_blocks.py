"""Which numbers are in these packed blocks? The stored values exactly, in float32.

Each function takes blocks, [N, bytes of a block] uint8 on any device, and gives [N, numbers of a
block]. A product is rounded before its sum, as in ggml's own reference, so results are the same
bit for bit everywhere. Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h .
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ridgeline.errors import check
from ridgeline.loader.gguf_layout import BY_NAME

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


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block, [N, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(data: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """[..., B] bytes -> [..., count, B]: the first `bits` of each byte, then the next. B is a
    multiple of 4, because four bytes are cut at once: some times faster on a CPU."""
    # A copy even of what is contiguous, as in a single block: it might not begin at a word.
    words = data.clone(memory_format=torch.contiguous_format).view(torch.int32)
    mask = 0x01010101 * ((1 << bits) - 1)
    parts = [(words >> bits * place) & mask for place in range(count)]
    return torch.stack(parts, dim=-2).view(torch.uint8)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """[N, B] bytes -> [N, 2 B]: all lower halves, then all upper ones."""
    return _fields(data, 4, 2).flatten(1)


def _bits(data: torch.Tensor) -> torch.Tensor:
    """[N, B] bytes -> [N, 8 B], the lowest bit of a byte first: looked up, eight at once."""
    places = torch.arange(8, device=data.device)
    table = (torch.arange(256, device=data.device).unsqueeze(-1) >> places) & 1
    eights = table.to(torch.uint8).view(torch.int64).view(-1)
    return eights[data.int()].view(torch.uint8)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[:, 2:]).float() - 8.0).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    q = _nibbles(blocks[:, 6:]) | (_bits(blocks[:, 2:6]) << 4)
    return (q.float() - 16.0).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    q = _nibbles(blocks[:, 8:]) | (_bits(blocks[:, 4:8]) << 4)
    return q.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


# The K types have 256 numbers in a block: 16 groups of 16, or 8 of 32, with scales of their own.


def _pairs(data: torch.Tensor) -> torch.Tensor:
    """[N, 64] bytes -> [N, 16, 16] numbers of 2 bits: the groups of each half of the block."""
    return _fields(data.reshape(-1, 2, 32), 2, 4).reshape(-1, 16, 16)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    both = blocks[:, :16].unsqueeze(-1)
    scale = _half(blocks, 80).unsqueeze(-1) * (both & 15).float()
    low = _half(blocks, 82).unsqueeze(-1) * (both >> 4).float()
    return _pairs(blocks[:, 16:80]).float().mul_(scale).sub_(low)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    high = _fields(blocks[:, :32], 1, 8).reshape(-1, 16, 16)
    q = _pairs(blocks[:, 32:96]) | (high << 2)
    lower = _nibbles(blocks[:, 96:104])
    upper = _fields(blocks[:, 104:108], 2, 4).reshape(-1, 16)
    scales = (lower | (upper << 4)).float() - 32.0
    scale = _half(blocks, 108) * scales
    return (q.float() - 4.0).mul_(scale.unsqueeze(-1))


def _scales_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of 8 groups, [N, 8, 1] each: 6 bits in 12 bytes, and two float16."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    scale, low = _half(blocks, 0) * scales.float(), _half(blocks, 2) * minima.float()
    return scale.unsqueeze(-1), low.unsqueeze(-1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, low = _scales_k(blocks)
    q = _fields(blocks[:, 16:].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, 32)
    return q.float().mul_(scale).sub_(low)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, low = _scales_k(blocks)
    lower = _fields(blocks[:, 48:].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, 32)
    upper = _fields(blocks[:, 16:48], 1, 8).reshape(-1, 8, 32)
    return (lower | (upper << 4)).float().mul_(scale).sub_(low)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    lower = _fields(blocks[:, :128].reshape(-1, 2, 64), 4, 2).reshape(-1, 16, 16)
    upper = _pairs(blocks[:, 128:192])
    scales = blocks[:, 192:208].view(torch.int8).float()
    scale = _half(blocks, 208) * scales
    return ((lower | (upper << 4)).float() - 32.0).mul_(scale.unsqueeze(-1))


_DECODERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
check(BY_NAME.keys() == PLAIN.keys() | _DECODERS.keys(), "every type has a decoder")
