"""act(gate) * up: the middle of a gated feed-forward; for SiLU in one pass.

Letters: T tokens, F feed-forward width, G = 2 * F.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


CLAMPED = "clamped"  # the gated product of gpt-oss, by these two numbers
CLAMP, STEEPNESS = 7.0, 1.702


def clamped_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=CLAMP)
    return gate * torch.sigmoid(gate * STEEPNESS) * (up.clamp(-CLAMP, CLAMP) + 1)


def gated(gate_up_TG: torch.Tensor, activation: str) -> torch.Tensor:
    """[T, 2 * F] (gate, then up) -> [T, F], rounding after the activation and after the product."""
    gate, up = gate_up_TG.chunk(2, -1)
    if activation == CLAMPED:
        return clamped_mul(gate, up)
    return ACTIVATIONS[activation](gate).mul_(up)


def silu_mul(gate_up_TG: torch.Tensor, *, pdl: bool | None = None) -> torch.Tensor:
    """[T, 2 * F] (gate, then up) -> [T, F]; rows may have any stride. In float32, rounded once
    (`gated` rounds after the activation as well)."""
    if gate_up_TG.is_cuda:
        from ridgeline.kernels.silu_mul_triton import silu_mul_triton

        return silu_mul_triton(gate_up_TG, pdl=pdl)
    if gate_up_TG.device.type == "cpu":
        from ridgeline.kernels.cpu import elementwise

        if elementwise.serves(gate_up_TG):
            return elementwise.silu_mul(gate_up_TG)
    return gated(gate_up_TG, "silu")
