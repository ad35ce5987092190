"""How are matrices of GPTQ checkpoints read?

Source: AutoGPTQ's and gptqmodel's QuantLinear. `qweight` [I * bits / 32, O] has the codes of a
column of words below each other, `qzeros` [G, O * bits / 32] side by side. Version 1 stores zeros
less 1; as gptqmodel does, 1 is added to whole words, so that borrows come back as they went.
Letters: O outputs, I inputs, G groups of a row.
"""

from __future__ import annotations

import torch

from ridgeline.architectures.stored import Stored
from ridgeline.errors import ConfigError
from ridgeline.quantization.layouts.forms import Ordered, ordered, widened
from ridgeline.quantization.layouts.words import codes_of, split_words
from ridgeline.quantization.matrix import QuantizedMatrix

Tensors = dict[str, torch.Tensor]
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # 1 in each code of a word


def read(stored: Stored, tensors: Tensors, outputs: int, inputs: int) -> QuantizedMatrix | Ordered:
    bits = stored.bits
    codes = codes_of(tensors["qweight"].T, bits, inputs)
    zero_OG = _zeros(stored, tensors["qzeros"], outputs)
    middle = 1 << (bits - 1)
    if not stored.has_zero and not bool((zero_OG == middle).all()):
        raise ConfigError(
            f"config.json says sym, but qzeros are not all {middle}; set sym to false in its"
            " quantization_config"
        )
    zero = widened(zero_OG, bits).contiguous() if stored.has_zero else None
    kept = 4 if bits <= 4 else 8
    matrix = QuantizedMatrix(codes, tensors["scales"].T, zero, inputs, kept, stored.group)
    return ordered(matrix, tensors["g_idx"]) if stored.act_order else matrix


def _zeros(stored: Stored, words: torch.Tensor, outputs: int) -> torch.Tensor:
    """[O, G] uint8, as many bits as the codes."""
    bits, is_less = stored.bits, stored.layout == "gptq"
    if is_less and bits in ONES:
        words = words + ONES[bits]
    zero_GO = split_words(words, bits, outputs)
    if is_less and bits not in ONES:
        zero_GO = zero_GO + 1 & ((1 << bits) - 1)
    return zero_GO.T
