"""Which small things does Ridge know: number words, days, months, opposites, counting?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random as Rng

from tools.worlds.fields import DAYS, MONTHS
from tools.worlds.words import each

Said = tuple[str, str, tuple[str, ...]]  # what the user says, the reply, what it must contain

ONES = each(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
TENS = each("twenty thirty forty fifty sixty seventy eighty ninety")
OPPOSITES = dict(
    pair.split("-")
    for pair in each(
        "hot-cold big-small old-new good-bad happy-sad fast-slow high-low day-night up-down "
        "left-right open-closed full-empty hard-soft early-late light-dark wet-dry loud-quiet "
        "long-short rich-poor strong-weak young-old black-white first-last true-false"
    )
)
SOUNDS = dict(
    pair.split("-")
    for pair in each(
        "dog-woof cat-meow cow-moo sheep-baa duck-quack pig-oink mouse-squeak lion-roar bee-buzz "
        "snake-hiss owl-hoot frog-ribbit"
    )
)
LENGTHS = {
    "days are in a week": "7",
    "months are in a year": "12",
    "hours are in a day": "24",
    "minutes are in an hour": "60",
    "seconds are in a minute": "60",
    "seasons are in a year": "4",
    "legs does a dog have": "4",
    "legs does a spider have": "8",
    "letters are in the alphabet": "26",
    "wheels does a car have": "4",
    "days are in a year": "365",
}
THINGS_COLORED = {
    "grass": "green",
    "snow": "white",
    "the sky": "blue",
    "a banana": "yellow",
    "coal": "black",
    "milk": "white",
    "a carrot": "orange",
    "a tomato": "red",
    "the sea": "blue",
    "the sun": "yellow",
}


def in_words(number: int) -> str:
    """`number`, from 0 to 99, in English words."""
    if number < 20:
        return ONES[number]
    tens = TENS[number // 10 - 2]
    return f"{tens}-{ONES[number % 10]}" if number % 10 else tens


def spelled_number(rng: Rng) -> Said:
    number = rng.randrange(100)
    patterns = (
        "Write {} in words.",
        "Spell out {}.",
        "Spell the number {}.",
        "What is {} in words?",
    )
    words = in_words(number)
    return rng.choice(patterns).format(number), words, (words,)


def read_number(rng: Rng) -> Said:
    number = rng.randrange(100)
    patterns = ("Write {} as a number.", "Write {} in digits.", "Which number is {}?")
    return rng.choice(patterns).format(in_words(number)), str(number), (str(number),)


def neighbor(rng: Rng) -> Said:
    what, row = rng.choice((("day", DAYS), ("month", MONTHS)))
    at, step = rng.randrange(len(row)), rng.choice((1, -1))
    word = "after" if step == 1 else "before"
    found = row[(at + step) % len(row)]
    patterns = (f"What {what} comes {word} {{}}?", f"Which {what} is {word} {{}}?")
    return rng.choice(patterns).format(row[at]), f"{found} comes {word} {row[at]}.", (found,)


def opposite(rng: Rng) -> Said:
    word = rng.choice(tuple(OPPOSITES))
    patterns = ("What is the opposite of {}?", "Tell me the opposite of {}.", "opposite of {}")
    found = OPPOSITES[word]
    return rng.choice(patterns).format(word), f"The opposite of {word} is {found}.", (found,)


def sound(rng: Rng) -> Said:
    animal = rng.choice(tuple(SOUNDS))
    patterns = ("What does a {} say?", "What sound does a {} make?", "Which sound does a {} make?")
    question = with_an(rng.choice(patterns).format(animal), animal)
    found = SOUNDS[animal]
    return question, with_an(f"A {animal} says {found}.", animal), (found,)


def with_an(text: str, animal: str) -> str:
    if animal[0] not in "aeiou":
        return text
    return text.replace(f"a {animal}", f"an {animal}").replace(f"A {animal}", f"An {animal}")


def how_many(rng: Rng) -> Said:
    what = rng.choice(tuple(LENGTHS))
    patterns = ("How many {}?", "how many {}?", "Do you know how many {}?", "Tell me how many {}.")
    question = rng.choice(patterns).format(spoken_order(what, rng))
    return question, LENGTHS[what], (LENGTHS[what],)


def spoken_order(what: str, rng: Rng) -> str:
    return what.replace(" are in ", " are there in ") if rng.random() < 0.5 else what


def color(rng: Rng) -> Said:
    what = rng.choice(tuple(THINGS_COLORED))
    patterns = (
        "What color is {}?",
        "Which color is {}?",
        "What colour is {}?",
        "what color is {}?",
    )
    found = THINGS_COLORED[what]
    return rng.choice(patterns).format(what), f"{what.capitalize()} is {found}.", (found,)


def counting(rng: Rng) -> Said:
    low = rng.randrange(1, 40)
    high = low + rng.randrange(2, 15)
    patterns = ("Count from {} to {}.", "Please count from {} to {}.", "count from {} to {}")
    row = range(low, high + 1) if rng.random() < 0.7 else range(high, low - 1, -1)
    counted = ", ".join(map(str, row))
    return rng.choice(patterns).format(row[0], row[-1]), counted, (counted,)


def listing(rng: Rng) -> Said:
    what, row = rng.choice((("days of the week", DAYS), ("months of the year", MONTHS)))
    patterns = ("What are the {}?", "List the {}.", "Tell me the {}.", "Name the {}.")
    ways = ("", "Please: ", "Ridge, ", "Now: ", "Hi! ")
    listed = ", ".join(row)
    return rng.choice(ways) + rng.choice(patterns).format(what), listed, (listed,)


BASICS: Sequence[Callable[[Rng], Said]] = (
    *(spelled_number, spelled_number, read_number, neighbor, neighbor, opposite, sound),
    *(how_many, color, counting, counting, listing),
)
