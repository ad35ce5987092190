"""Requests that begin alike and come at once get what each gets alone, for less work."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.step import Listener, StepRecord
from tests.conftest import TEST_DEVICE

NUM_REQUESTS = 12
SHARED = 96  # tokens, six blocks
OWN = 5


class Count(Listener):
    """Tokens of prompts that were computed."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0

    def on_step(self, record: StepRecord) -> None:
        left = ((new, SHARED + OWN - before) for new, before in record.plan.shape)
        self.num_prompt_tokens += sum(min(new, most) for new, most in left if most > 0)


def prompts(llm: LLM) -> list[list[int]]:
    shared = [5 + (7 * i) % 200 for i in range(SHARED)]
    return [[*shared, *(9 + (i * OWN + j) % 200 for j in range(OWN))] for i in range(NUM_REQUESTS)]


@pytest.mark.parametrize("max_num_batched_tokens", [2048, 128, 40])
def test_the_same_tokens_and_the_beginning_computed_once(max_num_batched_tokens: int) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    some: dict[str, Any] = {"device": TEST_DEVICE, "dtype": "float32", "num_blocks": 400}
    with LLM("demo:draft", prefix_caching=False, **some) as alone:
        asked = prompts(alone)
        wanted = [alone.generate(prompt, sampling)[0].token_ids for prompt in asked]
    with LLM("demo:draft", max_num_batched_tokens=max_num_batched_tokens, **some) as llm:
        count = Count()
        llm.engine.listeners.append(count)
        results = llm.generate(asked, sampling)
        assert [result.token_ids for result in results] == wanted
        assert count.num_prompt_tokens == SHARED + NUM_REQUESTS * OWN
        cached = [result.metrics.num_cached_tokens for result in results]
        assert cached == [0] + [SHARED] * (NUM_REQUESTS - 1)
