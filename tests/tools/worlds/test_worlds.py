"""Problems are the same for the same seed, never both in training and test, and right."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from ridgeline.errors import ConfigError, InternalError
from ridgeline.evaluation.problems import Message, Problem, Split, is_right
from tools import worlds
from tools.worlds.problem import TEST_EVERY, draw, split_of
from tools.worlds.records import content, drawn

TASKS = tuple(worlds.TASKS)
DRAWS = 10_000
FEWER_DRAWS = {"stories": 1_500, "lookup": 800, "records": 800}  # those that take long
SPLITS: tuple[Split, ...] = ("train", "test")
MAX_CHARACTERS = 5_500


def problems(task: str, count: int, seed: int, split: Split) -> list[Problem]:
    rng = random.Random(seed)
    return [worlds.problem(task, rng, split) for _ in range(count)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_draws_the_same(task: str, split: Split) -> None:
    assert problems(task, 30, 1, split) == problems(task, 30, 1, split)
    assert problems(task, 30, 1, split) != problems(task, 30, 2, split)


@pytest.mark.parametrize("task", TASKS)
def test_no_problem_is_in_both_splits(task: str) -> None:
    check_splits(task, 4_000, FEWER_DRAWS.get(task, 4_000))


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_no_problem_of_many_is_in_both_splits(task: str) -> None:
    check_splits(task, DRAWS, DRAWS)


def check_splits(task: str, num_train: int, num_tests: int) -> None:
    train = {p.messages for p in problems(task, num_train, 3, "train")}
    test = {p.messages for p in problems(task, num_tests, 4, "test")}
    assert not train & test
    assert len(test) > 500


def test_no_problem_of_the_test_is_the_beginning_of_a_training_conversation() -> None:
    check_conversations(num_tests=400, num_conversations=1_000)


@pytest.mark.slow
def test_none_of_many_is_the_beginning_of_a_training_conversation() -> None:
    check_conversations(num_tests=2_000, num_conversations=5_000)


def check_conversations(num_tests: int, num_conversations: int) -> None:
    test = {p.messages for task in TASKS for p in problems(task, num_tests, 5, "test")}
    rng = random.Random(6)
    for number in range(num_conversations):
        lessons = (worlds.FIRST_LESSONS, worlds.LATER_LESSONS)[number % 2]
        conversation = worlds.training_conversation(rng, lessons)
        spoken = [m for m in conversation if m.role != "system"]
        for end in range(1, len(spoken), 2):
            assert tuple(spoken[:end]) not in test
            assert (spoken[end - 1],) not in test


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("task", TASKS)
def test_conversations_are_well_formed(task: str, split: Split) -> None:
    for p in problems(task, 500, 7, split):
        assert [m.role for m in p.messages[::2]] == ["user"] * (len(p.messages) // 2 + 1)
        assert {m.role for m in p.messages[1::2]} <= {"assistant"}
        assert sum(len(m.content) for m in p.messages) + len(p.answer) <= MAX_CHARACTERS
        for text in (p.answer, *(m.content for m in p.messages)):
            assert text == text.strip()
            assert text.isascii()
            assert text
            assert "~" not in text


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("task", TASKS)
def test_the_answer_scores_and_another_does_not(task: str, split: Split) -> None:
    for p in problems(task, 500, 8, split):
        assert is_right(p, p.answer), p
        assert is_right(p, f" {p.answer}\n"), p
        if p.words or task != "stories":
            assert not is_right(p, "Xyzzy."), p
            assert not is_right(p, ""), p
        if not p.accept and task != "stories":
            assert not is_right(p, p.answer + "1")


def test_a_word_inside_another_word_does_not_count() -> None:
    asked = Problem("stories", (Message("user", "?"),), "", words=("cat",))
    assert is_right(asked, "The Cat sat.")
    assert not is_right(asked, "The catalog.")


def test_an_unknown_task_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"no task 'poetry'.*arithmetic"):
        worlds.problem("poetry", random.Random(0), "test")


def test_one_part_of_all_contents_is_for_tests() -> None:
    share = sum(split_of(f"content {i}") == "test" for i in range(20_000)) / 20_000
    assert abs(share * TEST_EVERY - 1) < 0.15


def test_drawing_what_cannot_be_had_ends() -> None:
    make: Callable[[], str] = lambda: "always the same"  # noqa: E731
    absent: Split = "test" if split_of(make()) == "train" else "train"
    with pytest.raises(InternalError, match="draws"):
        draw(make, str, absent)


# ---------------------------------------------------------------------- training


def test_training_conversations_alternate_and_repeat() -> None:
    def draw() -> list[tuple[Message, ...]]:
        found = []
        for seed in range(500):
            lessons = (worlds.FIRST_LESSONS, worlds.LATER_LESSONS)[seed % 2]
            found.append(worlds.training_conversation(random.Random(seed), lessons))
        return found

    drawn = draw()
    assert drawn == draw()
    lengths = set()
    for conversation in drawn:
        roles = [m.role for m in conversation if m.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert sum(len(m.content) for m in conversation) <= MAX_CHARACTERS
        lengths.add(len(roles))
    assert {2, 4, 6} <= lengths


def test_records_in_another_order_are_the_same_content() -> None:
    """So none of the test is one of training told in another order."""
    facts = drawn(random.Random(3))
    assert len(facts) > 1
    assert content(facts) == content(facts[::-1])
    assert content(facts) != content(facts[:-1])


def test_lessons_have_every_task_the_first_all_but_records() -> None:
    assert set(worlds.LATER_LESSONS) == worlds.TASKS.keys()
    assert set(worlds.FIRST_LESSONS) == worlds.TASKS.keys() - {"records"}
    assert len(worlds.FIRST_LESSONS) == len(worlds.LATER_LESSONS) == 100


def test_json_answers_are_one_line_of_json() -> None:
    for p in problems("json", 500, 9, "test"):
        assert json.dumps(json.loads(p.answer)) == p.answer
