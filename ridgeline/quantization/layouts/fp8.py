"""How are matrices of e4m3 numbers read? Those of compressed-tensors (float-quantized), and
fine-grained ones as DeepSeek and Qwen publish them.

Letters: O outputs, I inputs.
"""

from __future__ import annotations

import torch

from ridgeline.architectures.stored import Stored
from ridgeline.quantization.layouts.forms import Blocks8, Rows8

Tensors = dict[str, torch.Tensor]


def compressed_tensors(
    stored: Stored, tensors: Tensors, outputs: int, inputs: int
) -> Rows8 | Blocks8:
    """One scale for all, for each row, or for each block or group of a row."""
    codes_OI, scale = tensors["weight"], tensors["weight_scale"]
    if stored.group:
        return Blocks8(codes_OI, scale, stored.block_rows or 1, stored.group)
    return Rows8(codes_OI, scale.float().view(-1).expand(outputs).contiguous())


def fine_grained(stored: Stored, tensors: Tensors, outputs: int, inputs: int) -> Blocks8:
    scale_RC = tensors["weight_scale_inv"]
    return Blocks8(tensors["weight"], scale_RC, stored.block_rows, stored.group)
