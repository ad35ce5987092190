"""How are these durations spread? A histogram of fixed bounds, in plain integers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ridgeline.errors import check

# Seconds. Wide enough for a small model on a GPU and for a large one on a CPU.
FIRST_TOKEN_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
BETWEEN_TOKENS_S = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0,
    5.0,
)  # fmt: skip
WHOLE_REQUEST_S = (
    0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip


class Histogram:
    """Counts of values per bound; bucket i holds bounds[i-1] < value <= bounds[i]."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        check(list(bounds) == sorted(set(bounds)), "histogram bounds rise")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # the last is above every bound
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`; a negative one (a clock's fault) counts as zero."""
        value = max(0.0, value)
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound, values at or below it) per bucket, "+Inf" last."""
        total, rows = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, total))
        return rows
