"""How fast does a replica read prompts, and how long is a step of it? From prices, or from what was
seen."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.step import StepPricer

ASSUMED_TOKENS_PER_S = 1000.0  # until something is known
ASSUMED_STEP_S = 0.02
MEMORY = 0.98  # weight of what was known, after each observation
HALF_LIFE_S = 10.0  # of what a server saw of its own steps
LEAST_STEP_S = 1e-4
LEAST_TOKENS_PER_S, MOST_TOKENS_PER_S = 1.0, 1e7


@dataclass(frozen=True, slots=True)
class ReadingSpeed:
    """Prompt tokens a second in full steps, and the seconds of a step that reads next to none."""

    tokens_per_s: float = ASSUMED_TOKENS_PER_S
    step_s: float = ASSUMED_STEP_S


class PricedSpeed:
    """From the prices of steps. Rows and contexts are rounded down to powers of two, so that each
    of few cases is priced once."""

    def __init__(self, pricer: StepPricer, most_tokens: int) -> None:
        self._pricer = pricer
        self._most_tokens = most_tokens
        self._known: dict[tuple[int, int], ReadingSpeed] = {}

    def beside(self, num_decoding: int, num_tokens: int) -> ReadingSpeed:
        """Beside so many answers, which have `num_tokens` tokens of context together."""
        context = num_tokens // num_decoding if num_decoding else 0
        key = num_decoding.bit_length(), context.bit_length()
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._price(1 << key[0] >> 1, 1 << key[1] >> 1)
        return found

    def _price(self, num_rows: int, context: int) -> ReadingSpeed:
        rows = ((1, context),) * num_rows
        chunk = max(1, self._most_tokens - num_rows)
        full_s = self._pricer.seconds((*rows, (chunk, 0)))
        return ReadingSpeed(chunk / full_s, self._pricer.seconds((*rows, (1, 0))))


class Correction:
    """How much longer steps take than their price, of late. A second of steps at their price is
    taken as seen, and what is seen fades: one that was slow once and gets nothing to do since is
    thought of as it was at first."""

    def __init__(self) -> None:
        self._last = (0.0, 0.0, 0.0)
        self._measured_s = self._expected_s = 0.0

    def ratio(self, now: float, measured_s: float, expected_s: float) -> float:
        """`measured_s` and `expected_s` are sums that only rise, or begin anew."""
        at, measured, expected = self._last
        self._last = now, measured_s, expected_s
        left = 0.5 ** ((now - at) / HALF_LIFE_S)
        self._measured_s = left * self._measured_s + max(0.0, measured_s - measured)
        self._expected_s = left * self._expected_s + max(0.0, expected_s - expected)
        return (1 + self._measured_s) / (1 + self._expected_s)


def slot_wait_s(num_before: int, num_slots: int, answer_tokens: float, step_s: float) -> float:
    """Until a slot is free for who has `num_before` running and waiting requests before it: they
    leave in turn, each having taken a slot for an answer."""
    return max(0, num_before - num_slots + 1) * answer_tokens * step_s / num_slots


class FittedSpeed:
    """From the times of first tokens: a line through (tokens to read before it, seconds), by least
    squares, in which old observations fade. A line that falls or begins below zero is replaced by
    the one through zero."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def saw(self, num_tokens: int, seconds: float) -> None:
        """A first token came after `seconds`, with so many tokens to read up to it."""
        x = float(max(1, num_tokens))
        self._n = MEMORY * self._n + 1.0
        self._x = MEMORY * self._x + x
        self._y = MEMORY * self._y + seconds
        self._xx = MEMORY * self._xx + x * x
        self._xy = MEMORY * self._xy + x * seconds

    @property
    def speed(self) -> ReadingSpeed:
        if not self._n:
            return ReadingSpeed()
        spread = self._n * self._xx - self._x * self._x
        slope = step_s = 0.0
        if spread > 1e-9 * self._xx * self._n:
            slope = (self._n * self._xy - self._x * self._y) / spread
            step_s = (self._y - slope * self._x) / self._n
        if slope <= 0 or step_s < 0:
            slope, step_s = self._xy / self._xx, 0.0
        rate = min(max(1 / slope if slope > 0 else 0.0, LEAST_TOKENS_PER_S), MOST_TOKENS_PER_S)
        return ReadingSpeed(rate, max(step_s, LEAST_STEP_S))
