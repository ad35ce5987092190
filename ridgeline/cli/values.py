"""What does the word behind a flag mean? Readers for argparse that several commands share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from math import inf, nan

_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1e-3}


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of "1,8,32", each at least 1."""
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of numbers such as 1,8,32, each at least 1"
        )
    return found


def whole(least: int) -> Callable[[str], int]:
    """Reads one whole number of at least `least`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return number

    return read


positive = whole(1)


def number(low: float, high: float = inf, *, is_open: bool = False) -> Callable[[str], float]:
    """Reads one finite number from `low` to `high`; `is_open`: `low` itself is too small."""
    wanted = f"above {low:g}" if is_open else f"of at least {low:g}"
    wanted += "" if high == inf else f" and at most {high:g}"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = nan
        if not low <= value <= high or value == inf or (is_open and value == low):
            raise argparse.ArgumentTypeError(f"{text!r} is no number {wanted}")
        return value

    return read


above_zero = number(0, is_open=True)
share = number(0, 1, is_open=True)


def words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def time_span(text: str) -> float:
    """Seconds of "200ms", "1.5s" or "80" (milliseconds)."""
    match = re.fullmatch(r"([0-9.eE+-]+)\s*(us|ms|s)?", text.strip())
    try:
        value = float(match[1]) * _TIME_UNITS[match[2] or ""] if match else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 200ms or 1.5s, above 0")
    return value
