"""Is this reply right?"""

from __future__ import annotations

import re

from ridgeline.evaluation.worlds.problem import Problem


def score(problem: Problem, reply: str) -> bool:
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
