"""Leaves are plans of the planner, and other answers lead where it says."""

from __future__ import annotations

import shlex
from functools import cache

import msgspec
import pytest

from ridgeline.lab.page import Answer, read_inputs
from ridgeline.lab.pages.decision_tree import BRANCHES, PAGE, Drawing, Inputs, answer, asked
from ridgeline.planner.estimate import Bench, estimates_of, open_bench
from ridgeline.planner.question import hardware_of


@cache
def ask(**values: object) -> Answer[Drawing]:
    inputs = read_inputs(PAGE, values)
    assert isinstance(inputs, Inputs)
    *progress, found = answer(inputs)
    assert progress == sorted(progress)  # type: ignore[type-var]
    assert all(0 <= one < 1 for one in progress[:-1])  # type: ignore[operator]
    assert isinstance(found, Answer)
    return found


def test_a_person_at_home_gets_a_card_that_holds_the_weights_and_a_command() -> None:
    """16.1 GB in 16 bits fit a 24 GB card; at 936 GB/s a token takes 17 ms or more."""
    found = ask(place="workstation", traffic="one person").drawing
    words = shlex.split(found.leaf.command)
    assert found.leaf.title.startswith("1 x rtx-3090")
    assert words[:3] == ["ridgeline", "serve", "meta-llama/Llama-3.1-8B"]
    assert words[words.index("--max-model-len") + 1] == "1280"  # 1.5 x 700, in steps of 256
    assert found.leaf.sensitivity


def test_a_leaf_is_no_worse_than_any_candidate() -> None:
    question = asked(Inputs(place="workstation", traffic="one person"))
    found = ask(place="workstation", traffic="one person")
    cost = next(one.value for one in found.figures if one.name == "cost")
    assert found.guess is not None
    assert found.guess.value == cost
    for hardware in hardware_of(question):
        bench = open_bench(question, hardware)
        for one in estimates_of(bench) if isinstance(bench, Bench) else ():
            assert cost <= one.cost(one.replicas(question.rate)) + 1e-9


def test_every_question_has_one_taken_answer_and_all_lead_somewhere_or_say_so() -> None:
    found = ask(place="workstation", traffic="one person").drawing
    assert [one.field for one in found.branches] == list(BRANCHES)
    for branch in found.branches:
        assert sum(one.is_taken for one in branch.choices) == 1
        assert all(one.leads_to for one in branch.choices)
    sizes = {one.name: one for one in found.branches[0].choices}
    assert sizes["70B"].device == ""  # 141 GB, which two cards read too slowly
    assert sizes["32B"].device == "rtx-pro-6000"  # 65 GB


def test_where_there_is_no_plan_it_says_what_is_in_the_way() -> None:
    found = ask(size="70B", place="workstation", traffic="one person")
    assert found.drawing.leaf.command == ""
    assert "ms a token, and 50 ms are promised" in found.sentence
    assert found.figures == []
    assert found.guess is None


@pytest.mark.parametrize("field", BRANCHES)
def test_fields_are_those_of_the_inputs(field: str) -> None:
    _, choices = BRANCHES[field]
    assert getattr(Inputs(), field) in choices
    assert field in {one.name for one in msgspec.structs.fields(Inputs)}
