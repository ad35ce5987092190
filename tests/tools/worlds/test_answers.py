"""Answers are computed again here, from the text of the question alone."""

from __future__ import annotations

import json
import random
import re
from functools import cache

import pytest

from tests.thinning import slow
from tools import worlds

DRAWS = 2_000
NUMBERS = re.compile(r"\d+")


amounts = pytest.mark.parametrize("num", [500, *slow(DRAWS)])  # of what takes long to draw


@cache
def drawn(task: str, num: int = DRAWS) -> list[tuple[str, str]]:
    """Questions and answers, so many from each split."""
    rng = random.Random(11)
    found = [worlds.problem(task, rng, "train") for _ in range(num)]
    found += [worlds.problem(task, rng, "test") for _ in range(num)]
    return [(p.messages[-1].content, p.answer) for p in found]


def test_arithmetic() -> None:
    for question, answer in drawn("arithmetic"):
        a, b = map(int, NUMBERS.findall(question))
        if re.search(r"\+|plus|add", question, re.IGNORECASE):
            expected = a + b
        elif "ubtract" in question:
            expected = b - a
        else:
            expected = a - b
        assert answer == str(expected), question
        assert max(a, b) <= 9999


def test_arithmetic_has_all_lengths_and_negative_results() -> None:
    pairs = [NUMBERS.findall(question) for question, _ in drawn("arithmetic")]
    assert {(len(a), len(b)) for a, b in pairs} == {
        (i, j) for i in range(1, 5) for j in range(1, 5)
    }
    assert any(answer.startswith("-") for _, answer in drawn("arithmetic"))


def listed(question: str) -> str:
    """The list in a question: what follows the first colon, or the first line."""
    match = re.match(r"[^:\n]*(?::|\.\n) ?(.*)", question, re.DOTALL)
    assert match, question
    return match.group(1)


def test_copy() -> None:
    for question, answer in drawn("copy"):
        assert answer == listed(question)
        assert 3 <= len(re.split(r", |; |\n| ", answer)) <= 20


def test_sort() -> None:
    for question, answer in drawn("sort"):
        separator = ", " if ", " in answer else " "
        items = listed(question).split(separator)
        assert 3 <= len(items) == len(set(items)) <= 10
        if items[0].isdigit():
            is_down = re.search("descending|largest to|large to", question) is not None
            expected = sorted(items, key=int, reverse=is_down)
        else:
            expected = sorted(items)
        assert answer == separator.join(expected), question


def wanted_keys(question: str) -> list[str]:
    empty = re.search(r"\{.*?\}", question)
    if empty:
        return list(json.loads(empty.group(0)))
    match = re.search(r"keys ((?:\w+, )*\w+)", question)
    assert match, question
    return match.group(1).split(", ")


def test_json_has_the_keys_asked_for_and_values_from_the_sentence() -> None:
    for question, answer in drawn("json"):
        filled = json.loads(answer)
        assert list(filled) == wanted_keys(question), question
        for key, value in filled.items():
            if isinstance(value, bool):
                said = "a student" if key == "student" else "broken"
                assert (f"is {said}" in question) == value, question
                assert (f"is not {said}" in question) != value, question
            else:
                assert re.search(rf"\b{re.escape(str(value))}\b", question), (question, key)


# ---------------------------------------------------------------------- lookup

# Written for this test, from what the passages look like: (a sentence says, (subject, value)).
SAYS = {
    "value": (r"(?:Note: t|T)he (\w+ of the \w+ \w+) is (\w+)\.",),
    "has": (r"(\w+) (?:has|owns) (an? \w+ \w+)\.", r"The (\w+ \w+) belongs to (\w+)\."),
    "where": (
        r"The (\w+ \w+) (?:is|lies) ((?:in|on|at|by) the \w+)\.",
        r"You can find the (\w+ \w+) ((?:in|on|at|by) the \w+)\.",
    ),
    "likes": (r"(\w+) (?:likes|loves) (\w+)(?: very much)?\.",),
    "lives": (r"(\w+) lives in (\w+)\.", r"The home of (\w+) is in (\w+)\."),
    "age": (r"(\w+) is (\d+) years old\.", r"The age of (\w+) is (\d+)\."),
    "job": (r"(\w+) (?:works as|is) (an? \w+)\.", r"The job of (\w+) is (\w+)\."),
}
ASKS = {
    "value": (r"(?:what is|tell me) the (\w+ of the \w+ \w+)[?.]",),
    "has": (r"what does (\w+) have\?", r"what belongs to (\w+)\?"),
    "where": (r"where (?:is|can i find) the (\w+ \w+)\?",),
    "likes": (r"what does (\w+) (?:like|love)\?",),
    "lives": (r"where does (\w+) live\?", r"in which city does (\w+) live\?"),
    "age": (r"how old is (\w+)\?", r"what is the age of (\w+)\?"),
    "job": (r"what is the job of (\w+)\?", r"what does (\w+) work as\?"),
}
ASKS_BACK = {
    "has": (r"who (?:has|owns) (?:the|an?) (\w+ \w+)\?",),
    "likes": (r"who (?:likes|loves) (\w+)\?",),
    "lives": (r"who lives in (\w+)\?",),
    "job": (r"who (?:is the|works as an?) (\w+)\?",),
}


