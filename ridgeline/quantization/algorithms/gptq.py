"""GPTQ: which codes make the products of a matrix nearest to those it had?

Columns are rounded one after the other; what rounding one did to the outputs is made good by the
columns still to come, as the Hessian of their inputs says (Frantar et al., arXiv 2210.17323).
Letters: O outputs, I inputs, G groups of a row, g numbers of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.errors import ConfigError
from ridgeline.quantization.algorithms.grid import (
    Grid,
    Quantized,
    Scales,
    decode,
    encode,
    fit,
    fit_best,
)

BLOCK_COLUMNS = 128  # whose corrections reach later columns at once, in one product
SMALLEST_SPAN, SPAN_STEPS = 0.5, 26
MAX_DAMPING = 1.0


@dataclass(frozen=True, slots=True)
class GptqSettings:
    """`damping`: this share of the mean of the Hessian's diagonal is added to it. `act_order`:
    columns of large inputs first, while others can still make good for them; groups stay those
    of the matrix as it stands, and their scales are found before. `search`: scales by the least
    error weighted with the diagonal, not by the whole span."""

    damping: float = 0.01
    act_order: bool = True
    search: bool = True


def gptq(
    weight_OI: torch.Tensor,
    hessian_II: torch.Tensor,
    grid: Grid,
    settings: GptqSettings | None = None,
) -> Quantized:
    """Inputs that were always zero correct nothing and are rounded to nearest. ConfigError if no
    damping makes the Hessian invertible (it holds NaN)."""
    settings = settings or GptqSettings()
    weight_OI, diagonal_I = weight_OI.float(), hessian_II.diagonal()
    size = grid.size(weight_OI.shape[1])
    order_I = torch.arange(weight_OI.shape[1], device=weight_OI.device)
    fixed = None
    if settings.act_order or not grid.group:
        fixed = _scales(grid.grouped(weight_OI), diagonal_I, grid, settings)
    if settings.act_order:
        order_I = diagonal_I.argsort(descending=True, stable=True)
    work = _Columns(
        weight_OI[:, order_I].contiguous(),
        _inverse_factor(hessian_II[order_I][:, order_I], settings.damping),
        order_I,
        diagonal_I,
    )
    columns = BLOCK_COLUMNS if fixed else size * max(1, BLOCK_COLUMNS // size)
    codes_OI, scales = work.run(grid, size, columns, fixed, settings)
    return Quantized(grid, codes_OI, scales)


def _scales(
    weight_OGg: torch.Tensor, diagonal_I: torch.Tensor, grid: Grid, settings: GptqSettings
) -> Scales:
    if not settings.search:
        return fit(weight_OGg, grid)
    weights_Gg = diagonal_I.reshape(weight_OGg.shape[1:])
    return fit_best(
        weight_OGg,
        grid,
        lambda d_OGg: (d_OGg.square() * weights_Gg).sum(-1),
        smallest=SMALLEST_SPAN,
        steps=SPAN_STEPS,
    )


def _inverse_factor(hessian_II: torch.Tensor, damping: float) -> torch.Tensor:
    """U, upper triangular, with U^T U the inverse of the damped Hessian."""
    mean = float(hessian_II.diagonal().mean()) or 1.0
    upper_II: torch.Tensor
    while damping <= MAX_DAMPING:
        damped_II = hessian_II.clone()
        damped_II.diagonal().add_(damping * mean)
        lower_II, failed = torch.linalg.cholesky_ex(damped_II)
        if not bool(failed):
            inverse_II = torch.cholesky_inverse(lower_II)
            upper_II, failed = torch.linalg.cholesky_ex(inverse_II, upper=True)
            if not bool(failed):
                return upper_II
        damping *= 10
    raise ConfigError(
        "the inputs of a matrix have no Hessian that can be inverted: calibration made them"
        " infinite or NaN; check the model, or give another calibration text"
    )


@dataclass(slots=True)
class _Columns:
    """The matrix in the order in which its columns are rounded."""

    weight_OI: torch.Tensor
    upper_II: torch.Tensor
    order_I: torch.Tensor
    diagonal_I: torch.Tensor

    def run(
        self, grid: Grid, size: int, columns: int, fixed: Scales | None, settings: GptqSettings
    ) -> tuple[torch.Tensor, Scales]:
        outputs, inputs = self.weight_OI.shape
        codes_OI = torch.empty(outputs, inputs, dtype=torch.int8, device=self.weight_OI.device)
        group_of = (self.order_I // size).tolist()
        found: list[Scales] = []
        for begin in range(0, inputs, columns):
            end = min(inputs, begin + columns)
            part_OC, upper_CC = self.weight_OI[:, begin:end], self.upper_II[begin:end, begin:end]
            errors_OC = torch.empty_like(part_OC)
            for column in range(end - begin):
                at = begin + column
                if fixed is None and at % size == 0:
                    found.append(self._open(at, size, grid, settings))
                scales = found[-1] if fixed is None else fixed.group(group_of[at])
                codes_OI[:, self.order_I[at]] = self._round(
                    column, part_OC, upper_CC, errors_OC, scales, grid
                )
            self.weight_OI[:, end:] -= errors_OC @ self.upper_II[begin:end, end:]
        return codes_OI, fixed or _joined(found)

    def _open(self, at: int, size: int, grid: Grid, settings: GptqSettings) -> Scales:
        """Scales of the group that begins here, of its weights as corrected so far."""
        part = slice(at, at + size)
        return _scales(self.weight_OI[:, None, part], self.diagonal_I[part], grid, settings)

    @staticmethod
    def _round(
        column: int,
        part_OC: torch.Tensor,
        upper_CC: torch.Tensor,
        errors_OC: torch.Tensor,
        scales: Scales,
        grid: Grid,
    ) -> torch.Tensor:
        """Codes of a column, [O]; corrects the rest of the block."""
        weight_O11 = part_OC[:, column, None, None]
        codes_O11 = encode(weight_O11, scales, grid)
        error_O = (weight_O11 - decode(codes_O11, scales)).flatten() / upper_CC[column, column]
        part_OC[:, column + 1 :] -= torch.outer(error_O, upper_CC[column, column + 1 :])
        errors_OC[:, column] = error_O
        return codes_O11.flatten().to(torch.int8)


def _joined(found: list[Scales]) -> Scales:
    zeros = [one.zero_OG for one in found if one.zero_OG is not None]
    scale_OG = torch.cat([one.scale_OG for one in found], 1)
    return Scales(scale_OG, torch.cat(zeros, 1) if zeros else None)


class InputStatistics:
    """What must be known of the inputs of a matrix, [T, I]: sums over calibration tokens.

    Adds up in float32 on the device of its inputs; takes I * I numbers."""

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
