"""AWQ: which inputs of a matrix deserve finer steps, and where may its spans be cut?

Columns of inputs that matter are multiplied by a scale before rounding, and what makes the inputs
is divided by it (Lin et al., arXiv 2306.00978); the error of the outputs, which the Hessian of the
inputs tells exactly, chooses the scales and the spans. Letters: O outputs, I inputs, G groups of a
row, g numbers of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ridgeline.quantization.algorithms.grid import (
    Grid,
    Quantized,
    fit_best,
    quantize,
    round_to_nearest,
)

ALPHA_STEPS = 20
SMALLEST_SPAN, SPAN_STEPS = 0.5, 21
SMALLEST_SCALE = 1e-4


def output_error(delta_OI: torch.Tensor, hessian_II: torch.Tensor) -> float:
    """The mean squared error of the outputs of a matrix that is off by delta: tr(D H D^T) / 2."""
    return float(((delta_OI @ hessian_II) * delta_OI).sum()) / 2


def search_scales(
    weights_OI: Sequence[torch.Tensor],
    hessian_II: torch.Tensor,
    magnitude_I: torch.Tensor,
    grid: Grid,
    *,
    share: Callable[[torch.Tensor], torch.Tensor] = lambda values_I: values_I,
) -> torch.Tensor:
    """Factors [I] for the columns of matrices that share their inputs: those whose rounding
    changes the outputs least. All ones are among what is tried, so it is never worse than that.

    `share` makes one number of those of inputs that must have the same factor.
    """
    weights = [weight_OI.float() for weight_OI in weights_OI]
    best_I, least = torch.ones_like(magnitude_I), float("inf")
    for scale_I in _candidates(weights, magnitude_I, share):
        error = sum(
            output_error(
                weight_OI - round_to_nearest(weight_OI * scale_I, grid).dequantize() / scale_I,
                hessian_II,
            )
            for weight_OI in weights
        )
        if error < least:
            best_I, least = scale_I, error
    return best_I


def _candidates(
    weights: Sequence[torch.Tensor],
    magnitude_I: torch.Tensor,
    share: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[torch.Tensor]:
    """Powers of the inputs' magnitudes, and those divided by the rest power of the weights'; ones
    come first."""
    of_inputs_I = share(magnitude_I)
    of_weights_I = share(torch.stack([w_OI.abs().mean(0) for w_OI in weights]).mean(0))
    for step in range(ALPHA_STEPS):
        alpha = step / ALPHA_STEPS
        yield _balanced(of_inputs_I.pow(alpha))
        if step:
            yield _balanced(of_inputs_I.pow(alpha) / of_weights_I.clamp(min=1e-6).pow(1 - alpha))


def _balanced(scale_I: torch.Tensor) -> torch.Tensor:
    """With the geometric mean of the extremes at 1."""
    scale_I = scale_I.clamp(min=SMALLEST_SCALE)
    return scale_I / (scale_I.amax() * scale_I.amin()).sqrt()


def clip_and_round(weight_OI: torch.Tensor, hessian_II: torch.Tensor, grid: Grid) -> Quantized:
    """Rounded to nearest within the spans that change the outputs least, group by group."""
    weight_OGg = grid.grouped(weight_OI.float())
    size = weight_OGg.shape[2]
    blocks_Ggg = torch.stack(
        [hessian_II[at : at + size, at : at + size] for at in range(0, weight_OI.shape[1], size)]
    )

    def errors(delta_OGg: torch.Tensor) -> torch.Tensor:
        delta_GOg = delta_OGg.transpose(0, 1)
        return ((delta_GOg @ blocks_Ggg) * delta_GOg).sum(-1).T

    scales = fit_best(weight_OGg, grid, errors, smallest=SMALLEST_SPAN, steps=SPAN_STEPS)
    return quantize(weight_OI, scales, grid)
