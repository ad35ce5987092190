"""How are numbers rounded to a few bits? Symmetric integers, one scale for a group of neighbours.

Letters: O outputs, I inputs, G groups of each row.
"""

from __future__ import annotations

import torch

from ridgeline.errors import check


def largest_integer(bits: int) -> int:
    """The range is symmetric, -largest .. largest: 7 for 4 bits, 127 for 8."""
    check(2 <= bits <= 8, "symmetric integers have 2 to 8 bits", bits=bits)
    return (1 << (bits - 1)) - 1


def quantize_groups(
    weight_OI: torch.Tensor, *, bits: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest integers [O, I] (int8, not packed) and the scales [O, G] (float32).

    scale = largest magnitude of the group / largest integer; a group of zeros has scale 1, so that
    nothing is divided by zero. The last group of a row may be shorter.
    """
    outputs, inputs = weight_OI.shape
    num_groups = -(-inputs // group)
    padding = num_groups * group - inputs
    padded = torch.nn.functional.pad(weight_OI.float(), (0, padding))
    grouped_OGg = padded.view(outputs, num_groups, group)
    scales_OG = grouped_OGg.abs().amax(-1) / largest_integer(bits)
    scales_OG = torch.where(scales_OG == 0, torch.ones_like(scales_OG), scales_OG)
    limit = largest_integer(bits)
    integers = (grouped_OGg / scales_OG[..., None]).round().clamp(-limit, limit).to(torch.int8)
    return integers.view(outputs, -1)[:, :inputs].contiguous(), scales_OG


def dequantize_groups(
    integers_OI: torch.Tensor, scales_OG: torch.Tensor, *, group: int
) -> torch.Tensor:
    """integer * scale, [O, I] float32; off by at most half a scale from what was rounded."""
    scales_OI = scales_OG.repeat_interleave(group, dim=1)[:, : integers_OI.shape[1]]
    return integers_OI.float() * scales_OI
