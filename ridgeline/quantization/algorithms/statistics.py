"""What must be known of the inputs of a matrix to round it well? Sums over calibration tokens.

Letters: T tokens, I inputs.
"""

from __future__ import annotations

import torch


class InputStatistics:
    """Adds up in float32 on the device of its inputs; takes I * I numbers."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        self._products_II = torch.zeros(inputs, inputs, device=device)
        self._magnitudes_I = torch.zeros(inputs, device=device)
        self.num_tokens = 0

    def add(self, x_TI: torch.Tensor) -> None:
        """Count these rows, any float dtype."""
        x_TI = x_TI.float()
        self._products_II.addmm_(x_TI.T, x_TI)
        self._magnitudes_I.add_(x_TI.abs().sum(0))
        self.num_tokens += x_TI.shape[0]

    @property
    def hessian_II(self) -> torch.Tensor:
        """2 X X^T / T: of the squared error of a row of outputs, by its weights."""
        return self._products_II * (2.0 / max(1, self.num_tokens))

    @property
    def magnitude_I(self) -> torch.Tensor:
        """The mean |x| of each input."""
        return self._magnitudes_I / max(1, self.num_tokens)
