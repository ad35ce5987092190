"""Which problems with known answers are asked, which texts show and test, and is a reply right?

They are data: lines of JSON in `data/`, drawn once by `tools/make_problems.py` from small grammars
that also made the lessons of the bundled models. No problem or story of the test split occurs in
any lesson.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal

import msgspec

from ridgeline.errors import ConfigError

Split = Literal["train", "test"]
Role = Literal["system", "user", "assistant"]

TASKS: Mapping[str, str] = {  # task -> its metric
    "arithmetic": "exact_match",
    "lookup": "exact_match",
    "records": "exact_match",
    "copy": "exact_match",
    "sort": "exact_match",
    "json": "exact_match",
    "stories": "words",
    "chat": "accept",
}
STORY = "story"  # the task of a text that nobody asked for
DATA = Path(__file__).parent / "data"
PROBLEMS_FILE = "problems.jsonl.gz"
TEXT_FILES: Mapping[Split, str] = {"train": "calibration.jsonl.gz", "test": "held_out.jsonl.gz"}


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A conversation whose last message is the user's, and what should be said next; without
    messages a text.

    `words` are those that a story has to contain. `accept`, where given, are the words or phrases
    of which one must occur in the reply; otherwise the reply must be `answer` itself.
    """

    task: str
    messages: tuple[Message, ...]
    answer: str
    words: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()


@cache
def read_problems(file: str) -> tuple[Problem, ...]:
    """The lines of a file in `data/`."""
    lines = gzip.decompress((DATA / file).read_bytes()).splitlines()
    decoder = msgspec.json.Decoder(Problem)
    return tuple(map(decoder.decode, lines))


def problems(task: str, num: int, seed: int) -> list[Problem]:
    """Held-out problems; those of one task are the same whichever other tasks are asked for.

    Seed 0 takes the first `num` of the file; any other seed first brings them into another order.
    """
    if task not in (*TASKS, STORY):
        raise ConfigError(f"there is no task {task!r}; the tasks are {', '.join(TASKS)}")
    found = [one for one in read_problems(PROBLEMS_FILE) if one.task == task]
    if num > len(found):
        raise ConfigError(
            f"{num} problems of a task are too many; there are {len(found)}, so ask for that many"
        )
    if seed != 0:
        Random(f"{seed}:{task}").shuffle(found)
    return found[:num]


def stories(num: int, seed: int) -> list[str]:
    """Held-out stories that nobody asked for."""
    return [one.answer for one in problems(STORY, num, seed)]


def texts(split: Split) -> tuple[Problem, ...]:
    """Stories and conversations in the order in which they are read: for the calibration of a
    quantized model, or held out to test it."""
    return read_problems(TEXT_FILES[split])


def is_right(problem: Problem, reply: str) -> bool:
    """Whether `reply` solves `problem`.

    A story has to contain all words asked for, as words of their own. A chat problem with
    `accept` has to contain one of those, in any case. All else has to be the answer itself,
    apart from white space around it.
    """
    if problem.task == "stories":
        return bool(reply.strip()) and all(contains(reply, word) for word in problem.words)
    if problem.accept:
        return any(contains(reply, phrase) for phrase in problem.accept)
    return reply.strip() == problem.answer.strip()


def contains(text: str, phrase: str) -> bool:
    """Whether `phrase` occurs in `text` between word borders, in any case."""
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE) is not None
