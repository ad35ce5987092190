"""When would those who wait have their first token, if the promises to the others are kept?

A coarse picture of the engine: at most `num_rows` requests are decoded at once, each making one
token a step; what a step may take beyond those tokens reads the waiting prompts one after another.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ridgeline.step import StepPricer

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of num_rows, at which prompt rates are worked out


@dataclass(frozen=True, slots=True)
class Speed:
    """What steps of at most `step_s` seconds do: `rates` are prompt tokens a second beside as many
    decoding requests as `rows` says, in rising order. `token_s` is the usual step when all rows are
    taken: each token of an answer takes so long."""

    step_s: float
    token_s: float
    rows: tuple[int, ...]
    rates: tuple[float, ...]

    @property
    def num_rows(self) -> int:
        """Most requests that can be decoded at once."""
        return self.rows[-1]

    def prompt_rate(self, num_decoding: int) -> float:
        """Prompt tokens a second beside `num_decoding` requests, between the points known."""
        i = bisect_left(self.rows, num_decoding)
        if i == 0 or i == len(self.rows):
            return self.rates[min(i, len(self.rates) - 1)]
        low, high = self.rows[i - 1], self.rows[i]
        share = (num_decoding - low) / (high - low)
        return self.rates[i - 1] + share * (self.rates[i] - self.rates[i - 1])


@dataclass(frozen=True, slots=True)
class Waiter:
    """One prompt in line: tokens still to read, seconds that takes at least, and seconds its answer
    will take after them. Steps read several prompts at once, so the least may be much longer than
    its share of the reading."""

    num_tokens: int
    least_s: float
    answer_s: float


def largest(most: int, draft_token: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, within 6 %; 0 when 1 does not. What fits, fits
    when smaller too. A good draft saves questions."""
    low, high = 0, most + 1  # low fits, high does not
    probe, reach = max(1, min(draft_token, most)), max(1, draft_token // 16)
    while high - low > 1 + low // 16:
        if fits(probe):
            low = probe
            probe = min(low + reach, most) if high > most else (low + high) // 2
        else:
            high = probe
            probe = max(high - reach, 1) if low == 0 else (low + high) // 2
        probe, reach = max(low + 1, min(probe, high - 1)), 2 * reach
    return low


def speed_of(
    pricer: StepPricer,
    step_s: float,
    *,
    context: int,
    most_rows: int,
    most_tokens: int,
    prompt_share: float,
) -> Speed:
    """What steps of `step_s` can do for requests of `context` tokens: at least one row. Without
    decodes nobody waits for the next token, so a step then reads all the tokens it may.
    `prompt_share` is how many prompt tokens there are to read for each token of an answer."""

    def rate(num_rows: int) -> float:
        """Prompt tokens a second beside so many decodes; at least one token a step."""
        rest, most = ((1, context),) * num_rows, max(1, most_tokens - num_rows)
        if num_rows:
            most = largest(most, most // 2, lambda n: pricer.seconds((*rest, (n, 0))) <= step_s)
        return max(most, 1) / pricer.seconds((*rest, (max(most, 1), 0)))

    num_rows = largest(
        most_rows, most_rows, lambda n: pricer.seconds(((1, context),) * n) <= step_s
    )
    num_rows = max(1, num_rows)
    rows = sorted({round(share * num_rows) for share in SHARES})
    usual = min(max(1, round(prompt_share * num_rows)), most_tokens)
    token_s = pricer.seconds((*((1, context),) * num_rows, (usual, 0)))
    longest_s = pricer.seconds((*((1, context),) * num_rows, (most_tokens, 0)))
    return Speed(
        min(step_s, longest_s), min(step_s, token_s), tuple(rows), tuple(rate(n) for n in rows)
    )


def first_tokens(
    speed: Speed, now: float, decoding: Iterable[float], line: Sequence[Waiter]
) -> list[float]:
    """When each in `line` has its first token. `decoding`: when those that run will be over."""
    ends = list(decoding)
    heapq.heapify(ends)
    at, times = now, []
    for waiter in line:
        if len(ends) >= speed.num_rows:
            at = max(at, heapq.heappop(ends))
        while ends and ends[0] <= at:
            heapq.heappop(ends)
        first = at + waiter.least_s
        at += waiter.num_tokens / speed.prompt_rate(len(ends))
        times.append(max(at, first))
        heapq.heappush(ends, times[-1] + waiter.answer_s)
    return times
