"""How is a problem put to a model, what comes back, and how much of it is right?

Greedy, all problems in one batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgeline.errors import EngineFault
from ridgeline.evaluation.intervals import Row, wilson
from ridgeline.evaluation.problems import TASKS, Message, Problem, is_right, problems
from ridgeline.request import SamplingParams

if TYPE_CHECKING:
    from ridgeline.llm import LLM

SLACK_TOKENS = 32  # an answer may be that much longer than twice the one expected
TITLES = {"system": "System", "user": "User", "assistant": "Assistant"}
NEXT_TURN = "\nUser:"


@dataclass(frozen=True, slots=True)
class Question:
    """A problem as this model's prompt."""

    problem: Problem
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Answered:
    """`token_ids` end with the model's end token where that is known to have ended the answer."""

    question: Question
    text: str
    token_ids: tuple[int, ...]


def question(llm: LLM, problem: Problem) -> Question | None:
    """The problem by the model's chat template, or in a plain form without one.

    None when prompt and expected answer exceed the model's context.
    """
    if llm.has_chat_template:
        ids = llm.encode_chat([{"role": m.role, "content": m.content} for m in problem.messages])
    else:
        ids = llm.encode(plain_prompt(problem.messages))
    expected = len(llm.encode(problem.answer))
    room = llm.resolved.max_model_len - len(ids)
    if expected > room:
        return None
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=min(room, 2 * expected + SLACK_TOKENS),
        stop=() if llm.has_chat_template else plain_stops(problem.answer),
    )
    return Question(problem, tuple(ids), sampling)


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


def plain_prompt(messages: Iterable[Message]) -> str:
    """A dialogue as text, for models that know no chat."""
    turns = [f"{TITLES.get(m.role, m.role)}: {m.content}" for m in messages]
    return "\n".join([*turns, f"{TITLES['assistant']}:"])


def plain_stops(answer: str) -> tuple[str, ...]:
    """What ends an answer in the plain form: the next turn, or the line's end if one is enough."""
    return (NEXT_TURN,) if "\n" in answer else ("\n",)


def ask(llm: LLM, questions: Sequence[Question], *, progress: bool | None) -> list[Answered]:
    """The model's greedy answers, in order. EngineFault when one of them failed."""
    if not questions:
        return []
    results = llm.generate(
        [q.prompt_token_ids for q in questions], [q.sampling for q in questions], progress=progress
    )
    answered = []
    for asked, result in zip(questions, results, strict=True):
        if result.error is not None:
            raise EngineFault(result.error)
        choice = result.outputs[0]
        ended = choice.finish_reason == "stop" and choice.stop_reason is None
        token_ids = choice.token_ids + (_end_token(llm) if ended else ())
        answered.append(Answered(asked, choice.text, token_ids))
    return answered


def _end_token(llm: LLM) -> tuple[int, ...]:
    """The token that ends answers; none where the model has several, as results do not say which
    it was."""
    ends = tuple(llm.end_token_ids)
    return ends if len(ends) == 1 else ()


def by_task(answered: Sequence[Answered]) -> dict[str, list[Answered]]:
    """The answers of each task, tasks in order of appearance."""
    groups: dict[str, list[Answered]] = {}
    for one in answered:
        groups.setdefault(one.question.problem.task, []).append(one)
    return groups


def score_rows(answered: Sequence[Answered]) -> Iterator[Row]:
    """For each task the share of right answers, with Wilson's interval."""
    for task, group in by_task(answered).items():
        right = sum(is_right(one.question.problem, one.text) for one in group)
        low, high = wilson(right, len(group))
        yield Row(task, TASKS[task], right / len(group), len(group), low, high)
