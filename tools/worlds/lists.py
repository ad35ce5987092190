"""What does this list say, and what is its order?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random as Rng

from ridgeline.evaluation.problems import Problem, Split
from tools.worlds import inventing
from tools.worlds import words as w
from tools.worlds.problem import asked, draw

COPY = (
    "Copy this list: {items}",
    "copy this list: {items}",
    "Repeat exactly: {items}",
    "Repeat this list: {items}",
    "Please repeat this list exactly: {items}",
    "Copy: {items}",
    "Copy this list.\n{items}",
    "Write this list again: {items}",
)
SEPARATORS = (", ", ", ", ", ", " ", "; ", "\n")
ITEMS: tuple[Callable[[Rng], str], ...] = (
    lambda rng: rng.choice(w.PLAIN),
    lambda rng: rng.choice(w.PEOPLE_NAMES),
    lambda rng: inventing.word(rng),
    lambda rng: inventing.number(rng, 4),
    lambda rng: inventing.code(rng),
    lambda rng: rng.choice(ITEMS[:5])(rng),
)

SORT_WORDS = (
    "Sort these words alphabetically: {items}",
    "sort alphabetically: {items}",
    "Sort the words from A to Z: {items}",
    "Put these words in alphabetical order: {items}",
    "Put in alphabetical order: {items}",
    "Sort these words: {items}",
    "Please sort this list alphabetically: {items}",
)
SORT_UP = (
    "Sort these numbers: {items}",
    "Sort these numbers in ascending order: {items}",
    "sort ascending: {items}",
    "Sort from smallest to largest: {items}",
    "Put these numbers in ascending order: {items}",
    "Please sort this list from small to large: {items}",
)
SORT_DOWN = (
    "Sort these numbers in descending order: {items}",
    "sort descending: {items}",
    "Sort from largest to smallest: {items}",
    "Put these numbers in descending order: {items}",
    "Please sort this list from large to small: {items}",
)


def copy(rng: Rng, split: Split) -> Problem:
    """A list of 3 to 20 words, names, numbers or codes, to be said again as it is."""
    items = draw(lambda: drawn_items(rng), lambda drawn: content("copy", drawn), split)
    text = rng.choice(SEPARATORS).join(items)
    return asked("copy", rng.choice(COPY).format(items=text), text)


def drawn_items(rng: Rng) -> list[str]:
    make = rng.choice(ITEMS)
    return [make(rng) for _ in range(rng.randrange(3, 21))]


def content(task: str, items: Sequence[str]) -> str:
    return " ".join((task, *items))


def sort(rng: Rng, split: Split) -> Problem:
    """3 to 10 different words, or numbers of up to 3 digits; the answer keeps the separator."""
    return sort_words(rng, split) if rng.random() < 0.5 else sort_numbers(rng, split)


def sort_words(rng: Rng, split: Split) -> Problem:
    pool = w.PEOPLE_NAMES if rng.random() < 0.15 else w.PLAIN
    words = draw(lambda: rng.sample(pool, rng.randrange(3, 11)), sorted_content, split)
    return sorting(rng, SORT_WORDS, words, sorted(words))


def sort_numbers(rng: Rng, split: Split) -> Problem:
    numbers = draw(lambda: drawn_numbers(rng), sorted_content, split)
    up = sorted(numbers, key=int)
    if rng.random() < 0.5:
        return sorting(rng, SORT_UP, numbers, up)
    return sorting(rng, SORT_DOWN, numbers, up[::-1])


def drawn_numbers(rng: Rng) -> list[str]:
    count = rng.randrange(3, 11)
    found: list[str] = []
    while len(found) < count:
        number = inventing.number(rng, 3)
        if number not in found:
            found.append(number)
    return found


def sorted_content(items: Sequence[str]) -> str:
    """One content for all orders of a set."""
    return content("sort", sorted(items))


def sorting(
    rng: Rng, requests: Sequence[str], items: Sequence[str], answer: Sequence[str]
) -> Problem:
    separator = rng.choice((", ", ", ", ", ", " "))
    question = rng.choice(requests).format(items=separator.join(items))
    return asked("sort", question, separator.join(answer))
