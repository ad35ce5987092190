"""How is the command line read? One parser class that teaches, and the shape of a command."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, NoReturn, Protocol

Flag = Callable[..., None]  # `option` of a group: adds a flag to it
# Where a setting whose name is an English word too is meant as a setting in a message.
NAMED = r"^|\b(?:unknown|leave out|use|add|give) "


class _HelpAll(argparse.Action):
    """Shows every flag and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        if isinstance(parser, Parser):
            parser.expert.clear()
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """No abbreviated flags, examples kept as they are, and short errors with the nearest flag.

    `expert` are the actions that --help leaves out and --help-all shows; all others are common.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)
        self.expert: set[argparse.Action] = set()
        self.sources: dict[str, str] = {}  # flag -> the file that gave it its value
        self.planned: Any = None  # what a file of `ridgeline plan --out` says of the plan
        self.flag: Flag = partial(option, self)

    def flags(self, title: str) -> Flag:
        """What adds flags to a new group of this title."""
        return partial(option, self.add_argument_group(title))

    def add_help_all(self) -> None:
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show every flag and exit")

    def mark_expert(self, *flags: str) -> None:
        """Only --help-all shows these flags, which must be there already."""
        self.expert |= {self._option_string_actions[flag] for flag in flags}

    def format_help(self) -> str:
        """As argparse has it, without the expert flags and the groups that have no others."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            shown = [action for action in group._group_actions if action not in self.expert]
            if shown:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(shown)
                formatter.end_section()
        if self.expert:
            formatter.add_text(f"{len(self.expert)} more flags: {self.prog} --help-all")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def in_flags(self, text: str) -> str:
        """A message that names settings by their fields, as whoever typed the flags must read it:
        "max_model_len is 0" becomes "--max-model-len is 0"."""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        names = {flag[2:].removeprefix("no-").replace("-", "_"): flag for flag in flags}
        plain = "|".join(name for name in names if "_" not in name)
        end = r"(?![\w/=\[-]|\.\w)"  # a file's name is none of a setting
        pattern = rf"(?P<before>{NAMED})(?P<word>{plain}){end}|(?<![\w./-])\w+_\w+{end}"

        def flag_of(match: re.Match[str]) -> str:
            word = match["word"] or match[0]
            flag = names.get(word, word)
            source = f" (in {self.sources[flag]})" if flag in self.sources else ""
            return f"{match['before'] or ''}{flag}{source}"

        return re.sub(pattern, flag_of, text)

    def settings(self, args: argparse.Namespace) -> list[tuple[str, object]]:
        """The flags that have their value from a file, with it."""
        actions = self._option_string_actions
        return [(flag, getattr(args, actions[flag].dest)) for flag in self.sources]

    def setting(self, name: str, value: object) -> str:
        """What to type for this value of a field: "--max-num-seqs 8", or a flag that is a switch
        alone."""
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            return flag if flag in self._option_string_actions else f"--no-{flag[2:]}"
        return f"{flag} {value}"

    def error(self, message: str) -> NoReturn:
        self.exit(
            2, f"{self.prog}: error: {message}{self._nearest(message)}\nTry '{self.prog} --help'.\n"
        )

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with an error for arguments that no flag of this command takes."""
        flags = [word for word in unknown if word.startswith("-") and len(word) > 1]
        words = flags or list(unknown)
        hints = [hint for word in words if (hint := self.like(word))]
        meant = f"; did you mean {' '.join(hints)}?" if hints else ""
        print(f"{self.prog}: error: unknown argument {' '.join(words)}{meant}", file=sys.stderr)
        self.exit(2, f"Try '{self.prog} --help'.\n")

    def like(self, word: str) -> str | None:
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


def option(
    group: argparse._ActionsContainer,
    spec: str,
    what: str | None = None,
    kind: Callable[[str], Any] | None = None,
    **more: Any,
) -> None:
    """A flag in a line: `spec` are its names and, unless it is a switch or has `choices`, what
    stands for its value, such as "--rate R"; `what` is its help."""
    *names, last = spec.split()
    if not last.startswith("-"):
        more["metavar"] = last
    else:
        names.append(last)
        if kind is None and not more:
            more["action"] = "store_true"
    if kind is not None:
        more["type"] = kind
    group.add_argument(*names, help=what, **more)


def add_json_flag(flag: Flag) -> None:
    flag("--json", "print JSON instead of tables")


class Command(Protocol):
    """What each module of a command offers."""

    EXAMPLES: str

    def add_arguments(self, parser: Parser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the exit code. Raises RidgelineError when it cannot be done."""
        ...


class Renamed(argparse.Action):
    """The old name of a flag, for one version more; `nargs=0` for one without a value."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, True if self.nargs == 0 else values)
        now = "--" + self.dest.removeprefix("limit_").replace("_", "-")
        print(f"ridgeline: {option} is now {now}", file=sys.stderr)
