"""Does a request that took the shortcut decode as one that computed its whole prompt?"""

from __future__ import annotations

import pytest

from ridgeline.build import Built
from ridgeline.measure.steps import MADE_UP_TOKEN, SyntheticKVExecutor, random_engine
from ridgeline.request import Request, SamplingParams
from ridgeline.step import NewRequest, ScheduledRequest, StepPlan, StepResult
from tests.measure.small import SAMPLE

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, seed=0)


class Recording:
    """An executor that remembers its plans and samples token 7."""

    num_blocks = 10
    block_size = 4

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> Recording:
        self.plans.append(plan)
        return self

    def result(self) -> StepResult:
        entries = self.plans[-1].scheduled
        return StepResult({entry.request_id: (7,) for entry in entries if entry.samples})


def plan(step: int, *scheduled: ScheduledRequest, **more: object) -> StepPlan:
    return StepPlan(step, scheduled, **more)  # type: ignore[arg-type]


def test_the_row_is_opened_later_with_all_that_happened_meanwhile() -> None:
    inner = Recording()
    synthetic = SyntheticKVExecutor(inner)
    synthetic.is_skipping = True
    new = NewRequest("a", (1, 2, 3, 4, 5), 5, GREEDY, ((9,),))
    first = ScheduledRequest("a", 0, 4, ((3,),), samples=False)
    assert synthetic.submit(plan(1, first, new=(new,))).result().token_ids == {}
    last = ScheduledRequest("a", 4, 1, ((4,),), samples=True)
    assert synthetic.submit(plan(2, last)).result().token_ids == {"a": (MADE_UP_TOKEN,)}
    assert inner.plans == []
    synthetic.is_skipping = False
    decode = ScheduledRequest("a", 5, 1, ((5,),), samples=True)
    assert synthetic.submit(plan(3, decode)).result().token_ids == {"a": (7,)}
    (seen,) = inner.plans
    assert seen.scheduled == (decode,)
    assert seen.new == (NewRequest("a", (1, 2, 3, 4, 5, MADE_UP_TOKEN), 5, GREEDY, ((9, 3, 4),)),)


def test_rows_are_closed_inside_even_while_skipping() -> None:
    inner = Recording()
    synthetic = SyntheticKVExecutor(inner)
    synthetic.submit(plan(1, new=(NewRequest("a", (1,), 1, GREEDY, ((1,),)),)))
    synthetic.is_skipping = True
    new = NewRequest("b", (1,), 1, GREEDY, ((2,),))
    entry = ScheduledRequest("b", 0, 1, ((),), samples=True)
    synthetic.submit(plan(2, entry, new=(new,), finished=("a",)))
    assert inner.plans[-1].finished == ("a",)
    assert inner.plans[-1].scheduled == ()
    synthetic.is_skipping = False
    synthetic.submit(plan(3, finished=("b",)))  # never opened inside: harmless
    assert inner.plans[-1].new == ()


def tokens_of(built: Built, prompt: tuple[int, ...], *, skip: bool) -> list[int]:
    synthetic = SyntheticKVExecutor(built.engine.executor)
    built.engine.executor = synthetic
    built.engine.add(Request(f"r{skip}", prompt, GREEDY, 0.0))
    synthetic.is_skipping = skip
    found: list[int] = []
    while not built.engine.is_idle:
        for output in built.engine.step():
            found += output.new_token_ids
        request = built.engine.scheduler.requests.get(f"r{skip}")
        computed = 0 if request is None else request.num_computed_tokens
        synthetic.is_skipping = skip and computed < len(prompt)
    built.engine.executor = synthetic.inner
    return found


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_real_engine_goes_on_after_the_shortcut(max_in_flight: int) -> None:
    options = {"device": "cpu", "dtype": "float32", "threads": 1, "num_blocks": 40}
    with random_engine(SAMPLE.config, **options, max_in_flight=max_in_flight) as built:
        prompt = tuple(range(3, 40))
        skipped = tokens_of(built, prompt, skip=True)
        assert len(skipped) == 6
        assert skipped[0] == MADE_UP_TOKEN
        again = tokens_of(built, prompt, skip=False)
        assert len(again) == 6
        built.engine.scheduler.check_invariants()
