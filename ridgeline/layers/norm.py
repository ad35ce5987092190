"""A root-mean-square norm with its weight."""

from __future__ import annotations

import torch

from ridgeline.kernels.rms_norm import rms_norm
from ridgeline.layers.piece import Piece


class RMSNorm:
    def __init__(
        self, name: str, size: int, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight_E = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps
        self.name = name

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., E] -> [..., E]"""
        return rms_norm(x, self.weight_E, self.eps)

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight_E]

    def pieces(self) -> list[Piece]:
        return [Piece(self.name, self.weight_E)]
