"""act(gate) * up: the middle of a gated feed-forward.

Letters: T tokens, F feed-forward width.
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
}


def gated(gate_up_TG: torch.Tensor, activation: str) -> torch.Tensor:
    """[T, 2 * F] (gate, then up) -> [T, F], rounding after the activation and after the product."""
    gate, up = gate_up_TG.chunk(2, -1)
    return ACTIVATIONS[activation](gate).mul_(up)
