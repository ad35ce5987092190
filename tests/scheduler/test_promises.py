"""Blocks are found from the moment their last token is planned, and nobody is ever misled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ridgeline.request import FinishReason, Request, SamplingParams
from ridgeline.step import NULL_BLOCK, StepResult
from tests.scheduler.rig import Rig, entries, make_request
from tests.simulated_world import MAX_LIVE, Case, World, draw_case

PROMPT = tuple(range(1000, 1012))


class Bursts(World):
    """Many requests come at once and begin alike; much goes wrong."""

    faults = (0.01, 0.02, 0.004)

    def draw(self) -> Case:
        rng = self.rng
        return replace(
            draw_case(rng),
            prefix_caching=True,
            num_salts=1,
            block_size=rng.choice([1, 2, 3]),
            num_blocks=rng.choice([24, 48, 64]) + 24,
            max_num_batched_tokens=rng.choice([8, 16, 64, 512]),
            max_num_seqs=rng.choice([4, 8, 16]),
            longest_prompt=1.0,
            has_faults=rng.random() < 0.6,
            arrival=0.1,
        )

    def _happen(self) -> None:
        if self.rng.random() < 0.15:
            self._arrive_together()
        super()._happen()

    def _arrive_together(self) -> None:
        rng = self.rng
        common = rng.choice(self.stems)[: rng.randint(6, 30)]
        for _ in range(rng.randint(2, 6)):
            prompt = (*common, *self._tokens(rng.randint(1, 4)))
            if len(self.live) < MAX_LIVE and len(prompt) + 4 <= self.scheduler.max_servable_tokens:
                self._add(self._request(None, prompt, b"", rng.randint(1, 4), beams=False))


@pytest.mark.parametrize("num_worlds", [40, pytest.param(240, marks=pytest.mark.slow)])
def test_tokens_are_right_whatever_becomes_of_who_promised(num_worlds: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(num_worlds):  # a violation names its seed
        world = Bursts(700_000 + seed)
        try:
            world.run(120)
        except AssertionError as problem:
            raise AssertionError(f"seed {700_000 + seed}: {problem}") from problem
        seen["takers"] += world.device.num_early_takers
        seen["spoiled"] += world.device.num_takers_spoiled
        seen["row faults"] += world.device.num_row_faults
        seen["engine faults"] += world.device.num_faults
        seen["preemptions"] += world.scheduler.num_preemptions
        seen["aborts"] += world.counts[str(FinishReason.ABORT)]
        assert not any(pool._published_early for pool in world.scheduler.blocks.pools)
    share = num_worlds / 120
    faults = ("row faults", "engine faults", "preemptions")
    assert all(seen[what] > 20 * share for what in faults), seen
    assert seen["takers"] > 200 * share
    assert seen["spoiled"] > 5 * share
    assert seen["aborts"] > 50 * share


def same(name: str, num_own: int = 2, **fields: Any) -> Request:
    """The common prompt, then tokens of its own."""
    own = tuple(range(5000 + 10 * ord(name), 5000 + 10 * ord(name) + num_own))
    return make_request(name, prompt=(*PROMPT, *own), **fields)


def test_prompts_of_one_step_compute_their_common_beginning_once() -> None:
    rig = Rig(num_blocks=60, budget=64)
    rig.add(*(same(name) for name in "abcde"))
    plan = rig.plan()
    assert {name: (e.start, e.num_tokens) for name, e in entries(plan).items()} == {
        "a": (0, 14)
    } | dict.fromkeys("bcde", (12, 2))
    tables = [new.block_ids[0][:3] for new in plan.new]
    first = rig.scheduler.requests["a"].block_ids[0][:3]
    assert tables == [()] + [tuple(first)] * 4
    outputs = rig.complete()
    assert [output.num_cached_tokens for output in outputs] == [0, 12, 12, 12, 12]
    rig.run()


def test_a_chunk_in_flight_is_found_and_its_rest_computed_once() -> None:
    rig = Rig(num_blocks=60, budget=10)
    rig.add(same("a"), same("b"))
    assert list(entries(rig.plan())) == ["a"]
    plan = rig.plan()  # the first is still in flight
    assert {name: (e.start, e.num_tokens) for name, e in entries(plan).items()} == {
        "a": (10, 4),
        "b": (12, 2),
    }
    rig.complete()
    rig.complete()
    rig.run()


def test_a_prompt_of_single_tokens_promises_nothing() -> None:
    """What a step computes as the only token of a row may be written while others read."""
    rig = Rig(num_blocks=60, budget=64, prefix_caching=True)
    rig.scheduler.max_num_batched_tokens = 1
    rig.add(make_request("a", prompt=PROMPT[:4]))
    for _ in range(3):
        rig.step()
    rig.plan()  # fills its first block, alone
    rig.scheduler.max_num_batched_tokens = 64
    rig.add(make_request("b", prompt=PROMPT))
    assert entries(rig.plan())["b"].start == 0
    rig.complete()
    rig.complete()
    rig.run()


@pytest.mark.parametrize("is_same_step", [True, False])
def test_who_took_over_does_not_need_who_promised(is_same_step: bool) -> None:
    rig = Rig(num_blocks=60, budget=64)
    rig.add(same("a"))
    if not is_same_step:
        rig.plan()
    rig.add(same("b"))
    rig.plan()
    rig.scheduler.finish("a")
    rig.scheduler.check_invariants()
    while rig.plans:
        rig.complete()
    assert rig.blocks.num_cached_blocks == 3
    rig.add(same("c"))
    assert entries(rig.plan())["c"].start == 12
    rig.complete()
    rig.run()


def test_a_failed_step_breaks_all_promises_in_flight() -> None:
    rig = Rig(num_blocks=60, budget=64)
    rig.add(same("a"))
    rig.plan()
    rig.add(same("b"))
    rig.plan()
    rig.plans.clear()
    outputs = rig.scheduler.fail_in_flight("a wire broke")
    assert [output.request_id for output in outputs] == ["a", "b"]
    assert rig.blocks.num_cached_blocks == 0
    rig.scheduler.check_invariants()
    rig.add(same("c"))
    assert entries(rig.plan())["c"].start == 0


def test_what_was_known_before_a_failed_step_stays_known() -> None:
    rig = Rig(num_blocks=60, budget=8)
    rig.add(same("a"))
    rig.step()
    rig.plan()
    rig.plans.clear()
    rig.scheduler.fail_in_flight("a wire broke")
    assert rig.blocks.num_cached_blocks == 2


@pytest.mark.parametrize("meanwhile", ["runs", "aborted", "preempted"])
def test_a_fault_breaks_the_promises_of_its_row_and_of_no_other(meanwhile: str) -> None:
    rig = Rig(num_blocks=60, budget=64)
    bad, good = same("a"), make_request("g", 9)
    rig.add(bad, good)
    plan = rig.plan()
    if meanwhile == "aborted":
        rig.scheduler.finish("a")
    elif meanwhile == "preempted":
        rig.scheduler.state.preempt(bad, rig.now)
    rig.plans.clear()
    rig.scheduler.update(plan, StepResult({"g": (1,)}, faults={"a": "NaN"}))
    assert rig.blocks.num_cached_blocks == 2  # those of the good one
    rig.scheduler.check_invariants()
    rig.add(same("c"))
    assert entries(rig.plan())["c"].start == 0


def test_a_fault_breaks_what_later_steps_in_flight_promise() -> None:
    rig = Rig(num_blocks=60, budget=8)
    bad = same("a")
    rig.add(bad)
    first = rig.plan()
    rig.plan()
    rig.scheduler.state.preempt(bad, rig.now)
    rig.plans.pop(0)
    rig.scheduler.update(first, StepResult({}, faults={"a": "NaN"}))
    assert rig.blocks.num_cached_blocks == 0
    rig.complete()
    rig.scheduler.check_invariants()


def test_a_preempted_request_takes_back_what_is_still_in_flight() -> None:
    rig = Rig(num_blocks=60, budget=8)
    request = same("a")
    rig.add(request)
    rig.plan()
    rig.scheduler.state.preempt(request, rig.now)
    assert entries(rig.plan())["a"].start == 8
    rig.complete()
    rig.run()
    assert len(request.token_ids) == 18


def test_each_prompt_position_is_computed_by_who_asks_for_its_logprobs() -> None:
    rig = Rig(num_blocks=60, budget=64)
    asks = same("b", sampling=SamplingParams(max_tokens=2, prompt_logprobs=0))
    rig.add(same("a"), asks, same("c"))
    starts = {name: entry.start for name, entry in entries(rig.plan()).items()}
    assert starts == {"a": 0, "b": 0, "c": 12}


@pytest.mark.parametrize("windows", [(None, 6), (5,)])
def test_windows_share_what_the_next_query_looks_back_on(windows: tuple[int | None, ...]) -> None:
    rig = Rig(num_blocks=90, budget=64, windows=windows)
    rig.add(same("a"), same("b"))
    plan = rig.plan()
    assert entries(plan)["b"].start == 12
    table = plan.new[1].block_ids[-1]
    assert table[0] == NULL_BLOCK  # the window has passed it
    assert table[-1] != NULL_BLOCK
    rig.complete()
    rig.run()


def plan_another(rig: Rig) -> None:
    rig.add(same("b"))
    rig.plan()


LOOKS: dict[str, Callable[[Rig], object]] = {
    "the step was sent": lambda rig: rig.blocks.hash_blocks(),
    "another plan": plan_another,
    "an abort": lambda rig: rig.scheduler.finish("a"),
    "the result": lambda rig: rig.complete(),
    "a count": lambda rig: rig.blocks.num_cached_blocks,
}


@pytest.mark.parametrize("look", LOOKS)
def test_what_is_promised_is_named_as_soon_as_somebody_looks(look: str) -> None:
    rig = Rig(num_blocks=60, budget=64)
    rig.add(same("a"))
    rig.plan()
    assert len(rig.blocks._cache) == 0  # hashing waits
    LOOKS[look](rig)
    assert len(rig.blocks._cache) == 3
    rig.add(same("c"))
    assert entries(rig.plan())["c"].start == 12
    while rig.plans:
        rig.complete()
    rig.run()


def test_what_was_cleared_is_not_named_afterwards() -> None:
    rig = Rig(num_blocks=60, budget=64)
    rig.add(same("a"))
    rig.plan()
    rig.blocks.clear_cache()
    assert rig.blocks.num_cached_blocks == 0


def test_a_failure_breaks_promises_that_were_not_named_yet() -> None:
    rig = Rig(num_blocks=60, budget=64)
    rig.add(same("a"))
    rig.plan()
    rig.scheduler.fail_in_flight("power cut")
    rig.scheduler.check_invariants()
    assert rig.blocks.num_cached_blocks == 0
