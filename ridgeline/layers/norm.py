"""A root-mean-square norm with its weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ridgeline.kernels.rms_norm import add_norm, rms_norm
from ridgeline.kernels.small_linear import InputNorm
from ridgeline.layers.piece import Piece


class RMSNorm:
    def __init__(
        self, name: str, size: int, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight_E = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps
        self.name = name

    @property
    def as_input(self) -> InputNorm:
        """For kernels that norm what they read."""
        return InputNorm(self.weight_E, self.eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., E] -> [..., E]"""
        return rms_norm(x, self.weight_E, self.eps)

    def of_sum(self, delta_TE: torch.Tensor | None, hidden_TE: torch.Tensor) -> torch.Tensor:
        """The normed sum, [T, E]; `hidden_TE` becomes the sum. None adds nothing."""
        if delta_TE is None:
            return self(hidden_TE)
        return add_norm(delta_TE, hidden_TE, self.weight_E, self.eps)

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight_E]

    def kept(self) -> dict[str, torch.Tensor]:
        """What a later start `adopt`s."""
        return {"weight": self.weight_E}

    def adopt(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Be as the norm that kept this."""
        self.weight_E.copy_(kept["weight"])

    def pieces(self) -> list[Piece]:
        return [Piece(self.name, self.weight_E)]