def bare(text: str) -> str:
    return re.sub(r"^an? ", "", text)


def facts(text: str, kind: str) -> set[tuple[str, str]]:
    found = set()
    for pattern in SAYS[kind]:
        for first, second in re.findall(rf"(?<!\w){pattern}", text):
            swapped = "belongs" in pattern
            found.add((second, bare(first)) if swapped else (first, bare(second)))
    return found


def possible_answers(text: str) -> set[str]:
    """All answers that the sentences of `text` allow to the questions in it."""
    answers = set()
    for kind, patterns in ASKS.items():
        subjects = {s for p in patterns for s in re.findall(rf"(?i)\b{p}", text)}
        answers |= {value for subject, value in facts(text, kind) if subject in subjects}
    for kind, patterns in ASKS_BACK.items():
        values = {v for p in patterns for v in re.findall(rf"(?i)\b{p}", text)}
        answers |= {subject for subject, value in facts(text, kind) if value in values}
    return answers


def table_answer(text: str) -> str | None:
    rows = dict(re.findall(r"^(\w+): (\w+)$", text, re.MULTILINE))
    asked = re.search(r"(?:value of |What is |value has |^|Question: )(\w+)\?", text, re.MULTILINE)
    return rows.get(asked.group(1)) if rows and asked else None


@amounts
def test_lookup_has_one_answer_and_it_is_in_the_text(num: int) -> None:
    num_tables = 0
    for text, answer in drawn("lookup", num):
        in_table = table_answer(text)
        if in_table is not None:
            num_tables += 1
            assert answer == in_table, text
        else:
            assert possible_answers(text) == {bare(answer)}, text
    assert 0 < num_tables < num


@amounts
def test_lookup_has_short_and_long_passages(num: int) -> None:
    lengths = sorted(len(text) for text, _ in drawn("lookup", num))
    assert lengths[0] < 150
    assert lengths[-1] > 3_500
    assert lengths[len(lengths) // 2] < 1_200


# ---------------------------------------------------------------------- records

# Written for this test, from what the texts look like: what stands of a subject, and who asks.
STANDS = {
    "list": (
        r"The list of (\w+): (.+?)\.",
        r"On the list of (\w+) stands (.+?)\.",
        r"(\w+) wrote down (.+?)\.",
    ),
    "box": (
        r"In the (\w+ \w+): (.+?)\.",
        r"The (\w+ \w+) holds (.+?)\.",
        r"The (\w+ \w+) has room for (.+?)\.",
    ),
    "serial": (
        r"The serial number of the (\w+ \w+) is (\S+?)\.",
        r"The (\w+ \w+) has the serial number (\S+?)\.",
    ),
    "speech": (r'(\w+) (?:said|called): "(.+?)"', r'"([^"]+?)" said (\w+)\.'),
}
ASKED_FOR = {
    "list": r"(?:is on the list of|did) (\w+)(?: write down)?\?",
    "box": r"(?:is in|does) the (\w+ \w+?)(?: hold)?\?",
    "serial": r"serial number of the (\w+ \w+)[?.]$",
    "speech": r"(?:did|the words of) (\w+)(?: say)?\?",
}


def records_of(text: str, kind: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for pattern in STANDS[kind]:
        for first, second in re.findall(pattern, text):
            swapped = pattern.startswith('"')
            found[second if swapped else first] = first if swapped else second
    return found


def kind_asked(question: str) -> str:
    if "serial number" in question:
        return "serial"
    if re.search(r" say\?|words of", question):
        return "speech"
    return "list" if re.search(r"list of|write down", question) else "box"


@amounts
def test_records_are_answered_word_for_word(num: int) -> None:
    kinds = set()
    for text, answer in drawn("records", num):
        lines = [line for line in text.split("\n") if line.endswith("?") or "Tell me" in line]
        (question,) = {line.removeprefix("Question: ") for line in lines}
        kind = kind_asked(question)
        (subject,) = re.findall(ASKED_FOR[kind], question)
        assert records_of(text, kind)[subject] == answer, text
        kinds.add(kind)
    assert kinds == set(STANDS)


@amounts
def test_records_are_longer_than_a_word(num: int) -> None:
    lengths = sorted(len(answer) for _, answer in drawn("records", num))
    assert lengths[0] >= 14
    assert lengths[len(lengths) // 2] > 40
