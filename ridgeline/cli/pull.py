"""`ridgeline pull`: bring a model from the hub to this machine, and say where it lies."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from ridgeline import demo
from ridgeline.cli.parser import Parser
from ridgeline.cli.session import Report, bars, note
from ridgeline.cli.tables import plain
from ridgeline.errors import ConfigError
from ridgeline.figures import scaled

if TYPE_CHECKING:
    from ridgeline.loader.hub import Pulled

STEP = 10  # percent between two lines where there is no terminal
MOST_NAMED = 6  # files that were left out
EXAMPLES = """Weights in safetensors, the config and the tokenizer's files come into the hub's usual
cache, where other programs find them too; pickles and code stay where they are. An interrupted
transfer goes on where it stopped when the same command runs again. Each file's hash is checked.
The folder is printed on standard output, all else on standard error.

environment: HF_HOME or HF_HUB_CACHE (where the cache lies), HF_TOKEN (of a model with restricted
access), HF_ENDPOINT (another hub), HF_HUB_OFFLINE=1 (look in the cache alone).

examples:
  ridgeline pull user/model
  ridgeline pull user/model@v1.0                      a branch, tag or commit
  ridgeline serve "$(ridgeline pull -q user/model)"
"""


@dataclass(slots=True)
class _Reached:
    done: int = 0
    total: int = 0


def add_arguments(parser: Parser) -> None:
    parser.usage = "ridgeline pull MODEL [options]"
    parser.add_argument("model", metavar="MODEL", help="a hub id, user/name[@revision]")
    parser.flag("--json", "print the result as JSON")
    parser.flag("-q --quiet", "say nothing but the folder")


def run(args: argparse.Namespace) -> int:
    from ridgeline import log
    from ridgeline.loader.hub import pull

    log.set_up("ERROR" if args.quiet else "WARNING")
    if args.model.startswith(demo.PREFIX):
        raise ConfigError(f"{args.model} comes with the package; there is nothing to pull")
    reached, start = _Reached(), monotonic()
    try:
        with _progress(args, reached) as report:
            pulled = pull(args.model, report)
    except KeyboardInterrupt:
        if reached.total:
            note(args, f"interrupted at {_of(reached)}; the same command goes on from there")
        raise
    if args.json:
        print(json.dumps(as_json(pulled), indent=2))
        return 0
    _say(args, pulled, monotonic() - start)
    print(pulled.model.path)
    return 0


PULLED = """
model=model.name revision=model.revision fetched_bytes=num_fetched resumed_bytes=num_resumed files
left_out
"""


def as_json(pulled: Pulled) -> dict[str, object]:
    sizes = {"path": str(pulled.model.path), "num_bytes": sum(pulled.files.values())}
    return {**plain(pulled, PULLED), **sizes}


def _say(args: argparse.Namespace, pulled: Pulled, elapsed_s: float) -> None:
    if pulled.num_fetched or pulled.num_resumed:
        how = f"{scaled(pulled.num_fetched, 'B')} fetched in {elapsed_s:.1f} s, hashes are right"
        if pulled.num_resumed:
            how += f"; {scaled(pulled.num_resumed, 'B')} were here from before"
    else:
        how = "all of it was here already, nothing was fetched"
    note(
        args, f"{pulled.model.name}, commit {pulled.model.revision}: {_files(pulled.files)}; {how}"
    )
    if pulled.left_out:
        names = sorted(pulled.left_out)
        more = ", ..." if len(names) > MOST_NAMED else ""
        named = ", ".join(names[:MOST_NAMED]) + more
        note(args, f"left out: {_files(pulled.left_out)} ({named})")


def _files(sizes: Mapping[str, int]) -> str:
    return f"{len(sizes)} file{'s' * (len(sizes) != 1)}, {scaled(sum(sizes.values()), 'B')}"


def _of(reached: _Reached) -> str:
    return f"{scaled(reached.done, 'B')} of {scaled(reached.total, 'B')}"


@contextmanager
def _progress(args: argparse.Namespace, reached: _Reached) -> Iterator[Report]:
    """A bar with amounts, speed and time on a terminal, else a line for each tenth."""
    if args.quiet or not sys.stderr.isatty():
        said = [0]

        def tell(stage: str, done: int, total: int) -> None:
            reached.done, reached.total = done, total
            percent = 100 * done // max(1, total) // STEP * STEP
            if percent > said[0] and (done < total or said[0]):  # all was here: nothing to tell
                said[0] = percent
                note(args, f"{percent} %, {_of(reached)}")

        yield tell
        return
    with bars("DownloadColumn", "TransferSpeedColumn", "TimeRemainingColumn") as report:

        def show(stage: str, done: int, total: int) -> None:
            reached.done, reached.total = done, total
            report(args.model, done, total)

        yield show
