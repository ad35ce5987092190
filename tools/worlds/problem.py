"""What is a problem, and does it belong to training or to the test?

The content of a problem decides by its hash, so that a test problem occurs in no training data,
whatever the seed of either.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import TypeVar

from ridgeline.errors import InternalError
from ridgeline.evaluation.problems import Message, Problem, Split

Item = TypeVar("Item")

TEST_EVERY = 20
MAX_DRAWS = 20_000


def asked(
    task: str,
    question: str,
    answer: str,
    words: tuple[str, ...] = (),
    accept: tuple[str, ...] = (),
) -> Problem:
    """The problem of one question without history."""
    return Problem(task, (Message("user", question),), answer, words, accept)


def split_of(content: str) -> Split:
    """Where content belongs: one part in `TEST_EVERY` is for tests."""
    number = int.from_bytes(sha256(content.encode()).digest()[:8], "big")
    return "test" if number % TEST_EVERY == 0 else "train"


def draw(make: Callable[[], Item], content: Callable[[Item], str], split: Split) -> Item:
    """The first of `make()` whose content belongs to `split`."""
    for _ in range(MAX_DRAWS):
        item = make()
        if split_of(content(item)) == split:
            return item
    raise InternalError(f"{MAX_DRAWS} draws gave no content that belongs to {split}")
