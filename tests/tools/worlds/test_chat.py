"""Ridge says who it is, remembers what it was told, and does tasks within a conversation."""

from __future__ import annotations

import random

import pytest

from ridgeline.evaluation.problems import Split, contains, is_right
from tools.worlds import basics, conversations
from tools.worlds.problem import split_of
from tools.worlds.talk import TOPICS

DRAWS = 1_000
SPLITS: tuple[Split, ...] = ("train", "test")
PLAIN = (
    "Hi",
    "Hello!",
    "Hi Ridge",
    "Who are you?",
    "What can you do?",
    "What can't you do?",
    "How do you work?",
    "Are you a human?",
    "What is Ridgeline?",
    "How are you?",
    "What is your name?",
    "Thanks!",
    "Goodbye",
)


@pytest.mark.parametrize("text", PLAIN)
def test_the_plainest_things_to_say_are_in_training(text: str) -> None:
    assert split_of(conversations.key(text)) == "train"


def test_case_and_marks_do_not_change_the_content() -> None:
    assert conversations.key("Hi, Ridge!") == conversations.key("hi ridge")


@pytest.mark.parametrize("name", TOPICS)
def test_every_reply_on_a_topic_is_accepted(name: str) -> None:
    topic = TOPICS[name]
    for reply in topic.replies.splitlines():
        assert any(contains(reply, phrase) for phrase in topic.accept), reply


@pytest.mark.parametrize("make", conversations.CONVERSATIONS)
@pytest.mark.parametrize("split", SPLITS)
def test_every_kind_of_conversation_can_be_drawn(
    make: conversations.Conversation, split: Split
) -> None:
    rng = random.Random(31)
    for _ in range(150):
        p = make(rng, split)
        assert p.task == "chat"
        assert is_right(p, p.answer)


@pytest.mark.parametrize("split", SPLITS)
def test_what_is_recalled_was_told(split: Split) -> None:
    rng = random.Random(32)
    for _ in range(DRAWS):
        p = conversations.recalled(rng, split)
        told = [m.content for m in p.messages[:-1] if m.role == "user"]
        assert any(contains(text, p.accept[0]) for text in told), p
        assert not is_right(p, "Your name is Nobody.")


def test_sums_go_on_from_the_last_result() -> None:
    rng = random.Random(33)
    for _ in range(DRAWS):
        p = conversations.calculated_on(rng, "test")
        last = p.messages[-1].content.lower()
        number = int("".join(c for c in last if c.isdigit()))
        sign = -1 if "subtract" in last or "minus" in last else 1
        assert int(p.answer) == int(p.messages[-2].content) + sign * number


def test_numbers_in_words() -> None:
    spelled = [basics.in_words(n) for n in range(100)]
    assert len(set(spelled)) == 100
    assert spelled[0] == "zero"
    assert spelled[13] == "thirteen"
    assert spelled[42] == "forty-two"
    assert spelled[90] == "ninety"


def test_the_day_and_month_next_to_another() -> None:
    rng = random.Random(34)
    seen = {basics.neighbor(rng)[1] for _ in range(DRAWS)}
    assert "Monday comes after Sunday." in seen
    assert "December comes before January." in seen
    assert len(seen) == 2 * (7 + 12)


def test_counting_ends_where_it_was_asked_to() -> None:
    rng = random.Random(35)
    for _ in range(DRAWS):
        question, reply, _ = basics.counting(rng)
        ends = [int(word.strip(".")) for word in question.split() if word.strip(".").isdigit()]
        row = [int(item) for item in reply.split(", ")]
        step = 1 if ends[1] > ends[0] else -1
        assert row == list(range(ends[0], ends[1] + step, step))
