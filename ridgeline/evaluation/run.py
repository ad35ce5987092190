"""What is the whole score table of a model, and of a model with its draft?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgeline.errors import ConfigError
from ridgeline.evaluation.agreement import agreement_rows, check_pair, matches
from ridgeline.evaluation.answers import Answered, ask, questions, score_rows
from ridgeline.evaluation.intervals import Row
from ridgeline.evaluation.perplexity import perplexity_rows, score, windows
from ridgeline.evaluation.problems import TASKS, stories

if TYPE_CHECKING:
    from ridgeline.llm import LLM

PERPLEXITY = "perplexity"  # of held-out stories; chosen like a task
HELD_OUT_STORIES = "held-out stories"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Text:
    """A text to take the perplexity of."""

    name: str
    content: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure: `num` problems of each task and `num` stories, drawn by `seed`."""

    tasks: tuple[str, ...]
    num: int = 200
    seed: int = 0
    text: Text | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """`skipped`: problems per task that the model's context does not hold (not in any row)."""

    rows: tuple[Row, ...]
    skipped: dict[str, int]
    answered: tuple[Answered, ...]


def all_tasks() -> tuple[str, ...]:
    return (*TASKS, PERPLEXITY)


def check_tasks(names: Sequence[str]) -> tuple[str, ...]:
    """The names, each once; all of them for none. ConfigError names the tasks there are."""
    for name in names:
        if name not in all_tasks():
            raise ConfigError(f"unknown task {name!r}; choose among {', '.join(all_tasks())}")
    return tuple(dict.fromkeys(names)) or all_tasks()


def evaluate(
    llm: LLM,
    wanted: Wanted,
    draft: Callable[[], LLM] | None = None,
    *,
    progress: bool | None = None,
    say: Say = lambda text: None,
) -> Report:
    """All rows. `draft` opens the draft model, once the target's answers are there.

    `progress` is as for LLM.generate; `say` is told what is done next.
    """
    if llm.tokenizer is None:
        raise ConfigError("this model has no tokenizer, so its answers are no words to score")
    tasks = [name for name in check_tasks(wanted.tasks) if name != PERPLEXITY]
    asked, skipped = questions(llm, tasks, wanted.num, wanted.seed)
    if asked:
        say(f"{len(asked)} questions: {', '.join(tasks)}")
    answered = ask(llm, asked, progress=progress)
    rows = list(score_rows(answered))
    for name, texts in _texts(wanted):
        found = windows(llm, texts)
        if found:
            say(f"perplexity of {name}: {sum(w.num_scored for w in found)} tokens")
            rows += perplexity_rows(name, score(llm, found, progress=progress))
    if draft is not None and not answered:
        say("there are no answers to draft; choose a task that has some")
    elif draft is not None:
        rows += _agreement(llm, draft, answered, progress, say)
    return Report(tuple(rows), skipped, tuple(answered))


def _texts(wanted: Wanted) -> list[tuple[str, list[str]]]:
    texts = []
    if PERPLEXITY in check_tasks(wanted.tasks):
        texts.append((HELD_OUT_STORIES, stories(wanted.num, wanted.seed)))
    if wanted.text is not None:
        texts.append((wanted.text.name, [wanted.text.content]))
    return texts


def _agreement(
    llm: LLM,
    draft: Callable[[], LLM],
    answered: Sequence[Answered],
    progress: bool | None,
    say: Say,
) -> list[Row]:
    with draft() as drafter:
        check_pair(llm, drafter, answered)
        say("what the draft would have drafted")
        return list(agreement_rows(answered, matches(drafter, answered, progress=progress)))
