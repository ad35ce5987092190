"""`ridgeline eval`: what does this model get right, and how well does it predict text?"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.asked import check_model
from ridgeline.cli.flags import engine_options
from ridgeline.cli.parser import Parser
from ridgeline.cli.session import add_session_flags, note, open_llm
from ridgeline.cli.tables import Column, answer, plain, table, unbroken
from ridgeline.cli.values import names, positive, whole

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from ridgeline.evaluation.answers import Answered
    from ridgeline.evaluation.intervals import Row
    from ridgeline.evaluation.run import Report, Wanted
    from ridgeline.llm import LLM

DRAFT_OPTIONS = ("device", "dtype", "load_format", "attention_backend", "threads")
EXAMPLES = """Each task asks --num of its 500 problems, which no training run has seen; --seed asks
others. Answers are greedy, by the model's chat template, or in a plain "User: ... Assistant:" form
where it has none. Problems that are too long for the model's context are left out and counted.

metrics (with 95 % intervals):
  exact_match           share of answers equal to the expected one, spaces around it aside
  words                 share of stories that hold all words asked for
  accept                share of chat replies that say what was expected
  perplexity            per token, and byte_perplexity per byte: of held-out stories (the task
                        "perplexity") and of --data, each window of the context scored alone
  draft_agreement       share of the answers' tokens that the draft of --draft drafts, each after
                        the true ones before it
  accepted_length_k4    tokens per step when the draft drafts 4 and the model adds one: 1 to 5

examples:
  ridgeline eval                                            the bundled model, all tasks
  ridgeline eval --draft demo:draft                         and how well its draft drafts
  ridgeline eval path/to/model                              all tasks
  ridgeline eval path/to/model --task arithmetic,sort --num 500
  ridgeline eval path/to/model --task stories --num 10 --show 10    read ten stories
  ridgeline eval path/to/model --task perplexity --data wiki.valid.txt.gz
  ridgeline eval path/to/model --draft path/to/draft --json
"""


def add_arguments(parser: Parser) -> None:
    flag = parser.flags("what to score")
    flag(
        "--task NAME",
        "may be repeated, or names with commas; default: all",
        names,
        default=[],
        action="append",
    )
    flag("--num N", "problems of each (default: 200)", positive, default=200)
    flag("--seed S", "chooses the problems (default: 0)", int, default=0)
    flag("--data FILE", "perplexity of this text (UTF-8, perhaps gzipped) as well")
    flag("--draft MODEL", "how many of the answers' tokens does this one draft?")
    flag(
        "--show N", "show the first N problems of each task and their answers", whole(0), default=0
    )
    flag("--json", "print JSON instead of a table")
    add_session_flags(parser, without=("seed",))


def run(args: argparse.Namespace) -> int:
    from ridgeline.evaluation.run import evaluate

    wanted = read_wanted(args)
    with open_llm(args, seed=args.seed) as llm:
        started = time.perf_counter()
        report = evaluate(
            llm,
            wanted,
            _draft(args) if args.draft else None,
            progress=False if args.quiet else None,
            say=lambda text: note(args, text),
        )
        seconds = time.perf_counter() - started
        for task, count in report.skipped.items():
            note(args, f"{task}: {count} of {args.num} left out, too long for the model's context")
        answer(args, lambda: as_json(args, llm, report, seconds), lambda: _shown(args, report))
        note(args, f"[{seconds:.1f} s]")
    return 0


def read_wanted(args: argparse.Namespace) -> Wanted:
    """What the flags ask for. ConfigError for an unknown task or an unreadable file."""
    from ridgeline.evaluation.run import Text, Wanted, check_tasks
    from ridgeline.evaluation.texts import read_text

    if args.draft is not None:
        check_model(args.draft)
    tasks = check_tasks([name for names in args.task for name in names])
    text = None
    if args.data is not None:
        path = Path(args.data).expanduser()
        text = Text(path.name, read_text(path))
    return Wanted(tasks, args.num, args.seed, text)


def _draft(args: argparse.Namespace) -> Callable[[], LLM]:
    """Opens --draft on the device and in the number format that the flags name for MODEL."""

    def load() -> LLM:
        from ridgeline.llm import LLM

        options = {k: v for k, v in engine_options(args).items() if k in DRAFT_OPTIONS}
        return LLM(args.draft, seed=args.seed, **options)

    return load


ANSWERED = """
task=question.problem.task messages=question.problem.messages expected=question.problem.answer
words=question.problem.words answer=text
"""


def as_json(args: argparse.Namespace, llm: LLM, report: Report, seconds: float) -> dict[str, Any]:
    """The report as plain JSON values."""
    record = {
        **plain(llm.resolved, "model=model_name dtype device"),
        **plain(args, "draft num seed"),
        **plain(report, "skipped rows"),
        "seconds": seconds,
    }
    if args.show:
        record["answers"] = [plain(one, ANSWERED) for one in shown(report, args.show)]
    return record


def shown(report: Report, count: int) -> list[Answered]:
    """The first `count` answers of each task."""
    from ridgeline.evaluation.answers import by_task

    return [one for group in by_task(report.answered).values() for one in group[:count]]


def _shown(args: argparse.Namespace, report: Report) -> Iterator[Table | Text | str]:
    from rich import box

    for one in shown(report, args.show) if args.show else []:
        problem = one.question.problem
        yield f"--- {problem.task}"
        for message in problem.messages:
            yield unbroken(f"{message.role}: {message.content}")
        yield unbroken(f"assistant: {one.text.strip()}\n")
    yield table(report.rows, COLUMNS, box=box.SIMPLE)


def number(value: float) -> str:
    """Four digits after the point for shares; large perplexities without."""
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"


def interval(row: Row) -> str:
    if row.low is None or row.high is None:
        return "unknown"
    return f"{number(row.low)} - {number(row.high)}"


COLUMNS = (
    Column("task", "task"),
    Column("metric", "metric"),
    Column("value", "value", number, right=True),
    Column("95 % interval", interval, right=True),
    Column("n", "n", right=True),
)
