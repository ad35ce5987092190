"""Which drafts are kept, step by step? By chance, or as the bundled model verifies its draft's.

A reader may reject a draft that was kept. By chance, the rule of the simulator then meets a draft
that is never right. The bundled model is asked again from there: the next token is its own, and all
steps behind it are new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING

import msgspec

from ridgeline.errors import RequestFault, check
from ridgeline.request import RequestOutput, SamplingParams
from ridgeline.simulator.executor import Speculation
from ridgeline.speculation.report import DraftTotals
from ridgeline.step import Listener, StepPlan, StepResult

if TYPE_CHECKING:
    from ridgeline.llm import LLM

CHANCE, REAL = "chance", "the bundled models"
MAX_TAPE = 14  # steps that are drawn
NUM_TOSSED = 400  # steps whose mean is told beside the expectation
MOST_TOKENS = 96  # of a real answer

Place = tuple[int, int]  # a step of the tape and one of its drafts, both from 0


class Step(msgspec.Struct, frozen=True):
    """`num_drafts` were verified, `num_right` of them kept. `tokens` came out, the last of them the
    model's own; without texts by chance. `rejected`: the draft that the reader rejected."""

    num_drafts: int
    num_right: int
    tokens: list[str] = []
    rejected: int | None = None


class Tape(msgspec.Struct, frozen=True):
    """`num_lost`: drafts that were kept until the reader rejected one at or before them."""

    steps: list[Step]
    mean: float
    acceptance: float
    by_position: list[float]
    text: str = ""
    num_lost: int = 0


def read_places(text: str) -> tuple[Place, ...]:
    """Of "2:1,5:0", by step. Raises RequestFault."""
    try:
        pairs = [one.split(":") for one in text.split(",") if one.strip()]
        found = sorted((int(step), int(draft)) for step, draft in pairs)
    except ValueError:
        found = [(-1, -1)]
    if any(min(place) < 0 for place in found):
        raise RequestFault(
            f"rejected is {text!r}; it has places such as 2:1,5:0 (step:draft, both from 0)",
            param="rejected",
        )
    return tuple(found)


# ---------------------------------------------------------------------- by chance


def tossed_tape(num_drafts: int, acceptance: float, seed: int, places: Sequence[Place]) -> Tape:
    """By a coin for each draft that is reached; each step has coins of its own."""
    rule = Speculation.even(num_drafts, acceptance)
    right = [rule.num_accepted(num_drafts, _coins(seed, i)) for i in range(NUM_TOSSED)]
    steps, num_lost = [Step(num_drafts, num) for num in right[:MAX_TAPE]], 0
    for i, draft in places:
        if i < len(steps) and draft < steps[i].num_right:
            chances = tuple(0.0 if j == draft else acceptance for j in range(num_drafts))
            kept = replace(rule, accepted=chances).num_accepted(num_drafts, _coins(seed, i))
            num_lost += right[i] - kept
            right[i], steps[i] = kept, Step(num_drafts, kept, rejected=draft)
    return Tape(steps, 1 + sum(right) / len(right), acceptance, [], num_lost=num_lost)


def _coins(seed: int, step: int) -> Random:
    return Random(f"{seed} {step}")


# ---------------------------------------------------------------------- the bundled pair


class _Verified(Listener):
    """What the engine verified, step by step."""

    def __init__(self) -> None:
        self.totals = DraftTotals()
        self.steps: list[_Ids] = []

    def on_collect(
        self,
        plan: StepPlan,
        result: StepResult | None,
        outputs: Sequence[RequestOutput],
        error: str | None,
        now: float,
    ) -> None:
        if result is None:
            return
        if any(row.num_draft for row in plan.scheduled):
            self.totals.count_result(plan, result, outputs, 0.0)
        planned = {row.request_id: row.num_draft for row in plan.scheduled}
        for output in outputs:
            _, num_right = result.verified.get(output.request_id, (0, 0))
            ids = output.new_token_ids
            self.steps.append(_Ids(planned[output.request_id], min(num_right, len(ids)), ids))


class _Ids(msgspec.Struct, frozen=True):
    """A step of the engine; one without drafts is not part of the tape."""

    num_drafts: int
    num_right: int
    ids: tuple[int, ...]
    rejected: int | None = None


@lru_cache(maxsize=2)
def _pair(num_drafts: int) -> LLM:
    """The bundled model with its draft."""
    try:
        from ridgeline.llm import LLM
    except ImportError as fault:
        raise RequestFault(
            f"the bundled models need {fault.name} here; let drafts be right by {CHANCE}",
            param="source",
        ) from None
    return LLM(speculate=f"draft:demo:draft:{num_drafts}", max_model_len=512, max_num_seqs=1)


@lru_cache(maxsize=64)
def _run_pair(
    num_drafts: int, prompt: str, temperature: float, seed: int, begun: tuple[int, ...]
) -> _Verified:
    """An answer that goes on behind the tokens `begun`."""
    llm, heard = _pair(num_drafts), _Verified()
    sampling = SamplingParams(
        max_tokens=MOST_TOKENS - len(begun), temperature=temperature, seed=seed
    )
    llm.engine.listeners.append(heard)
    try:
        asked = llm.encode_chat([{"role": "user", "content": prompt}])
        llm.generate([[*asked, *begun]], sampling, progress=False)
    finally:
        llm.engine.listeners.remove(heard)
    return heard


def real_tape(
    num_drafts: int, prompt: str, temperature: float, seed: int, places: Sequence[Place]
) -> Tape:
    """The engine's own steps with the bundled model; the same inputs, the same tokens."""
    first = _run_pair(num_drafts, prompt, temperature, seed, ())
    steps, num_lost = list(first.steps), 0
    for place, draft in places:
        drawn = [i for i, one in enumerate(steps) if one.num_drafts]
        if place >= len(drawn) or draft >= steps[drawn[place]].num_right:
            continue
        i = drawn[place]
        kept = steps[i].ids[:draft]
        begun = (*(one for before in steps[:i] for one in before.ids), *kept)
        own, *behind = _run_pair(num_drafts, prompt, temperature, seed, begun).steps
        num_lost += steps[i].num_right - draft
        again = _Ids(steps[i].num_drafts, draft, (*kept, *own.ids), draft)
        steps = [*steps[:i], again, *behind]
    tokenizer = _pair(num_drafts).tokenizer
    check(tokenizer is not None, "the bundled model has a tokenizer")
    decode = tokenizer.decode  # type: ignore[union-attr]
    drawn_steps = [
        Step(one.num_drafts, one.num_right, [decode([token]) for token in one.ids], one.rejected)
        for one in steps if one.num_drafts
    ]  # fmt: skip
    totals = first.totals
    looked = [num for num in totals.num_looked if num]
    return Tape(
        drawn_steps,
        sum(len(one.tokens) for one in drawn_steps) / max(1, len(drawn_steps)),
        sum(totals.num_right) / max(1, sum(totals.num_looked)),
        [right / num for right, num in zip(totals.num_right, looked, strict=False)],
        decode([token for one in steps for token in one.ids]),
        num_lost,
    )
