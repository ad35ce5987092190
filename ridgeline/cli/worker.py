"""`ridgeline worker`: how does another machine, or another process of this one, share a model?"""

from __future__ import annotations

import argparse

from ridgeline import log
from ridgeline.asked import read_address
from ridgeline.cli.parser import Parser

EXAMPLES = """One process for each rank but the first, which is the command that serves. All of them
need the same version of Ridgeline, the same model, and the same secret in RIDGELINE_RANK_SECRET (or
in a file of mode 0600 that RIDGELINE_RANK_SECRET_FILE names). It does not matter who starts first
within ten minutes. It ends when the driver does.

examples, on two machines with one GPU each:
  export RIDGELINE_RANK_SECRET=$(openssl rand -hex 32)      once, then the same everywhere
  ridgeline serve path/to/model --tp 2 --launcher join --join-address 192.0.2.7:7070
  ridgeline worker --join 192.0.2.7:7070
"""


def add_arguments(parser: Parser) -> None:
    parser.usage = "ridgeline worker --join HOST:PORT [options]"
    parser.add_argument(
        "--join", metavar="HOST:PORT", required=True, help="where the driver waits (--join-address)"
    )
    parser.add_argument(
        "--rank",
        type=int,
        metavar="N",
        help="which one this is, from 1; when not given, the first that is free",
    )


def run(args: argparse.Namespace) -> int:
    from ridgeline.worker import join

    log.set_up("INFO")
    return join(*read_address(args.join), args.rank)
