"""`ridgeline completion`: what does a shell need to complete commands, flags and choices?"""

from __future__ import annotations

import argparse
from importlib import import_module

from ridgeline.cli.parser import Parser
from ridgeline.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")
PATHS = {"FILE": "FILE", "MODEL": "FILE", "DIR": "DIRECTORY"}  # metavar -> what shtab calls it
EXAMPLES = """The script is made from the flags of this version; make it anew after an update. It
needs the package shtab, only while it is made: pip install "ridgeline[completion]"

examples:
  eval "$(ridgeline completion bash)"                       this shell; or put it into ~/.bashrc
  ridgeline completion zsh > ~/.zfunc/_ridgeline            a folder of $fpath, before compinit
  ridgeline completion fish > ~/.config/fish/completions/ridgeline.fish
"""


def add_arguments(parser: Parser) -> None:
    parser.usage = "ridgeline completion SHELL"
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    from ridgeline.cli.main import COMMANDS, build_parser

    try:
        shtab = import_module("shtab")
    except ImportError:
        raise ConfigError(
            'completion needs the package shtab: pip install "ridgeline[completion]"'
        ) from None
    parser, by_name = build_parser(*COMMANDS)
    for command in by_name.values():
        for action in command._actions:
            if what := PATHS.get(str(action.metavar)):
                vars(action)["complete"] = getattr(shtab, what)
    print(shtab.complete(parser, args.shell))
    return 0
