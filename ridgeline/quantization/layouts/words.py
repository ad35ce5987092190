"""Which codes are in words of 32 bits, the first in the lowest bits?

Letters: R rows, W words, N codes.
"""

from __future__ import annotations

import torch

from ridgeline.quantization.compressed_tensors import unpack_bits
from ridgeline.quantization.layouts.forms import widened
from ridgeline.quantization.matrix import join_bytes


def split_words(words_RW: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unsigned codes one behind the other, [R, count] uint8; they may cross words."""
    if bits == 8:
        return words_RW.contiguous().view(torch.uint8)[:, :count]
    if bits in (2, 4):
        codes = words_RW.contiguous().view(torch.uint8)
        places = [codes >> at & ((1 << bits) - 1) for at in range(0, 8, bits)]
        return torch.stack(places, -1).flatten(1)[:, :count]
    signed = unpack_bits(words_RW, bits, count).to(torch.int16)
    return (signed + (1 << (bits - 1))).to(torch.uint8)


def codes_of(words_RW: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The same as bytes of a QuantizedMatrix; those of 4 and 8 bits are such bytes already."""
    if bits in (4, 8):
        return words_RW.contiguous().view(torch.uint8)[:, : -(-count * bits // 8)]
    wide = widened(split_words(words_RW, bits, count), bits)
    return join_bytes(wide, 4 if bits < 4 else 8)
