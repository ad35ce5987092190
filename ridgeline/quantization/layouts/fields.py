"""Which small numbers are in these bytes? Fields of 1, 2 or 4 bits of blocks of a GGUF file.

Each function takes bytes, [N, bytes of a block] uint8 on any device.
"""

from __future__ import annotations

import torch


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
