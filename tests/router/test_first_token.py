"""Does the least predicted first token keep prefixes together and loads even? By hand, and on
simulated replicas."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from ridgeline.router.policies import FirstToken, LeastLoaded, ReplicaView, RequestView
from ridgeline.router.speeds import PricedSpeed
from ridgeline.simulator.report import RequestTimeline
from ridgeline.simulator.simulation import Machine, Options, Outage, Simulation
from ridgeline.simulator.workload import Arrival, Workload
from tests.router.knowing import Knowing
from tests.simulator.test_lessons import Linear
from tests.simulator.worlds import LinearPricer

MACHINE = Machine(Linear(), 1 << 14)


def chosen(*views: ReplicaView) -> set[int]:
    rng = Random(3)
    return {FirstToken().choose(RequestView(1000), views, rng) for _ in range(50)}


def test_seconds_decide_between_a_prefix_and_a_queue() -> None:
    """1,000 tokens a second: 600 cached tokens are worth 0.6 s of waiting, not more."""
    cold = ReplicaView()
    assert chosen(ReplicaView(num_pending_tokens=500, num_cached_tokens=600), cold) == {0}
    assert chosen(ReplicaView(num_pending_tokens=700, num_cached_tokens=600), cold) == {1}
    assert chosen(ReplicaView(slot_wait_s=0.7, num_cached_tokens=600), cold) == {1}


def test_a_slower_one_must_have_more_of_the_prompt() -> None:
    fast = ReplicaView(prompt_tokens_per_s=4000)
    assert chosen(ReplicaView(num_cached_tokens=700), fast) == {1}
    assert chosen(ReplicaView(num_cached_tokens=800), fast) == {0}
    assert chosen(ReplicaView(step_s=0.5), ReplicaView(prompt_tokens_per_s=900)) == {1}


def test_what_is_nearly_equal_goes_to_the_longest_prefix_and_then_by_chance() -> None:
    """1.02 s is the least of these; 5 % more are 1.071 s."""
    held = ReplicaView(num_pending_tokens=140, num_cached_tokens=100)
    assert chosen(ReplicaView(), held, ReplicaView()) == {1}
    over = ReplicaView(num_pending_tokens=160, num_cached_tokens=100)
    assert chosen(ReplicaView(), over, ReplicaView()) == {0, 2}


# ---------------------------------------------------------------------- simulated


def shared(num_prefixes: int, rate: float, *, hot: float = 0.0, count: int = 1000) -> Workload:
    """Prompts that begin with one of so many texts of 2,048 tokens, `hot` of them with the first,
    and end with 128 of their own."""
    rng, now, made = Random(7), 0.0, []
    for index in range(count):
        now += rng.expovariate(rate)
        which = rng.randrange(num_prefixes) if rng.random() >= hot else 0
        hashes = tuple(100 * which + n for n in range(4))
        made.append(Arrival(now, 4 * 512 + 128, 64, hashes, id=str(index)))
    return tuple(made)


def answered(work: Workload, num_replicas: int, *outages: Outage) -> list[RequestTimeline]:
    """What becomes of them behind a router that knows what it sent, on so many replicas."""
    policy = Knowing(FirstToken(), work, num_replicas)
    options = Options(num_replicas=num_replicas, router=policy, outages=outages)
    return Simulation(MACHINE, work, options, rng=Random(1)).run().requests


def cached_share(requests: list[RequestTimeline]) -> float:
    return sum(r.num_cached for r in requests) / sum(r.num_input for r in requests)


def most_over_mean(requests: list[RequestTimeline], num_replicas: int) -> float:
    """Tokens that the busiest one computed, over the mean."""
    loads = Counter[int | None]()
    for request in requests:
        loads[request.replica] += request.num_input - request.num_cached + request.num_output
    return max(loads.values()) * num_replicas / loads.total()


@pytest.mark.parametrize("hot", [0.0, 0.3])
def test_four_replicas_find_nearly_what_one_would_and_share_the_work(hot: float) -> None:
    work = shared(64, 30.0 if not hot else 45.0, hot=hot)
    one, four = answered(work, 1), answered(work, 4)
    assert cached_share(four) >= 0.9 * cached_share(one)
    assert most_over_mean(four, 4) <= 1.2


def test_a_slow_replica_gets_what_it_can_do() -> None:
    """A quarter of the speed of the others: by load alone its users wait."""
    slow = Linear(step_s=0.040, token_s=0.0004)
    work = shared(64, 20.0, count=400)

    def latest(policy: FirstToken | LeastLoaded) -> tuple[float, int]:
        options = Options(num_replicas=4, router=Knowing(policy, work, 4))
        simulation = Simulation(MACHINE, work, options, rng=Random(1))
        last = simulation.replicas[3]
        last.engine.executor.pricer = slow
        last._speeds = PricedSpeed(slow, options.max_num_batched_tokens)
        report = simulation.run()
        by_replica = Counter(r.replica for r in report.requests)
        return report.summary().ttft_s.p99 or 0.0, by_replica[3]

    (by_seconds, few), (by_load, many) = latest(FirstToken()), latest(LeastLoaded())
    assert few < many
    assert by_seconds < 0.6 * by_load


def test_one_that_comes_and_goes_loses_nobody() -> None:
    flaps = [Outage(2, start, start + 0.4) for start in (0.5, 1.2, 1.9, 2.6)]
    work = shared(16, 40.0, count=200)
    requests = answered_again(work, *flaps)
    assert all(r.is_finished for r in requests)
    assert sum(r.num_retries for r in requests) > 0
    assert Counter(r.replica for r in requests)[2] < 50


def answered_again(work: Workload, *outages: Outage) -> list[RequestTimeline]:
    """Requests whose replica is lost come to the router twice: it sees the caches themselves."""
    options = Options(num_replicas=4, router=FirstToken(), outages=outages)
    return Simulation(MACHINE, work, options, rng=Random(1)).run().requests


# ---------------------------------------------------------------------- speeds


def test_a_price_is_asked_once_for_each_power_of_two() -> None:
    speeds = PricedSpeed(LinearPricer(per_key_s=0.0), 1000)
    idle, beside = speeds.beside(0, 0), speeds.beside(5, 5 * 100)
    assert idle.step_s == pytest.approx(0.011 + 0.0007)
    assert idle.tokens_per_s == pytest.approx(1000 / (0.011 + 0.7))
    assert beside.step_s == pytest.approx(0.011 + 5 * 0.0007)  # four rows, as for 4 to 7
    assert speeds.beside(7, 7 * 127) is beside
