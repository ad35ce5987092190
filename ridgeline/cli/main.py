"""Which command did the person ask for, and how does it end? Parsing, dispatch and exit codes."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from ridgeline import __version__
from ridgeline.cli.parser import Command, Parser
from ridgeline.errors import ConfigError, DoesNotFit, RidgelineError

# Each is a module of ridgeline.cli, which is loaded when it is asked for.
COMMANDS = {
    "generate": "answer prompts and print the text",
    "chat": "talk to the model in the terminal",
    "serve": "serve the model over HTTP with OpenAI's API",
    "worker": "share a model with a server that runs elsewhere, as one of its ranks",
    "route": "one address for several servers: each request goes where it is answered soonest",
    "pull": "download a model from the hub, checked and resumed, and say where it lies",
    "inspect": "show what a model is made of and what memory it needs",
    "bench": "measure speed, and compare it with what the memory allows",
    "calibrate": "measure this machine, so that predictions are about it, not about a data sheet",
    "eval": "score a model on held-out problems, with intervals",
    "quantize": "make a model smaller, and say what that costs in quality",
    "predict": "say how fast a model would be on a machine, what it takes and what binds it",
    "profile": "the kernels of a step beside their prices, and a Chrome trace",
    "plan": "find the cheapest machines and settings that keep a promise to this traffic",
    "simulate": "run a workload through the real scheduler on a simulated machine",
    "explain": "say where the time of a server or of a finished run went, and what would help most",
    "lab": "see in the browser how inference works, on pages that this machine computes",
    "completion": "print what a shell needs to complete commands, flags and choices",
}

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
WAY_OUT = "make room there, or write elsewhere"
INSTALL = "install Ridgeline with its libraries into this environment (docs/install.md)"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

EXAMPLES = """examples:
  ridgeline chat                                            talk to the model that is bundled
  ridgeline generate path/to/model -p "Once upon a time"    one answer, streamed
  ridgeline chat user/model                                 talk to it in the terminal
  ridgeline serve path/to/model --port 8000                 an OpenAI-compatible server
  ridgeline serve path/to/model --speculate ngram           draft tokens, verify several at once
  ridgeline inspect path/to/model --context 8192 --batch 16 what would it need? (no weights needed)
  ridgeline bench path/to/model                             how fast is it here, and why?
  ridgeline eval path/to/model                              what does it get right?
  ridgeline explain --url http://127.0.0.1:8000        where does the time go, what would help?
  ridgeline predict qwen3-32b --device h100-sxm       how fast would it be there? (no weights)
  ridgeline plan llama-3.1-8b --rate 10 --input 500 --output 200 --ttft 1s --tpot 50ms
  ridgeline simulate path/to/model --device h100-sxm --rate 8    what would users see there?

MODEL is a folder with config.json and *.safetensors, a hub id such as user/name or
user/name@revision, or a small model that comes with the package: demo:chat (the one that is used
when MODEL is left out), demo:draft or demo:moe. Where no weights are needed (inspect, predict,
plan, simulate) it may be the name of a public model, which "ridgeline inspect --list" shows.
"ridgeline COMMAND --help" explains each command, "ridgeline COMMAND --help-all" shows all of its
flags.
"""


def load_command(name: str) -> Command:
    """One of COMMANDS."""
    command: Command = import_module(f"ridgeline.cli.{name}")
    return command


def build_parser(*chosen: str) -> tuple[Parser, dict[str, Parser]]:
    """The command line, and the parser of each command by name; only the `chosen` ones have their
    flags."""
    parser = Parser(
        prog="ridgeline",
        description="Run large language models: offline, in a chat or as a server.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"ridgeline {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    by_name = {name: _add(commands, name, name in chosen) for name in COMMANDS}
    return parser, by_name


def _add(commands: argparse._SubParsersAction[Parser], name: str, is_chosen: bool) -> Parser:
    summary = COMMANDS[name]
    sub: Parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        usage=f"ridgeline {name} [MODEL] [options]",
    )
    if is_chosen:
        command = load_command(name)
        sub.epilog = command.EXAMPLES
        sub.add_help_all()
        command.add_arguments(sub)
    return sub


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line. An unknown flag ends the program with the nearest known one, no
    words at all with the help: whoever types a bare name asks what it is."""
    words = sys.argv[1:] if argv is None else argv
    chosen = next((word for word in words if not word.startswith("-")), "")
    parser, by_name = build_parser(chosen)
    if not words:
        parser.print_help()
        parser.exit()
    said: dict[str, object] = {}
    files = ("--config", "--plan")
    if chosen in by_name and any(word.partition("=")[0] in files for word in words):
        from ridgeline.cli.config_file import keep_typed, use_file

        try:
            said = use_file(by_name[chosen], words)
        except ConfigError as problem:
            by_name[chosen].error(str(problem))
    args, unknown = parser.parse_known_args(words)
    if unknown:
        by_name[args.command].refuse(unknown)
    args.parser = by_name[args.command]
    if said:
        keep_typed(args, said, args.parser)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, or 2 for an error that was explained in one line."""
    _fill_closed_streams()
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "ridgeline":
            raise
        _say_error(f"a library cannot be loaded: {error}; {INSTALL}")
        return EXIT_ERROR
    except BrokenPipeError:
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _drop_output()
        what = error.filename or "the output"
        with suppress(OSError):  # standard error may be on the same disk
            _say_error(f"{what} cannot be written: {error.strerror}; {WAY_OUT}")
        return EXIT_ERROR


def _fill_closed_streams() -> None:
    """What was closed (`>&-`) is the null device, so that no other file gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = parse(argv)
    except SystemExit:
        sys.stdout.flush()  # help that cannot be written ends like any other answer
        raise
    command = load_command(args.command)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = command.run(args)
    except RidgelineError as error:
        say_why(error, args.parser)
        return EXIT_ERROR
    sys.stdout.flush()
    return code


def _drop_output() -> None:
    """Stop Python from failing again when it flushes standard output at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say_why(error: RidgelineError, parser: Parser) -> None:
    """One line on standard error, and for a lack of memory the table and the ways out, in the words
    of the command's flags."""
    _say_error(parser.in_flags(str(error)))
    if isinstance(error, DoesNotFit):
        for what, size in error.items:
            print(f"  {what:<16} {size / 1e9:9.3f} GB {size / 2**30:9.3f} GiB", file=sys.stderr)
        for change, settings in zip(error.changes, error.settings, strict=True):
            flags = (parser.setting(name, value) for name, value in settings.items())
            print(f"  would help: {' '.join(flags) or change}", file=sys.stderr)


def _say_error(text: str) -> None:
    print(f"ridgeline: error: {text}", file=sys.stderr)


def console() -> None:
    """Entry point of the installed `ridgeline` program."""
    sys.exit(main())


if __name__ == "__main__":
    console()
