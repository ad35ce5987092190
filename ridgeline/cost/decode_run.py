"""How long do the next decode steps of a fixed set of requests take, all at once?

With every step each context grows by one, so the keys that a layer reads are a sum of straight
lines that go flat where a window is full: v(i) = sum over requests of min(context + 1 + i, W), and
its running sum has a closed form. Seconds follow v through max(compute, memory) and max(kernels,
launches); v never falls, so each max changes sides at most once, at a step found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ridgeline.cost.constants import HostConstants


@dataclass(frozen=True, slots=True)
class DecodeLine:
    """Seconds of one layer's decode attention of `rows` requests that read x keys (with skew):
    max(compute_per_key x, memory_per_key x + memory_per_row rows) + t0."""

    compute_per_key_s: float
    memory_per_key_s: float
    memory_per_row_s: float
    t0_s: float
    skew: float
    mixed: float
    overlap_s: float

    def seconds(self, rows: int, keys: int, longest: int, *, is_mixed: bool = False) -> float:
        stretched = keys + self.skew * (rows * longest - keys)
        compute = stretched * self.compute_per_key_s
        memory = stretched * self.memory_per_key_s + rows * self.memory_per_row_s
        alone = (compute if compute > memory else memory) + self.t0_s
        if not is_mixed:
            return alone
        together = self.mixed * alone - self.overlap_s
        return together if together > alone else alone


class GrowingKeys:
    """v(i) = sum over contexts of min(context + 1 + i, window), and its running sums."""

    __slots__ = ("_flat_at", "_flat_sums", "_longest", "_starts", "_total", "window")

    def __init__(self, contexts: Sequence[int], window: int | None) -> None:
        self.window = window
        if window is None:
            self._total = sum(contexts) + len(contexts)
            self._longest = max(contexts) + 1 if contexts else 0
            return
        lengths = sorted((c + 1 for c in contexts), reverse=True)
        self._longest = lengths[0] if lengths else 0
        # Step at which each row's window is full, ascending, and sums over the rows that are full.
        self._flat_at = [max(0, window - n) for n in lengths]
        starts = [min(n, window) for n in lengths]
        self._starts = [0, *accumulate(starts)]
        self._total = self._starts[-1]
        excess = (
            t * s + t * (t - 1) // 2 - t * (s + t)
            for t, s in zip(self._flat_at, starts, strict=True)
        )
        self._flat_sums = [0, *accumulate(excess)]

    def at(self, step: int, rows: int) -> int:
        """v(step)"""
        if self.window is None:
            return self._total + rows * step
        full = bisect_right(self._flat_at, step)
        growing = self._total - self._starts[full] + (rows - full) * step
        return full * self.window + growing

    def before(self, step: int, rows: int) -> int:
        """v(0) + ... + v(step - 1)"""
        triangle = step * (step - 1) // 2
        if self.window is None:
            return self._total * step + rows * triangle
        full = bisect_right(self._flat_at, step)
        growing = (self._total - self._starts[full]) * step + (rows - full) * triangle
        return self._flat_sums[full] + full * self.window * step + growing

    def longest_at(self, step: int) -> int:
        longest = self._longest + step
        return longest if self.window is None else min(longest, self.window)

    def longest_before(self, step: int) -> int:
        """The longest request's keys, summed over the steps before `step`."""
        if self.window is None:
            return self._longest * step + step * (step - 1) // 2
        first = min(self._longest, self.window)
        growing = min(step, self.window - first)
        return first * growing + growing * (growing - 1) // 2 + (step - growing) * self.window


class _Layer:
    """The attention of `count` equal layers over the coming steps."""

    __slots__ = ("_count", "_keys", "_line", "_rows")

    def __init__(self, keys: GrowingKeys, line: DecodeLine, count: int, rows: int) -> None:
        self._keys = keys
        self._line = line
        self._count = count
        self._rows = rows

    def seconds(self, step: int) -> float:
        keys = self._keys
        return self._count * self._line.seconds(
            self._rows, keys.at(step, self._rows), keys.longest_at(step)
        )

    def _stretched_before(self, step: int) -> float:
        keys, rows = self._keys, self._rows
        plain = keys.before(step, rows)
        return plain + self._line.skew * (rows * keys.longest_before(step) - plain)

    def _computes(self, step: int) -> bool:
        """Arithmetic takes longer than memory at this step; stays so once it is so."""
        keys, rows, line = self._keys, self._rows, self._line
        plain = keys.at(step, rows)
        stretched = plain + line.skew * (rows * keys.longest_at(step) - plain)
        more = (line.compute_per_key_s - line.memory_per_key_s) * stretched
        return more > rows * line.memory_per_row_s

    def between(self, first: int, last: int) -> float:
        """Seconds of the steps first .. last - 1."""
        line = self._line
        turn = _first_true(self._computes, first, last)
        middle = self._stretched_before(turn)
        memory = middle - self._stretched_before(first)
        compute = self._stretched_before(last) - middle
        return self._count * (
            memory * line.memory_per_key_s
            + (turn - first) * self._rows * line.memory_per_row_s
            + compute * line.compute_per_key_s
            + (last - first) * line.t0_s
        )


class DecodeRun:
    """Decode steps 0, 1, ... of requests with `contexts` computed tokens before step 0. `layers`
    are (window, how many) of each kind of attention, which takes the seconds of its line; all else
    takes `fixed_s`, and `beside_s` what is no operator of the model."""

    __slots__ = ("_added_s", "_beside_s", "_fixed_s", "_floor_s", "_layers", "num_rows")

    def __init__(
        self,
        contexts: Sequence[int],
        layers: Sequence[tuple[int | None, int]],
        lines: Sequence[DecodeLine],
        fixed_s: float,
        beside_s: float,
        host: HostConstants,
        num_launches: int,
    ) -> None:
        rows = self.num_rows = len(contexts)
        keys = {
            window: GrowingKeys(contexts, window) for window in dict.fromkeys(w for w, _ in layers)
        }
        self._layers = tuple(
            _Layer(keys[window], line, count, rows)
            for (window, count), line in zip(layers, lines, strict=True)
        )
        self._fixed_s, self._beside_s = fixed_s, beside_s
        plan_s = host.c0_s + host.c1_s * rows
        # Kernels that take less than the floor wait for the host.
        self._floor_s = host.per_launch_s * num_launches + (plan_s if host.overlapped else 0.0)
        self._added_s = 0.0 if host.overlapped else plan_s

    def _kernels(self, step: int) -> float:
        kernels = self._fixed_s
        for layer in self._layers:  # in the order of `Pricer`: equal to the last bit
            kernels += layer.seconds(step)
        return kernels + self._beside_s

    def seconds(self, step: int) -> float:
        """Seconds of step `step` (0: the next one)."""
        return self._added_s + max(self._kernels(step), self._floor_s)

    def total(self, num_steps: int, first: int = 0) -> float:
        """Seconds of the steps first .. first + num_steps - 1 together."""
        last = first + num_steps
        turn = _first_true(lambda step: self._kernels(step) > self._floor_s, first, last)
        kernels = (last - turn) * (self._fixed_s + self._beside_s)
        if turn < last:
            kernels += sum(layer.between(turn, last) for layer in self._layers)
        return num_steps * self._added_s + (turn - first) * self._floor_s + kernels


def _first_true(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The first of low .. high - 1 where `holds` (and goes on to hold), or `high`."""
    if low >= high or not holds(high - 1):
        return max(low, high)
    return bisect_left(range(high), True, lo=low, hi=high, key=holds)
