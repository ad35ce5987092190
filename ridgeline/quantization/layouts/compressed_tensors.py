"""How are integers of compressed-tensors read? Formats pack-quantized and int-quantized.

Letters: O outputs, I inputs, G groups of a row.
"""

from __future__ import annotations

import torch

from ridgeline.architectures.stored import Stored
from ridgeline.quantization.layouts.forms import Ordered, ordered, widened
from ridgeline.quantization.layouts.words import codes_of, split_words
from ridgeline.quantization.matrix import QuantizedMatrix

Tensors = dict[str, torch.Tensor]
SIGN = 0x80  # signed bytes become unsigned ones around 128


def packed(
    stored: Stored, tensors: Tensors, outputs: int, inputs: int
) -> QuantizedMatrix | Ordered:
    """2^(bits-1) is added to the codes in the file, so that none is negative."""
    codes = codes_of(tensors["weight_packed"], stored.bits, inputs)
    zero_OG = None
    if stored.has_zero:
        words_GO = tensors["weight_zero_point"].T
        zero_OG = widened(split_words(words_GO, stored.bits, outputs), stored.bits).T.contiguous()
    return _matrix(stored, tensors, codes, zero_OG, inputs)


def integers(
    stored: Stored, tensors: Tensors, outputs: int, inputs: int
) -> QuantizedMatrix | Ordered:
    """Signed bytes, whatever their bits: they are kept as 8."""
    zero_OG = tensors["weight_zero_point"].view(torch.uint8) ^ SIGN if stored.has_zero else None
    return _matrix(stored, tensors, tensors["weight"].view(torch.uint8) ^ SIGN, zero_OG, inputs)


def _matrix(
    stored: Stored,
    tensors: Tensors,
    codes: torch.Tensor,
    zero_OG: torch.Tensor | None,
    inputs: int,
) -> QuantizedMatrix | Ordered:
    scale_OG = tensors["weight_scale"]
    if stored.is_whole:
        scale_OG = scale_OG.view(1, 1).expand(len(codes), 1)
    bits = 4 if codes.shape[1] < inputs else 8
    matrix = QuantizedMatrix(codes, scale_OG, zero_OG, inputs, bits, stored.group)
    return ordered(matrix, tensors["weight_g_idx"]) if stored.act_order else matrix
