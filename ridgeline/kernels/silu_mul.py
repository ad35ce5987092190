"""silu(gate) * up: the middle of a gated feed-forward, in one pass.

In float32, rounded once (`gated` rounds after the activation as well).
Letters: T tokens, F feed-forward width, G = 2 * F.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ridgeline.kernels.gated import gated


def silu_mul(gate_up_TG: torch.Tensor, *, pdl: bool | None = None) -> torch.Tensor:
    """[T, 2 * F] (gate, then up) -> [T, F]; rows may have any stride."""
    if gate_up_TG.is_cuda:
        from ridgeline.kernels.silu_mul_triton import silu_mul_triton

        return silu_mul_triton(gate_up_TG, pdl=pdl)
    if gate_up_TG.device.type == "cpu":
        from ridgeline.kernels.cpu import elementwise

        if elementwise.serves(gate_up_TG):
            return elementwise.silu_mul(gate_up_TG)
    return gated(gate_up_TG, "silu")


def silu_mul_reference(gate_up_TG: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up_TG.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(gate_up_TG.dtype)
