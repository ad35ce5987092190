"""Which command did the person ask for, and how does it end? Parsing, dispatch and exit codes."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from ridgeline import __version__
from ridgeline.cli import (
    bench,
    calibrate,
    chat,
    eval,
    explain,
    generate,
    inspect,
    plan,
    predict,
    profile,
    serve,
    simulate,
)
from ridgeline.cli.parser import Command, Parser
from ridgeline.errors import DoesNotFit, RidgelineError

COMMANDS: tuple[Command, ...] = (
    generate,
    chat,
    serve,
    inspect,
    bench,
    calibrate,
    eval,
    predict,
    profile,
    plan,
    simulate,
    explain,
)

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

EXAMPLES = """examples:
  ridgeline chat                                            talk to the model that is bundled
  ridgeline generate path/to/model -p "Once upon a time"    one answer, streamed
  ridgeline chat user/model                                 talk to it in the terminal
  ridgeline serve path/to/model --port 8000                 an OpenAI-compatible server
  ridgeline inspect path/to/model --context 8192 --batch 16 what would it need? (no weights needed)
  ridgeline bench path/to/model                             how fast is it here, and why?
  ridgeline eval path/to/model                              what does it get right?
  ridgeline explain --url http://127.0.0.1:8000        where does the time go, what would help?
  ridgeline predict path/to/model --device h100-sxm   how fast would it be there? (no weights)
  ridgeline plan path/to/model --rate 10 --input 500 --output 200 --ttft 1s --tpot 50ms
  ridgeline simulate path/to/model --device h100-sxm --rate 8    what would users see there?

MODEL is a folder with config.json and *.safetensors, a hub id such as user/name or
user/name@revision, or a small model that comes with the package: demo:chat (the one that is used
when MODEL is left out), demo:draft or demo:moe. "ridgeline COMMAND --help" explains each command.
"""


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The whole command line, and the parser of each command by name."""
    parser = Parser(
        prog="ridgeline",
        description="Run large language models: offline, in a chat or as a server.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"ridgeline {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    by_name: dict[str, Parser] = {}
    for command in COMMANDS:
        sub = commands.add_parser(
            command.NAME,
            help=command.SUMMARY,
            description=command.SUMMARY[0].upper() + command.SUMMARY[1:] + ".",
            epilog=command.EXAMPLES,
            usage=f"ridgeline {command.NAME} [MODEL] [options]",
        )
        command.add_arguments(sub)
        by_name[command.NAME] = sub
    return parser, by_name


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line. An unknown flag ends the program with the nearest known one."""
    parser, by_name = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        by_name[args.command].refuse(unknown)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, or 2 for an error that was explained in one line."""
    args = parse(argv)
    command = next(command for command in COMMANDS if args.command == command.NAME)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = command.run(args)
        sys.stdout.flush()
        return code
    except RidgelineError as error:
        say_why(error)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; stop Python from failing again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def say_why(error: RidgelineError) -> None:
    """One line on standard error, and for a lack of memory the table and the ways out."""
    print(f"ridgeline: error: {error}", file=sys.stderr)
    if isinstance(error, DoesNotFit):
        for what, size in error.items:
            print(f"  {what:<16} {size / 1e9:9.3f} GB {size / 2**30:9.3f} GiB", file=sys.stderr)
        for change, settings in zip(error.changes, error.settings, strict=True):
            flags = (f"--{name.replace('_', '-')} {value}" for name, value in settings.items())
            print(f"  would help: {' '.join(flags) or change}", file=sys.stderr)


def console() -> None:
    """Entry point of the installed `ridgeline` program."""
    sys.exit(main())


if __name__ == "__main__":
    console()
