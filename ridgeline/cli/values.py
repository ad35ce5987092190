"""What does the word behind a flag mean? Readers for argparse."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from math import inf, nan
from pathlib import Path

from ridgeline.errors import ConfigError
from ridgeline.formats import read_speculate

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
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


def whole(least: int, most: float = inf) -> Callable[[str], int]:
    """Reads one whole number of at least `least`, at most `most`."""
    bounds = f"of at least {least}" if most == inf else f"from {least} to {most}"

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number {bounds}")
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


def names(text: str) -> tuple[str, ...]:
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


def byte_size(text: str) -> int:
    """Bytes of "4GiB", "500MB" or "1048576" (decimal units are powers of 1000)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = match and next((u for u in _UNITS if u.lower() == match[2].lower()), None)
    if not match or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 512MiB, 4GB or bytes")
    return int(float(match[1]) * _UNITS[unit])


def speculation(text: str) -> str:
    """What --speculate takes. Synthetic drafts change the answers, so they are for benchmarks."""
    try:
        asked = None if text == "auto" else read_speculate(text)
    except ConfigError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None
    if asked is not None and not asked.line.is_served:
        raise argparse.ArgumentTypeError(
            f"{asked.method} drafts are right whatever the model says: only "
            "EngineConfig takes them, to measure the engine"
        )
    return text


def ids(text: str) -> tuple[int, ...]:
    """Token ids of "1,2,3"."""
    try:
        found = tuple(int(word) for word in text.replace(",", " ").split())
    except ValueError:
        found = ()
    if not found or min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids; write 1,2,3")
    return found


def bias(text: str) -> tuple[int, float]:
    """(token id, value) of "13:-2.5"."""
    token_id, _, value = text.partition(":")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID:VALUE, such as 13:-2.5") from None


def json_schema(name: str) -> dict[str, str]:
    """The text of a file, as `structured_outputs` takes it."""
    try:
        return {"json": Path(name).read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{name}: {error}") from None
