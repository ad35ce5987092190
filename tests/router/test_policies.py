"""Which replica is chosen: by chance, by load, by prefix, and never one that is not ready."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from ridgeline import registry
from ridgeline.router import POLICIES
from ridgeline.router.policies import (
    LeastLoaded,
    NoReplica,
    PrefixAware,
    ReplicaView,
    RequestView,
    RouterPolicy,
    TwoChoices,
)
from ridgeline.router.policies import Random as ByChance

REQUEST = RequestView(1000)


def choices(policy: RouterPolicy, *replicas: ReplicaView, times: int = 400) -> Counter[int]:
    rng = Random(3)
    return Counter(policy.choose(REQUEST, replicas, rng) for _ in range(times))


def test_by_chance_all_get_their_share() -> None:
    found = choices(ByChance(), ReplicaView(50), ReplicaView(), ReplicaView(), times=3000)
    assert all(found[i] == pytest.approx(1000, rel=0.1) for i in range(3))


def test_least_loaded_counts_those_that_wait() -> None:
    views = (ReplicaView(3, 2), ReplicaView(4, 0), ReplicaView(0, 5))
    assert choices(LeastLoaded(), *views) == {1: 400}


def test_of_equally_many_requests_the_fewer_tokens_win() -> None:
    views = (ReplicaView(2, num_pending_tokens=9), ReplicaView(2, num_pending_tokens=8))
    assert choices(LeastLoaded(), *views) == {1: 400}


def test_equal_loads_are_shared_out() -> None:
    assert set(choices(LeastLoaded(), ReplicaView(), ReplicaView(), ReplicaView(9))) == {0, 1}


def test_two_looked_at_never_take_the_worst_of_three() -> None:
    found = choices(TwoChoices(), ReplicaView(1), ReplicaView(2), ReplicaView(3))
    assert set(found) == {0, 1}
    assert found[0] == pytest.approx(400 * 2 / 3, rel=0.15)


def test_two_choices_keep_the_longest_queue_shorter_than_chance() -> None:
    def longest(policy: RouterPolicy) -> int:
        rng, load = Random(5), [0] * 50
        for _ in range(2000):
            load[policy.choose(REQUEST, [ReplicaView(n) for n in load], rng)] += 1
        return max(load)

    assert longest(LeastLoaded()) == 40
    assert longest(TwoChoices()) <= 44
    assert longest(ByChance()) > 50


def test_the_longest_prefix_wins() -> None:
    views = (
        ReplicaView(1),
        ReplicaView(8, num_cached_tokens=500),
        ReplicaView(2, num_cached_tokens=400),
    )
    assert choices(PrefixAware(), *views) == {1: 400}


def test_equal_prefixes_go_to_the_less_loaded() -> None:
    views = (ReplicaView(5, num_cached_tokens=500), ReplicaView(4, num_cached_tokens=500))
    assert choices(PrefixAware(), *views) == {1: 400}


def test_an_overloaded_one_loses_in_spite_of_its_prefix() -> None:
    views = (ReplicaView(20, num_cached_tokens=900), ReplicaView(10), ReplicaView(11))
    assert choices(PrefixAware(), *views) == {1: 400}


def test_busy_is_not_overloaded() -> None:
    """7 more than nothing are few; 12 more than 100 are no more than the others have."""
    few = (ReplicaView(7, num_cached_tokens=900), ReplicaView(0))
    assert choices(PrefixAware(), *few) == {0: 400}
    many = (ReplicaView(112, num_cached_tokens=900), ReplicaView(100))
    assert choices(PrefixAware(), *many) == {0: 400}


def test_a_prefix_too_short_to_matter_gives_way_to_load() -> None:
    views = (ReplicaView(5, num_cached_tokens=99), ReplicaView(4))
    assert choices(PrefixAware(), *views) == {1: 400}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_one_that_is_not_ready_gets_nothing(name: str) -> None:
    policy = registry.load(POLICIES, name, "router policy")()
    views = (
        ReplicaView(is_ready=False, num_cached_tokens=1000),
        ReplicaView(9),
        ReplicaView(is_ready=False),
    )
    assert choices(policy, *views) == {1: 400}
    with pytest.raises(NoReplica, match="none of the 1"):
        policy.choose(REQUEST, views[:1], Random(0))
