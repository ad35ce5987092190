"""What does the word behind a flag mean? Readers for argparse that several commands share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from math import inf
from pathlib import Path

from ridgeline.errors import ConfigError

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


def check_writable(flag: str, path: Path) -> None:
    """Before minutes are spent on what would be in the file: ConfigError when it cannot be written.
    Leaves all as it was."""
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: this is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {path.parent}; make it first")
    if path.exists() and not path.is_file():
        return  # a pipe: whoever reads it would take a closed one for its end
    is_new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: cannot be written ({error.strerror}); name another file"
        ) from None
