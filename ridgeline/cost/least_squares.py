"""Which parameters bring a few residuals closest to zero, without being drawn by the odd ones out?

Levenberg-Marquardt on the soft-L1 loss 2 s^2 (sqrt(1 + (r/s)^2) - 1): quadratic for residuals below
the scale s, straight beyond. Derivatives are differences, which is enough for ten parameters.
Source: Triggs et al., "Bundle Adjustment - A Modern Synthesis", 2000 (robust Gauss-Newton).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Residuals = Callable[[Sequence[float]], Sequence[float]]

STEP = 1e-4  # of a parameter, for differences
MAX_DAMPING = 1e8
MIN_GAIN = 1e-7  # of the loss, below which a round is the last


def soft_l1(residuals: Sequence[float], scale: float) -> float:
    """The loss of all residuals together."""
    return sum(2 * scale**2 * (math.sqrt(1 + (r / scale) ** 2) - 1) for r in residuals)


def minimise(
    residuals: Residuals, start: Sequence[float], *, scale: float = 0.1, rounds: int = 40
) -> list[float]:
    """Parameters with a small loss, starting from `start`; the loss never rises."""
    best = list(start)
    values = list(residuals(best))
    loss, damping = soft_l1(values, scale), 1e-2
    for _ in range(rounds):
        rows = _jacobian(residuals, best, values)
        matrix, gradient = _normal_equations(rows, values, scale)
        gained = 0.0
        while damping < MAX_DAMPING:
            step = _solve(_damped(matrix, damping), gradient)
            trial = [p - d for p, d in zip(best, step, strict=True)]
            found = list(residuals(trial))
            trial_loss = soft_l1(found, scale)
            if trial_loss < loss:
                gained = 1 - trial_loss / loss
                best, values, loss = trial, found, trial_loss
                damping = max(damping / 5, 1e-9)
                break
            damping *= 4
        if gained < MIN_GAIN:
            break
    return best


def _jacobian(
    residuals: Residuals, at: Sequence[float], values: Sequence[float]
) -> list[list[float]]:
    """One row a parameter: how each residual changes with it."""
    rows = []
    for i, value in enumerate(at):
        moved = list(at)
        moved[i] = value + STEP
        after = residuals(moved)
        rows.append([(b - a) / STEP for a, b in zip(values, after, strict=True)])
    return rows


def _normal_equations(
    rows: Sequence[Sequence[float]], values: Sequence[float], scale: float
) -> tuple[list[list[float]], list[float]]:
    """J W J^T and J W r with the weights of the robust loss."""
    weights = [1 / math.sqrt(1 + (r / scale) ** 2) for r in values]
    weighted = [[w * v for w, v in zip(weights, row, strict=True)] for row in rows]
    matrix = [[_dot(a, b) for b in rows] for a in weighted]
    return matrix, [_dot(row, values) for row in weighted]


def _damped(matrix: Sequence[Sequence[float]], damping: float) -> list[list[float]]:
    """The diagonal grows by its share, and by a little for a parameter that changes nothing."""
    return [
        [v + (damping * v + 1e-12 if i == j else 0.0) for j, v in enumerate(row)]
        for i, row in enumerate(matrix)
    ]


def _solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Gaussian elimination with pivoting; a column of zeros gives 0."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-300:
            continue
        for r in range(i + 1, size):
            factor = rows[r][i] / rows[i][i]
            if factor:
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i] if abs(rows[i][i]) >= 1e-300 else 0.0
    return solution


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
