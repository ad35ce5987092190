"""Does an offline answer say what became of the drafts that were checked for it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.request import Request
from ridgeline.scheduler.scheduler import DraftLengths
from tests.captures import captures, records

PROMPT = "one two three four five six seven eight one two three four five six seven eight one two"


def ask(speculate: str) -> tuple[int, int, int, tuple[int, ...]]:
    llm = LLM(
        "demo:chat", dtype="float32", speculate=speculate, num_blocks=200, max_num_seqs=4,
        warm_up="off",
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    result = llm.generate([PROMPT], sampling, progress=False)[0]
    llm.close()
    seen = result.metrics
    told = seen.num_accepted_tokens, seen.num_rejected_tokens, seen.num_output_tokens
    return *told, tuple(result.token_ids)


@captures
def test_accepted_and_rejected_drafts_of_an_answer() -> None:
    plain, drafted = ask("off"), ask("draft:demo:draft:3")
    assert plain[:2] == (0, 0)
    accepted, rejected, num_tokens, _ = drafted
    assert 0 < accepted < num_tokens
    assert rejected > 0
    assert drafted[2:] == plain[2:]


class Scripted(DraftLengths):
    """In the place of the choice: so many drafts by the number of the step, and only of some rows
    where they are named. Counts drafts that were looked at, and right ones."""

    def __init__(self, steps: Sequence[tuple[int, Sequence[str] | None]]) -> None:
        super().__init__(max(k for k, _ in steps))
        self.steps = steps
        self.number = 0
        self.looked: list[tuple[int, int]] = []

    def plan(self, decoding: Sequence[Request], now: float) -> int:
        if not decoding:
            return 0
        k, some = self.steps[min(self.number, len(self.steps) - 1)]
        self.number += 1
        for row in decoding:
            row.has_drafts = row.has_drafts and (some is None or row.request_id in some)
        return k

    def observe(self, verified: Mapping[str, tuple[int, int]]) -> None:
        self.looked += verified.values()


@records
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_draft_catches_up_with_rows_that_had_no_drafts_for_a_while(in_flight: int) -> None:
    """It is the model itself, so all is right as long as it has read all there is. Between steps
    without drafts some rows have some, and the others go on missing what they missed."""
    with LLM("demo:chat", speculate="draft:demo:chat", device="cpu", dtype="float32") as llm:
        plain: tuple[int, None] = (0, None)
        some, others = (2, ("q0-0", "q2-0")), (2, ("q1-0", "q3-0"))
        script: list[tuple[int, Sequence[str] | None]] = [
            (2, None),
            plain,
            plain,
            some,
            plain,
            some,
            some,
            plain,
            others,
            plain,
            (2, None),
        ]
        scripted = llm.engine.scheduler.draft_lengths = Scripted(script)
        llm.engine.max_in_flight = in_flight
        sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        prompts = [f"Once upon a time there was a little {name}" for name in ("dog", "cat", "girl")]
        llm.generate([*prompts, "The sun"], sampling)
    assert len(scripted.looked) > 30
    assert all(num_right == num_looked for num_looked, num_right in scripted.looked)
