"""Are promises kept to those admitted, and does more useful work get done than in plain order?"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from ridgeline.cost.pricer import StepPrice
from ridgeline.errors import ConfigError
from ridgeline.observe.run import Run
from ridgeline.scheduler.policies import make_policy
from ridgeline.scheduler.policies.base import Admit, Overloaded, PolicySetting, Refuse
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.policies.slo import BEGUN, IN_TIME, LATE, SLO
from ridgeline.scheduler.policies.step_times import LearnedPricer
from ridgeline.step import StepPricer, StepShape
from tests import simulated_world
from tests.scheduler.policies.virtual_time import BLOCK_SIZE, Arrival, Linear, Times, World, poisson
from tests.scheduler.rig import Rig, make_request

PRICER = Linear()
TTFT_S, TPOT_S = 1.0, 0.03
LASTS_S = 8.0  # of arrivals
CAPACITY = 33.0  # requests a second of 500 + 200 tokens that keep these promises; found by trial


def slo(pricer: StepPricer = PRICER, **changes: float) -> SLO:
    options = {
        "ttft_s": TTFT_S,
        "tpot_s": TPOT_S,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "num_cache_tokens": 640_000,
    } | changes
    return SLO(pricer, **options)  # type: ignore[arg-type]


def goodput(times: Sequence[Times]) -> float:
    """Requests a second that got what was promised."""
    return sum(t.keeps(TTFT_S, TPOT_S) for t in times) / LASTS_S


def broken(times: Sequence[Times]) -> list[Times]:
    """Those who were let in and did not get what was promised."""
    return [t for t in times if t.retry_after_s is None and not t.keeps(TTFT_S, TPOT_S)]


@dataclass(frozen=True, slots=True)
class Slower:
    pricer: StepPricer
    factor: float

    def seconds(self, shape: StepShape) -> float:
        return self.factor * self.pricer.seconds(shape)


# ---------------------------------------------------------------------- goodput


@pytest.mark.parametrize(
    ("seed", "prompt", "output", "overload"),
    [(1, 500, 200, 1.5), (2, 2000, 100, 1.5), (3, 300, 60, 2.0)],
)
def test_overload(seed: int, prompt: int, output: int, overload: float) -> None:
    """At 1.5 times what can be served, queues without admission grow until all are late."""
    token_s = PRICER.per_token_s * (prompt + output) + output * PRICER.per_context_s * prompt
    rate = overload * min(CAPACITY, 1 / token_s)
    arrivals = poisson(random.Random(seed), rate, LASTS_S, prompt, output)
    first, promised = World(FCFS(), PRICER).run(arrivals), World(slo(), PRICER).run(arrivals)
    assert goodput(promised) >= max(1.3 * goodput(first), 0.5 * rate / overload)
    assert not broken(promised)


def test_nobody_is_refused_when_there_is_room() -> None:
    arrivals = poisson(random.Random(5), 0.5 * CAPACITY, LASTS_S, 500, 200)
    times = World(slo(), PRICER).run(arrivals)
    assert all(t.retry_after_s is None for t in times)
    assert not broken(times)


def test_steps_are_as_long_as_promised_and_use_what_they_may() -> None:
    world = World(slo(), PRICER)
    world.run(poisson(random.Random(6), 1.5 * CAPACITY, 10.0, 500, 200))
    mixed = [
        seconds
        for shape, seconds in world.device.steps
        if any(new == 1 for new, _ in shape) and any(new > 1 for new, _ in shape)
    ]
    assert max(mixed) <= TPOT_S
    late = sorted(mixed)[len(mixed) // 2 :]
    assert min(late) > 0.75 * TPOT_S


def test_prices_that_are_wrong_are_learned() -> None:
    """The device is twice as slow as its price."""
    device = Slower(PRICER, 2.0)
    learned = LearnedPricer(PRICER)
    world = World(slo(learned), device)
    run = Run(lambda shape, _: StepPrice(PRICER.seconds(shape), 0.0, 0.0, 0.0))
    run.listeners.append(learned)
    world.engine.listeners.append(run)
    arrivals = poisson(random.Random(7), 0.75 * CAPACITY, LASTS_S, 500, 200)
    times = world.run(arrivals)
    assert len(broken(times)) <= len(times) // 50
    assert goodput(times) >= 0.4 * CAPACITY
    trusting = World(slo(PRICER), device).run(arrivals)
    assert goodput(trusting) < 0.5 * goodput(times)


def test_a_small_cache_limits_how_many_are_let_in() -> None:
    world = World(slo(num_cache_tokens=4000 * BLOCK_SIZE), PRICER, num_blocks=4000)
    times = world.run(poisson(random.Random(8), 1.5 * CAPACITY, LASTS_S, 500, 200))
    assert len(broken(times)) <= len(times) // 50
    assert world.engine.scheduler.num_preemptions < 20


# ---------------------------------------------------------------------- who comes back when


def test_who_comes_back_when_told_is_let_in() -> None:
    policy = slo()
    world = World(policy, PRICER)
    world.run([Arrival(0.0, 500, 200)] * 200)
    refused = [t for t in world.times.values() if t.retry_after_s is not None]
    assert refused
    assert all(t.retry_after_s is not None and 0 < t.retry_after_s < 20 for t in refused)
    fresh = World(slo(), PRICER)
    last = refused[-1].retry_after_s
    assert last is not None
    times = fresh.run([*[Arrival(0.0, 500, 200)] * 200, Arrival(last, 500, 200)])
    assert times[-1].retry_after_s is None
    assert times[-1].keeps(TTFT_S, TPOT_S)


def test_a_refusal_is_a_fault_that_says_when() -> None:
    rig = Rig(policy=slo(Linear(base_s=1.0), tpot_s=2.0, ttft_s=1.2, max_num_seqs=1))
    rig.add(make_request("a", 16, max_tokens=8))
    rig.step()
    rig.step()
    with pytest.raises(Overloaded, match="time to the first token") as caught:
        rig.add(make_request("b", 16, arrival_time=2.0))
    assert caught.value.code == "overloaded"
    # its place is free when "a" has its 6 other tokens; then it takes 1 s, and 2 s are promised
    assert caught.value.retry_after_s == pytest.approx(6 * 1.0 + 1.0 - 0.9 * 2.0, rel=0.02)


def test_letting_one_in_must_not_make_another_late() -> None:
    """A long prompt has a later deadline, so a short one would go first and delay it."""
    pricer = Linear(base_s=0.001, per_token_s=1e-3, per_context_s=0.0)
    policy = slo(pricer, ttft_s=1.0, max_num_batched_tokens=1000)
    assert isinstance(policy.admit(make_request("long", 2000), 0.0), Admit)  # 4 s, takes 2
    answers = [policy.admit(make_request(f"s{i}", 100), 0.0) for i in range(8)]
    assert isinstance(answers[0], Admit)
    more = [policy.admit(make_request(f"m{i}", 900, arrival_time=1.0), 1.0) for i in range(3)]
    assert any(isinstance(answer, Refuse) for answer in more)


# ---------------------------------------------------------------------- order


def test_nearest_deadline_first_of_those_that_can_be_met() -> None:
    policy = slo(Linear(base_s=0.1, per_token_s=1e-3), ttft_s=1.0)
    early, late = make_request("a", arrival_time=0.0), make_request("b", arrival_time=0.5)
    for request in (early, late):
        assert isinstance(policy.admit(request, request.arrival_time), Admit)
    assert policy.rank(early, 0.6) == (IN_TIME, 1.0) < policy.rank(late, 0.6)
    assert policy.rank(early, 1.2) == (LATE, 1.0)
    assert policy.rank(late, 1.2) == (IN_TIME, 1.5) < policy.rank(early, 1.2)


def test_who_has_begun_goes_before_all_and_is_preempted_last() -> None:
    policy = slo()
    rig = Rig(policy=policy)
    first, second = make_request("a", max_tokens=8), make_request("b", arrival_time=2.0)
    rig.add(first)
    rig.step()
    rig.step()
    rig.add(second)
    assert policy.rank(first, 99.0)[0] == BEGUN
    assert policy.rank(first, 99.0) < policy.rank(second, 1.0)


def test_long_prompts_are_promised_what_they_need() -> None:
    policy = slo(Linear(base_s=0.0, per_token_s=1e-3, per_context_s=0.0), ttft_s=1.0)
    assert policy.rank(make_request("long", 3000), 0.0) == (IN_TIME, 6.0)
    assert policy.rank(make_request("short", 100), 0.0) == (IN_TIME, 1.0)


# ---------------------------------------------------------------------- every kind of request


class Willing(SLO):
    """Lets everybody in, however late they will be."""

    def _lateness(self, entry: object, now: float) -> float:
        return min(0.0, super()._lateness(entry, now))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(12))
def test_everything_that_can_happen_to_an_engine(seed: int) -> None:
    """Forks, beam searches, drafts, faults, aborts: each step is checked, and everything ends."""
    world = simulated_world.World(seed)
    case = world.case
    policy = Willing(
        Linear(base_s=0.5, per_token_s=0.1),
        ttft_s=random.Random(seed).choice([1e9, 30.0]),
        tpot_s=random.Random(seed).choice([1.0, 0.1]),
        max_num_seqs=case.max_num_seqs,
        max_num_batched_tokens=case.max_num_batched_tokens,
        num_cache_tokens=case.num_blocks * case.block_size,
    )
    for holder in (world.scheduler, world.scheduler.running, world.scheduler.waiting):
        holder.policy = policy
    world.run(60)
    policy.token_budget([], 0.0)
    assert not policy._open, "nobody is remembered who has gone"


# ---------------------------------------------------------------------- how it is made


def setting(**changes: object) -> PolicySetting:
    options = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_cache_tokens": 1000,
        "ttft_slo_s": 1.0,
        "tpot_slo_s": 0.1,
        "pricer": PRICER,
    } | changes
    return PolicySetting(**options)  # type: ignore[arg-type]


def test_it_is_made_from_a_setting() -> None:
    policy = make_policy("slo", setting())
    assert isinstance(policy, SLO)
    assert (policy.ttft_s, policy.tpot_s, policy.max_num_seqs) == (1.0, 0.1, 4)


@pytest.mark.parametrize("missing", ["ttft_slo_s", "tpot_slo_s", "pricer"])
def test_without_promise_or_prices_there_is_no_policy(missing: str) -> None:
    with pytest.raises(ConfigError, match="policy slo needs"):
        make_policy("slo", setting(**{missing: None}))


def test_a_promise_that_cannot_be_kept_is_told(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("ridgeline").propagate = True
    make_policy("slo", setting(tpot_slo_s=1e-6))
    assert "cannot be kept" in caplog.text


def test_even_then_everybody_is_served() -> None:
    rig = Rig(policy=slo(Linear(base_s=0.5), tpot_s=1e-3, ttft_s=100.0, max_num_seqs=8))
    rig.add(*(make_request(f"r{i}") for i in range(6)))
    rig.run()
    assert not rig.scheduler.requests
