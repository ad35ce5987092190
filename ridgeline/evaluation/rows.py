"""What is one line of the score table?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """`value` with its 95 % interval over `n` trials (answers, tokens, bytes or steps, as the
    metric says); `low` and `high` are None where one unit alone says nothing about the error."""

    task: str
    metric: str
    value: float
    n: int
    low: float | None
    high: float | None
