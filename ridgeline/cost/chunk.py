"""How many tokens of prompts make a step worth its time?"""

from __future__ import annotations

from bisect import bisect_left

from ridgeline.cost.captured import can_capture, captured_chunk, most_prompt_tokens
from ridgeline.cost.setup import Setup
from ridgeline.step import StepPricer

SHARE = 0.9  # of the best rate at which prompts are read
ROUNDING = 8  # tokens


def efficient_chunk(pricer: StepPricer, most: int, share: float = SHARE) -> int:
    """The fewest tokens that a step reads at `share` of the best rate (tokens a second) of any step
    of up to `most` tokens, rounded up; at most `most`.

    A step takes a while however little it computes, so that rates rise with its length at first;
    from here on longer steps gain little and only keep those waiting who are being answered.
    """

    def rate(num_tokens: int) -> float:
        return num_tokens / pricer.seconds(((num_tokens, 0),))

    sizes = sorted({n for i in range(14) for n in (2**i, 3 * 2**i) if n <= most} | {most})
    rates = [rate(n) for n in sizes]
    wanted = share * max(rates)
    end = next(i for i, found in enumerate(rates) if found >= wanted)
    between = range(sizes[end - 1] if end else 1, sizes[end] + 1)
    least = between[bisect_left(between, x=True, key=lambda n: rate(n) >= wanted)]
    return min(most, -(-least // ROUNDING) * ROUNDING)


def mixed_tokens(setup: Setup, pricer: StepPricer, most: int) -> int | None:
    """What an engine with steps of up to `most` tokens bounds those by in which prompts join
    decodes, unless it is told: the size of a captured step nearest to an efficient one. None: it
    bounds none, as on a CPU."""
    if setup.device.kind == "cpu":
        return None
    largest = most_prompt_tokens(setup.spec) if can_capture(setup.spec) else 0
    return captured_chunk(efficient_chunk(pricer, most), largest)
