"""Quiet steps at once: what counts as quiet, and that the state is that of single steps."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from ridgeline.errors import InternalError
from ridgeline.request import Request, SamplingParams
from ridgeline.scheduler.macro import QuietSteps
from ridgeline.scheduler.policies.base import Policy, Rank
from ridgeline.step import StepPlan
from tests.scheduler.rig import Rig, make_request
from tests.scheduler.state import named, state_of
from tests.thinning import slow


class Pair:
    """Two schedulers with the same work: one goes on step by step, the other may leap."""

    def __init__(self, num_in_flight: int = 0, **options: object) -> None:
        self.rigs = [Rig(**options) for _ in range(2)]  # type: ignore[arg-type]
        self.quiet = QuietSteps(self.rigs[1].scheduler)
        self.num_in_flight = num_in_flight  # between two turns

    def add(self, request_id: str, **fields: object) -> None:
        for rig in self.rigs:
            rig.add(make_request(request_id, **fields))  # type: ignore[arg-type]

    def step(self, count: int = 1) -> None:
        for rig in self.rigs:
            for _ in range(count):
                self._turn(rig)

    def _turn(self, rig: Rig) -> StepPlan:
        plan = rig.plan()
        if len(rig.plans) > self.num_in_flight or (rig.plans and not plan.scheduled):
            rig.complete()
        return plan

    def leap(self, count: int) -> None:
        """Leap on one side, step on the other, and compare."""
        single, leaping = self.rigs
        rows = self.quiet.rows()
        assert self.quiet.most(rows) >= count
        flying = list(leaping.plans)
        run = self.quiet.advance(rows, [(1,) * count] * len(rows), count)
        plans = [self._turn(single) for _ in range(count)]
        assert [named(plan) for plan in run.plans()] == [named(plan) for plan in plans]
        leaping.plans = [*flying, *run.plans()][count:]
        leaping.now = single.now
        self.check()

    def check(self) -> None:
        for rig in self.rigs:
            rig.scheduler.check_invariants()
        assert state_of(self.rigs[0].scheduler) == state_of(self.rigs[1].scheduler)

    @property
    def most(self) -> int:
        """Steps that a leap may have now; 0 while the pipeline fills up."""
        if len(self.rigs[1].plans) != self.num_in_flight:
            return 0
        return self.quiet.most(rows) if (rows := self.quiet.rows()) else 0


@pytest.mark.parametrize("num_in_flight", [0, 1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 6), (3,)])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_leap_is_so_many_steps(
    num_in_flight: int, windows: tuple[int | None, ...], size: int
) -> None:
    pair = Pair(num_in_flight, num_blocks=200, block_size=size, windows=windows)
    for name, num_prompt in (("a", 5), ("b", 9), ("c", 1)):
        pair.add(name, num_prompt=num_prompt, max_tokens=60)
    pair.step(3)
    for count in (1, 2, 17, 7):
        pair.leap(count)
    while pair.rigs[0].scheduler.requests:
        pair.step()
    pair.check()


@pytest.mark.parametrize("seed", [*range(12), *slow(*range(12, 30))])
def test_leaps_between_whatever_else_happens(seed: int) -> None:
    """Arrivals, forks, aborts and short memory between leaps of any length."""
    rng = random.Random(seed)
    pair = Pair(
        rng.choice([0, 1, 1, 2]),
        num_blocks=rng.choice([12, 30, 200]),
        block_size=rng.choice([1, 2, 4]),
        windows=rng.choice([(None,), (None,), (None, 6), (5,)]),
        budget=rng.choice([4, 9, 64]),
        prefix_caching=rng.random() < 0.7,
    )
    num_leaps = 0
    for number in range(250):
        roll, live = rng.random(), list(pair.rigs[0].scheduler.requests)
        if roll < 0.1:
            size = pair.rigs[0].blocks.block_size
            room = min(40, pair.rigs[0].scheduler.max_servable_tokens)
            num_prompt = rng.randint(1, max(1, min(12, room - 1)))
            fork_of = rng.choice([*live, None]) if size > 1 else None
            if room > num_prompt:
                prompt = tuple(range(num_prompt))
                pair.add(f"r{number}", prompt=prompt, max_tokens=room - num_prompt, fork_of=fork_of)
        elif roll < 0.13 and live:
            for rig in pair.rigs:
                rig.scheduler.finish(live[0])
        elif (most := pair.most) > 0:
            pair.leap(rng.randint(1, min(most, 9)))
            num_leaps += 1
        else:
            pair.step()
        pair.check()
    assert num_leaps > 0


def test_no_more_steps_than_the_shortest_answer_has() -> None:
    """Without steps in flight the last one ends the request as soon as it is collected."""
    for num_in_flight, expected in ((0, 7), (1, 7), (2, 6)):
        pair = Pair(num_in_flight, num_blocks=50)
        pair.add("a", max_tokens=9)
        pair.add("b", max_tokens=30)
        pair.step(1 + num_in_flight)
        assert pair.most == expected
        pair.leap(expected)
        assert pair.most == 0


def test_no_more_steps_than_there_are_blocks() -> None:
    pair = Pair(num_blocks=7, block_size=4)
    pair.add("a", num_prompt=4, max_tokens=20)
    pair.add("b", num_prompt=4, max_tokens=20)
    pair.step()
    assert pair.rigs[0].blocks.num_free_blocks == 5
    assert pair.most == 8  # two blocks each; a fifth would do for one of them alone
    pair.leap(8)


def steady() -> Pair:
    pair = Pair(num_blocks=40, seats=3)
    pair.add("a", max_tokens=30)
    pair.step()
    assert pair.most > 0
    return pair


def test_a_prompt_to_compute_is_not_quiet() -> None:
    pair = steady()
    pair.add("b", max_tokens=30)
    assert pair.most == 0


def test_who_waits_in_vain_disturbs_nobody() -> None:
    pair = steady()
    for name in ("b", "c", "d"):
        pair.add(name, max_tokens=30)
    pair.step(2)
    assert pair.rigs[0].scheduler.num_waiting == 1  # all seats are taken
    pair.leap(5)


def test_a_parked_fork_is_not_quiet() -> None:
    pair = Pair(num_blocks=40, budget=4)
    pair.add("a", num_prompt=3, max_tokens=30)
    pair.step()
    pair.add("p", num_prompt=30, max_tokens=5)
    pair.add("f", prompt=make_request("p", num_prompt=30).prompt_token_ids, fork_of="p")
    assert pair.most == 0


class Whimsical(Policy):
    rank_is_fixed = True

    def token_budget(self, running: Collection[Request], now: float) -> int | None:
        return 3


class Drifting(Policy):
    def rank(self, request: Request, now: float) -> Rank:
        return (now % 2,)


@pytest.mark.parametrize("policy", [Whimsical(), Drifting()])
def test_a_policy_with_wishes_of_its_own_is_asked_each_time(policy: Policy) -> None:
    pair = Pair(num_blocks=40, policy=policy)
    pair.add("a", max_tokens=30)
    pair.step()
    assert pair.most == 0


def test_drafts_and_beams_are_not_quiet() -> None:
    drafting = Pair(num_blocks=40, num_drafts=2)
    drafting.add("a", max_tokens=30)
    drafting.step()
    assert drafting.most == 0
    rig = Rig(num_blocks=40)
    rig.add(make_request("b", sampling=SamplingParams(max_tokens=9, beam_width=2)))
    rig.plan()
    quiet = QuietSteps(rig.scheduler)
    assert quiet.most(quiet.rows()) == 0


@pytest.mark.parametrize("tokens", [(1, 1), (1, 1, 1, 1), (1, 5, 1)])
def test_tokens_that_cannot_be(tokens: tuple[int, ...]) -> None:
    """One for each step, and none that ends the answer."""
    rig = Rig(num_blocks=40)
    rig.add(make_request("a", sampling=SamplingParams(max_tokens=30, stop_token_ids={5})))
    rig.step()
    quiet = QuietSteps(rig.scheduler)
    with pytest.raises(InternalError, match="a token for each step"):
        quiet.advance(quiet.rows(), [tokens], 3)
