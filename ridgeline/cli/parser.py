"""How is the command line read? One parser class that teaches, and the shape of a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, Protocol


class Parser(argparse.ArgumentParser):
    """No abbreviated flags, examples kept as they are, and short errors with the nearest flag."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        self.exit(
            2, f"{self.prog}: error: {message}{self._nearest(message)}\nTry '{self.prog} --help'.\n"
        )

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with an error for arguments that no flag of this command takes."""
        flags = [word for word in unknown if word.startswith("-") and len(word) > 1]
        words = flags or list(unknown)
        hints = [hint for word in words if (hint := self._like(word))]
        meant = f"; did you mean {' '.join(hints)}?" if hints else ""
        print(f"{self.prog}: error: unknown argument {' '.join(words)}{meant}", file=sys.stderr)
        self.exit(2, f"Try '{self.prog} --help'.\n")

    def _like(self, word: str) -> str | None:
        name = word.partition("=")[0]
        close = get_close_matches(name, self._option_string_actions, n=1, cutoff=0.6)
        return close[0] if close else None

    def _nearest(self, message: str) -> str:
        """For a misspelt command or choice: argparse quotes it first and then lists the choices."""
        _, quote, rest = message.partition("invalid choice: '")
        if not quote:
            return ""
        wrong, _, listed = rest.partition("' (choose from ")
        choices = [word.strip("'") for word in listed.rstrip(")").split(", ")]
        close = get_close_matches(wrong, choices, n=1)
        return f"; did you mean {close[0]}?" if close else ""


class Command(Protocol):
    """What each module of a command offers."""

    EXAMPLES: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the exit code. Raises RidgelineError when it cannot be done."""
        ...
