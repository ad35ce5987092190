"""How many of its held-out problems does a model solve, task by task?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING

from ridgeline.evaluation import worlds
from ridgeline.evaluation.intervals import wilson
from ridgeline.evaluation.questions import Answered, Question, question
from ridgeline.evaluation.rows import Row
from ridgeline.evaluation.worlds import Problem

if TYPE_CHECKING:
    from ridgeline.llm import LLM

METRICS = {"stories": "words", "chat": "accept"}
DEFAULT_METRIC = "exact_match"


def problems(task: str, num: int, seed: int) -> list[Problem]:
    """Held-out problems; those of one task are the same whichever other tasks are asked for."""
    rng = Random(f"{seed}:{task}")
    return [worlds.problem(task, rng, "test") for _ in range(num)]


def questions(
    llm: LLM, tasks: Sequence[str], num: int, seed: int
) -> tuple[list[Question], dict[str, int]]:
    """`num` questions for each task, and how many of a task were left out as too long."""
    asked: list[Question] = []
    skipped: dict[str, int] = {}
    for task in tasks:
        made = [question(llm, problem) for problem in problems(task, num, seed)]
        fitting = [one for one in made if one is not None]
        asked += fitting
        if len(fitting) < len(made):
            skipped[task] = len(made) - len(fitting)
    return asked, skipped


def by_task(answered: Sequence[Answered]) -> dict[str, list[Answered]]:
    """The answers of each task, tasks in order of appearance."""
    groups: dict[str, list[Answered]] = {}
    for one in answered:
        groups.setdefault(one.question.problem.task, []).append(one)
    return groups


def score_rows(answered: Sequence[Answered]) -> Iterator[Row]:
    """For each task the share of answers that `worlds.score` accepts, with Wilson's interval."""
    for task, group in by_task(answered).items():
        right = sum(worlds.score(one.question.problem, one.text) for one in group)
        low, high = wilson(right, len(group))
        metric = METRICS.get(task, DEFAULT_METRIC)
        yield Row(task, metric, right / len(group), len(group), low, high)
