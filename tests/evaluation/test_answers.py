"""Do right answers count as right, in the form that the model was made for?"""

from __future__ import annotations

from typing import Any, cast

import pytest

from ridgeline.errors import EngineFault
from ridgeline.evaluation.answers import (
    ask,
    plain_prompt,
    plain_stops,
    question,
    questions,
    score_rows,
)
from ridgeline.evaluation.intervals import wilson
from ridgeline.evaluation.problems import TASKS, Message, Problem, problems
from ridgeline.llm import LLM
from tests.evaluation.fake_llm import END, FakeLLM

EXACT = ("arithmetic", "lookup", "copy", "sort", "json")


def fake(reply: Any, **options: Any) -> LLM:
    return cast(LLM, FakeLLM(reply, **options))


def chat_text(problem: Problem) -> str:
    return "".join(f"<{m.role}>{m.content}" for m in problem.messages)


def perfect(num: int, seed: int, **options: Any) -> LLM:
    """Answers every problem as expected."""
    answers = {
        chat_text(problem): problem.answer
        for task in TASKS
        for problem in problems(task, num, seed)
    }
    return fake(lambda text: answers[text], **options)


def test_the_right_answers_score_one_in_every_task() -> None:
    llm = perfect(6, 3)
    asked, skipped = questions(llm, tuple(TASKS), 6, 3)
    rows = list(score_rows(ask(llm, asked, progress=False)))
    assert skipped == {}
    assert [row.task for row in rows] == list(TASKS)
    assert [(row.value, row.n, row.low, row.high) for row in rows] == [
        (1.0, 6, *wilson(6, 6))
    ] * len(TASKS)
    metrics = {row.task: row.metric for row in rows}
    assert {metrics[task] for task in EXACT} == {"exact_match"}
    assert (metrics["stories"], metrics["chat"]) == ("words", "accept")


def test_wrong_answers_score_nothing_and_some_score_their_share() -> None:
    llm = fake(lambda text: "zzz")
    asked, _ = questions(llm, EXACT, 4, 0)
    assert {row.value for row in score_rows(ask(llm, asked, progress=False))} == {0.0}
    made = problems("arithmetic", 8, 0)
    right = {chat_text(problem) for problem in made[:6]}
    answers = {chat_text(problem): problem.answer for problem in made}
    llm = fake(lambda text: f" {answers[text]}\n" if text in right else "no idea")
    asked, _ = questions(llm, ["arithmetic"], 8, 0)
    (row,) = score_rows(ask(llm, asked, progress=False))
    share = sum(chat_text(problem) in right for problem in made) / 8
    assert (row.value, row.low, row.high) == (share, *wilson(8 * share, 8))


def test_answers_are_greedy_all_at_once_with_room_for_the_expected_one() -> None:
    llm = perfect(3, 0)
    asked, _ = questions(llm, ("arithmetic", "stories"), 3, 0)
    ask(llm, asked, progress=False)
    (call,) = cast(FakeLLM, llm).calls
    assert len(call) == 6
    for (_, sampling), one in zip(call, asked, strict=True):
        assert sampling.is_greedy
        assert sampling.stop == ()
        assert sampling.repetition_penalty == 1.0
        assert sampling.max_tokens is not None
        assert sampling.max_tokens > len(llm.encode(one.problem.answer))


def test_what_exceeds_the_context_is_left_out_and_counted() -> None:
    made = [len(chat_text(p)) + len(p.answer) for p in problems("lookup", 20, 0)]
    context = sorted(made)[10]
    fits = sum(length <= context for length in made)
    llm = perfect(20, 0, max_model_len=context)
    asked, skipped = questions(llm, ["lookup"], 20, 0)
    assert (len(asked), skipped) == (fits, {"lookup": 20 - fits})
    assert all(
        len(one.prompt_token_ids) + (one.sampling.max_tokens or 0) <= context for one in asked
    )
    (row,) = score_rows(ask(llm, asked, progress=False))
    assert (row.value, row.n) == (1.0, fits)
    nothing, skipped = questions(perfect(2, 0, max_model_len=5), ["lookup"], 2, 0)
    assert (nothing, skipped) == ([], {"lookup": 2})
    assert ask(llm, nothing, progress=False) == []


def test_a_model_without_a_template_gets_a_dialogue_in_plain_text() -> None:
    messages = (
        Message("system", "Be brief."),
        Message("user", "1+1?"),
        Message("assistant", "2"),
        Message("user", "2+2?"),
    )
    text = "System: Be brief.\nUser: 1+1?\nAssistant: 2\nUser: 2+2?\nAssistant:"
    assert plain_prompt(messages) == text
    llm = fake(lambda text: " 4", has_chat_template=False)
    made = question(llm, Problem("arithmetic", messages, "4"))
    assert made is not None
    assert bytes(made.prompt_token_ids).decode() == text
    assert made.sampling.stop == ("\n",) == plain_stops("4")
    assert plain_stops("a\nb") == ("\nUser:",)


def test_the_end_token_belongs_to_the_answer_where_it_is_known() -> None:
    problem = Problem("copy", (Message("user", "say a"),), "a")
    for ends, expected in (((END,), (97, END)), ((END, 257), (97,)), ((), (97,))):
        llm = fake(lambda text: "a", ends=ends)
        made = question(llm, problem)
        assert made is not None
        (answered,) = ask(llm, [made], progress=False)
        assert answered.token_ids == expected


def test_a_failed_answer_is_no_wrong_answer() -> None:
    llm = fake(lambda text: "a", error="out of memory")
    made = question(llm, Problem("copy", (Message("user", "say a"),), "a"))
    assert made is not None
    with pytest.raises(EngineFault, match="out of memory"):
        ask(llm, [made], progress=False)
