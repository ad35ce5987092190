"""Does the usage of a reply say what was drafted of it?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ridgeline.answer import Answer
from ridgeline.request import FinishReason, RequestOutput, SamplingParams
from ridgeline.server.replies import usage_of
from ridgeline.text.tokenizer import load_tokenizer


def usage(*outputs: RequestOutput, tokenizer: Any = None, **sampling: Any) -> dict[str, Any]:
    answer = Answer(
        "a",
        (1, 2, 3),
        SamplingParams(max_tokens=9, seed=1, **sampling),
        tokenizer=tokenizer,
        end_token_ids=frozenset(),
        arrival_time=0.0,
    )
    for output in outputs:
        answer.push(output)
    active: Any = SimpleNamespace(answers=[answer], wants_cost=False)
    found = msgspec.json.decode(msgspec.json.encode(usage_of(active)))
    assert isinstance(found, dict)
    return found


def test_accepted_and_rejected_drafts_are_counted() -> None:
    found = usage(
        RequestOutput("a-0", (5,)),
        RequestOutput("a-0", (5, 6, 7), num_accepted=2, num_rejected=1),
        RequestOutput("a-0", (8,), FinishReason.LENGTH, num_accepted=0, num_rejected=3),
    )
    assert found["completion_tokens"] == 5
    assert found["completion_tokens_details"] == {
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 4,
    }


def test_right_drafts_behind_a_stop_string_are_nobodys(fake_model: Path) -> None:
    found = usage(
        RequestOutput("a-0", tuple(b"a")),
        RequestOutput("a-0", tuple(b"b. c"), num_accepted=3, num_rejected=1),
        tokenizer=load_tokenizer(fake_model),
        stop=(".",),
    )
    assert found["completion_tokens"] == 3
    assert found["completion_tokens_details"]["accepted_prediction_tokens"] == 2


@pytest.mark.parametrize("cached", [0, 2])
def test_answers_that_share_one_prompt_have_not_found_it_in_the_cache(cached: int) -> None:
    """All but the first begin with the blocks that the first has filled."""
    found = usage(
        RequestOutput("a-0", (5,), num_cached_tokens=cached),
        RequestOutput("a-1", (6,), num_cached_tokens=3),
        n=2,
    )
    assert found["prompt_tokens_details"]["cached_tokens"] == cached


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_without_drafts_nothing_is_said_of_them(num_tokens: int) -> None:
    found = usage(*[RequestOutput("a-0", (5,))] * num_tokens)
    assert "completion_tokens_details" not in found
