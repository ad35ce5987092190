"""How are matrices of AWQ checkpoints ("gemm") read?

Source: AutoAWQ's WQLinear_GEMM: a word of `qweight` [I, O / 8] holds the codes of eight rows, those
of rows 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits on; `qzeros` [G, O / 8] likewise.
Letters: O outputs, I inputs, G groups of a row.
"""

from __future__ import annotations

import torch

from ridgeline.architectures.stored import Stored
from ridgeline.quantization.layouts.words import split_words
from ridgeline.quantization.matrix import QuantizedMatrix, join_bytes

Tensors = dict[str, torch.Tensor]
BITS, ROWS_A_WORD = 4, 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of rows 0 to 7 within their word


def read(stored: Stored, tensors: Tensors, outputs: int, inputs: int) -> QuantizedMatrix:
    codes = join_bytes(_rows(tensors["qweight"], outputs), BITS)
    zero = _rows(tensors["qzeros"], outputs).contiguous() if stored.has_zero else None
    return QuantizedMatrix(codes, tensors["scales"].T, zero, inputs, BITS, stored.group)


def _rows(words: torch.Tensor, outputs: int) -> torch.Tensor:
    """[N, O / 8] words -> [O, N] codes."""
    codes = split_words(words, BITS, outputs).view(len(words), -1, ROWS_A_WORD)
    places = torch.tensor(PLACES, device=words.device)
    return codes.index_select(2, places).flatten(1).T
