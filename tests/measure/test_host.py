"""Does the engine without its device do what its host is timed at?"""

from __future__ import annotations

import pytest

from ridgeline.measure.host import NUM_DRAFT_TOKENS, NUM_STEPS, _drafting_engine, draft_seconds
from ridgeline.speculation.controller import DraftLengthController


@pytest.mark.parametrize("num_draft_tokens", [NUM_DRAFT_TOKENS, None])
@pytest.mark.parametrize("num_out", [1, NUM_DRAFT_TOKENS + 1])
def test_steps_with_drafts_go_on_as_long_as_they_are_timed(
    num_draft_tokens: int | None, num_out: int
) -> None:
    engine = _drafting_engine(num_draft_tokens, num_out)
    chooser = engine.scheduler.draft_lengths
    assert isinstance(chooser, DraftLengthController)
    outputs = [output for _ in range(NUM_STEPS) for output in engine.step()]
    assert len(outputs) == NUM_STEPS
    assert not engine.is_idle
    if num_out > 1:  # else none is worth a check where their number is chosen
        assert {len(output.new_token_ids) for output in outputs} == {num_out}
    assert bool(chooser.times.num_steps) == (num_draft_tokens is None)


def test_what_is_timed_is_a_time() -> None:
    choice_s, token_s = draft_seconds()
    assert 0 <= choice_s < 1
    assert 0 <= token_s < 1
