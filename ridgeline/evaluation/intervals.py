"""How sure is a score? Its row, with 95 % intervals for shares and for ratios of sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from ridgeline.errors import check

Z95 = 1.959963984540054  # two-sided 95 % of the normal distribution


@dataclass(frozen=True, slots=True)
class Row:
    """`value` with its 95 % interval over `n` trials (answers, tokens, bytes or steps, as the
    metric says); `low` and `high` are None where one unit alone says nothing about the error."""

    task: str
    metric: str
    value: float
    n: int
    low: float | None
    high: float | None


def wilson(successes: float, n: float) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927); (0, 1) when nothing was tried.

    `n` may be an effective number of trials and so need not be whole.
    """
    check(0 <= successes <= max(n, 0), "successes lie between 0 and n", successes=successes, n=n)
    if n <= 0:
        return 0.0, 1.0
    share, z2 = successes / n, Z95 * Z95
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # Rounding must not push an end past the share itself.
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two sums over independent units; no error is known from fewer than two units."""

    value: float
    standard_error: float | None

    def interval(self) -> tuple[float | None, float | None]:
        """Normal approximation; (None, None) where no error is known."""
        if self.standard_error is None:
            return None, None
        half = Z95 * self.standard_error
        return self.value - half, self.value + half


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """sum(above) / sum(below), unit by unit, its error by linearisation (Cochran, Sampling
    Techniques, 6.4): sqrt(n / (n - 1) * sum((a - value * b) ** 2)) / sum(below)."""
    n, total = len(below), sum(below)
    check(len(above) == n and total > 0, "each unit has both parts", n=n, total=total)
    value = sum(above) / total
    if n < 2:
        return Ratio(value, None)
    spread = sum((a - value * b) ** 2 for a, b in zip(above, below, strict=True))
    return Ratio(value, sqrt(n / (n - 1) * spread) / total)


def clustered_share(hits: Sequence[int], trials: Sequence[int]) -> tuple[float, float, float]:
    """(share, low, high) of trials that come in clusters, such as the tokens of one answer.

    Wilson's interval with the trials divided by the design effect: how much larger the variance
    between the clusters makes the error than that of as many independent trials (at least 1).
    """
    found, n = ratio(hits, trials), sum(trials)
    independent = found.value * (1 - found.value) / n
    measured = (found.standard_error or 0.0) ** 2
    effective = n / max(1.0, measured / independent) if independent else float(n)
    low, high = wilson(found.value * effective, effective)
    return found.value, low, high
