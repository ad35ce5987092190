"""Does the usage of a reply say what was guessed of it?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ridgeline.answer import Answer
from ridgeline.request import FinishReason, RequestOutput, SamplingParams
from ridgeline.server.replies import usage_of


def usage(*outputs: RequestOutput) -> dict[str, Any]:
    answer = Answer(
        "a",
        (1, 2, 3),
        SamplingParams(max_tokens=9, seed=1),
        tokenizer=None,
        end_token_ids=frozenset(),
        arrival_time=0.0,
    )
    for output in outputs:
        answer.push(output)
    live: Any = SimpleNamespace(answers=[answer], wants_cost=False)
    found = msgspec.json.decode(msgspec.json.encode(usage_of(live)))
    assert isinstance(found, dict)
    return found


def test_accepted_and_rejected_guesses_are_counted() -> None:
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


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_without_guesses_nothing_is_said_of_them(num_tokens: int) -> None:
    found = usage(*[RequestOutput("a-0", (5,))] * num_tokens)
    assert "completion_tokens_details" not in found
