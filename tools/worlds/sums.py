"""How much is a plus b, or a minus b?"""

from __future__ import annotations

from random import Random as Rng

from ridgeline.evaluation.problems import Problem, Split
from tools.worlds.problem import asked, draw

TENS = (0, 10, 100, 1000, 10000)
SUMS = (
    "What is {a} + {b}?",
    "what is {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} + {b} =",
    "{a} + {b}",
    "{a}+{b}",
    "Add {a} and {b}.",
    "add {a} and {b}",
    "Compute {a} + {b}.",
    "How much is {a} + {b}?",
)
DIFFERENCES = (
    "What is {a} - {b}?",
    "what is {a} - {b}?",
    "What is {a} minus {b}?",
    "{a} - {b} =",
    "{a} - {b}",
    "{a}-{b}",
    "Subtract {b} from {a}.",
    "subtract {b} from {a}",
    "Compute {a} - {b}.",
    "How much is {a} - {b}?",
)


def arithmetic(rng: Rng, split: Split) -> Problem:
    """An addition or subtraction of numbers with 1 to 4 digits; the answer is digits alone."""
    a, b = draw(lambda: (operand(rng), operand(rng)), content, split)
    if rng.random() < 0.5:
        return asked("arithmetic", rng.choice(SUMS).format(a=a, b=b), str(a + b))
    return asked("arithmetic", rng.choice(DIFFERENCES).format(a=a, b=b), str(a - b))


def operand(rng: Rng) -> int:
    digits = rng.randrange(4)
    return rng.randrange(TENS[digits], TENS[digits + 1])


def content(pair: tuple[int, int]) -> str:
    """One content for both orders and both operations."""
    return f"arithmetic {min(pair)} {max(pair)}"
