"""Which names, words and codes has nobody seen before? Copying them cannot be learned by heart."""

from __future__ import annotations

from random import Random as Rng

from tools.worlds import words as w

SIGNS = "ABCDEFGHJKLMNPQRSTUVWXYZ0123456789"


def word(rng: Rng) -> str:
    return "".join([rng.choice(w.SYLLABLES) for _ in range(rng.choice((2, 2, 3)))])


def name(rng: Rng) -> str:
    """A first name: mostly a common one, sometimes one made of syllables."""
    return rng.choice(w.PEOPLE_NAMES) if rng.random() < 0.8 else word(rng).capitalize()


def number(rng: Rng, max_digits: int) -> str:
    return str(rng.randrange(10 ** rng.randrange(1, max_digits + 1)))


def code(rng: Rng) -> str:
    return "".join([rng.choice(SIGNS) for _ in range(rng.choice((2, 3, 4)))])
