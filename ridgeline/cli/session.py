"""How does a command get its engine, and what does it tell the person while that starts?

Standard output belongs to the answer; everything said here goes to standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from ridgeline.asked import check_asked
from ridgeline.cli.flags import add_engine_flags, engine_options
from ridgeline.cli.parser import Parser
from ridgeline.config import EngineConfig
from ridgeline.devices import wake_driver
from ridgeline.figures import count
from ridgeline.imports import import_engine
from ridgeline.startup import StartUp, keep_what_is_there, say_phases, total_s

if TYPE_CHECKING:
    from rich.console import Console

    from ridgeline.llm import LLM

import signal
import threading
from collections.abc import Generator
from types import FrameType, TracebackType
from typing import TypeVar

T = TypeVar("T")
Report = Callable[[str, int, int], None]  # a stage, how much of it is done, of how much

CLEAR_LINE = "\033[K"
PIPE_WIDTH = 110  # characters


def add_session_flags(parser: Parser, without: tuple[str, ...] = ()) -> None:
    """MODEL, the engine's flags, and how much to say."""
    add_engine_flags(parser, without)
    parser.flag("-q --quiet", "say nothing but the answer")
    parser.flag("-v --verbose", "show each start-up decision and the memory")


def note(args: argparse.Namespace, text: str) -> None:
    """A line for the person, unless --quiet."""
    if not args.quiet:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def open_llm(args: argparse.Namespace, **more: Any) -> Iterator[LLM]:
    """The engine for MODEL, started as the flags say; `more` overrides them."""
    from ridgeline import log

    log.set_up("INFO" if args.verbose else "ERROR" if args.quiet else "WARNING")
    # Who asks for one answer would wait longer for it.
    options = {"warm_up": "off"} | engine_options(args) | more
    check_asked(EngineConfig(model=args.model, **options))
    startup = StartUp()
    with _progress(args) as progress:
        if "torch" not in sys.modules:  # a fresh process: nothing came before that is not ours
            startup = StartUp.of_process("Python")
            wake_driver(str(options.get("device", "auto")))
            import_engine(startup, "ridgeline.llm")
        from ridgeline.llm import LLM

        llm = LLM(args.model, progress=progress, startup=startup, **options)
    keep_what_is_there()
    with llm:
        note(args, _start_line(llm))
        say_phases(llm.built.startup)
        if args.verbose:
            _show_decisions(llm)
        yield llm


def _start_line(llm: LLM) -> str:
    from ridgeline.architectures.counts import num_parameters

    asked = llm.resolved
    tokens = asked.dp * asked.num_blocks * asked.block_size
    weights = "random weights, " if asked.load_format == "random" else ""
    return (
        f"{asked.model_name}: {llm.spec.family}, {count(num_parameters(llm.spec))} parameters, "
        f"{weights}{asked.dtype} on {asked.device}, cache for {tokens} tokens, "
        f"ready in {total_s(llm.built.startup):.1f} s"
    )


def console() -> Console:
    """Where bars and notes for the person go: standard error."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def paper() -> Console:
    """Where tables that are the answer go: standard output, of a fixed width in a file or pipe."""
    from rich.console import Console

    class Paper(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the program itself, with a code of its own

    out = Paper(highlight=False, emoji=False, markup=False)
    if not out.is_terminal:
        out = Paper(highlight=False, emoji=False, markup=False, width=PIPE_WIDTH)
    return out


@contextmanager
def _progress(args: argparse.Namespace) -> Iterator[Any]:
    """A callback (stage, done, of how many) that draws a bar, and a line before there is one; on a
    terminal only. The cursor stays at the line's start, so that whatever comes writes over it."""
    if args.quiet or not sys.stderr.isatty():
        yield None
        return
    print(f"loading {args.model} ...\r", end="", file=sys.stderr, flush=True)
    drawn: list[Report] = []
    with ExitStack() as stack:
        stack.callback(print, CLEAR_LINE, end="", file=sys.stderr, flush=True)

        def report(stage: str, done: int, total: int) -> None:
            if not drawn:
                print(CLEAR_LINE, end="", file=sys.stderr, flush=True)
                drawn.append(stack.enter_context(bars("TimeRemainingColumn")))
            drawn[0](stage, done, total)

        yield report


@contextmanager
def bars(
    *columns: str, text: str = "{task.description}", transient: bool = True
) -> Iterator[Report]:
    """A bar for each stage, with these columns of rich behind it."""
    from rich import progress

    before = progress.TextColumn(text, markup=False), progress.BarColumn()
    behind = (getattr(progress, name)() for name in columns)
    with progress.Progress(*before, *behind, console=console(), transient=transient) as shown:
        tasks: dict[str, progress.TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage, total=total)
            shown.update(tasks[stage], completed=done, total=total)

        yield report


def _show_decisions(llm: LLM) -> None:
    from ridgeline.cli.tables import Column, places, table

    decided = (
        *(Column("what", "field"), Column("asked", "asked")),
        *(Column("got", "got"), Column("because", "because")),
    )
    memory = (
        Column("memory", "what"),
        Column("GB", lambda line: line.predicted / 1e9, places(3)),
        Column("GiB", lambda line: line.predicted / 2**30, places(3)),
        Column("measured GB", lambda line: line.measured and line.measured / 1e9, places(3)),
    )
    start = (Column("start-up", "name"), Column("s", "seconds", ".2f"), Column("", "detail"))
    out = console()
    out.print(table(llm.resolved.decisions, decided, "decided at start"))
    out.print(table(llm.memory, memory, "where the memory goes"))
    out.print(table(llm.built.startup, start, "where the time went"))


@contextmanager
def stage(args: argparse.Namespace, text: str) -> Iterator[None]:
    """Show what is being done while it is done, on a terminal only."""
    if args.quiet or not sys.stderr.isatty():
        yield
        return
    with console().status(text):
        yield


class CtrlC:
    """While this is open, the first Ctrl-C only sets `pressed`; a second one interrupts at once."""

    def __init__(self) -> None:
        self.pressed = False
        self._before: signal._HANDLER = None

    def __enter__(self) -> CtrlC:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def watch(self, pieces: Iterator[T]) -> Iterator[T]:
        """`pieces` until Ctrl-C is pressed; then, or when the reader stops, `pieces` is closed.
        What was being made when it was pressed is left out: the terminal shows a ^C already."""
        try:
            for piece in pieces:
                if self.pressed:
                    return
                yield piece
                if self.pressed:
                    return
        finally:
            if isinstance(pieces, Generator):
                pieces.close()

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
