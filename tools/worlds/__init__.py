"""Which problems with known answers are there, for training and for the test of the bundled models?

Everything is drawn from the `rng` passed in, so the same seed gives the same text everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random as Rng

from ridgeline.errors import ConfigError
from ridgeline.evaluation.problems import Message, Problem, Split
from tools.worlds.conversations import chat
from tools.worlds.fields import json_object
from tools.worlds.lists import copy, sort
from tools.worlds.passages import lookup, lookups
from tools.worlds.records import records, several_records
from tools.worlds.sums import arithmetic
from tools.worlds.telling import document as document
from tools.worlds.telling import stories

TASKS: Mapping[str, Callable[[Rng, Split], Problem]] = {
    "arithmetic": arithmetic,
    "lookup": lookup,
    "records": records,
    "copy": copy,
    "sort": sort,
    "json": json_object,
    "stories": stories,
    "chat": chat,
}


def lessons(**weights: int) -> tuple[str, ...]:
    """Task names, each as often as its weight in per cent says, to be drawn from."""
    return tuple(task for task, weight in weights.items() for _ in range(weight))


FIRST_LESSONS = lessons(arithmetic=22, lookup=24, copy=8, sort=16, json=6, stories=12, chat=12)
LATER_LESSONS = lessons(
    arithmetic=18, lookup=20, records=14, copy=6, sort=14, json=4, stories=14, chat=10
)
# For training: about one text of these more than one question is asked.
SEVERAL_QUESTIONS: Mapping[str, Callable[[Rng, Split], tuple[Message, ...]]] = {
    "lookup": lookups,
    "records": several_records,
}
SEVERAL = 0.3  # how many conversations have more than one problem
MAX_CHARACTERS = 4800  # of a conversation that goes on, so that it stays below 2,048 tokens
SYSTEM = (
    "You are Ridge, a small language model.",
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are Ridge. Be kind and brief.",
)


def problem(task: str, rng: Rng, split: Split) -> Problem:
    """One problem of `task`. Raises ConfigError for a task that there is not."""
    if task not in TASKS:
        raise ConfigError(f"there is no task {task!r}; the tasks are {', '.join(TASKS)}")
    return TASKS[task](rng, split)


def training_conversation(rng: Rng, lessons: Sequence[str] = FIRST_LESSONS) -> tuple[Message, ...]:
    """Training problems with their answers, of tasks drawn from `lessons`: mostly one, at times
    several of different tasks."""
    wanted = rng.randrange(2, 5) if rng.random() < SEVERAL else 1
    messages = [Message("system", rng.choice(SYSTEM))] if rng.random() < 0.08 else []
    used: set[str] = set()
    while wanted > 0:
        task = rng.choice(lessons)
        if task in used:
            continue
        used.add(task)
        wanted -= 1
        several = SEVERAL_QUESTIONS.get(task)
        added = list(several(rng, "train")) if several else answered(problem(task, rng, "train"))
        if num_characters(messages) + num_characters(added) <= MAX_CHARACTERS or not messages:
            messages += added
    return tuple(messages) if messages[1:] else training_conversation(rng, lessons)


def answered(made: Problem) -> list[Message]:
    return [*made.messages, Message("assistant", made.answer)]


def num_characters(messages: list[Message]) -> int:
    return sum(len(message.content) for message in messages)
