"""Every policy in the table loads, ranks, and keeps what it promises."""

from __future__ import annotations

import pytest

from ridgeline.errors import ConfigError
from ridgeline.formats import POLICIES
from ridgeline.scheduler.policies import make_policy
from ridgeline.scheduler.policies.base import Admit, Policy, PolicySetting
from ridgeline.scheduler.policies.priority import AGING_S, Priority
from tests.scheduler.policies.virtual_time import Linear
from tests.scheduler.rig import Rig, make_request

SETTING = PolicySetting(
    max_num_seqs=2,
    max_num_batched_tokens=64,
    num_cache_tokens=32,
    ttft_slo_s=60.0,
    tpot_slo_s=1.0,
    pricer=Linear(),
)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policies_load_and_serve(name: str) -> None:
    policy = make_policy(name, SETTING)
    assert isinstance(policy, Policy)
    requests = [make_request(f"r{i}", arrival_time=float(i), priority=-i) for i in range(5)]
    if policy.rank_is_fixed:
        ranks = [[policy.rank(r, now) for r in requests] for now in (0.0, 1e6)]
        assert ranks[0] == ranks[1]
    assert isinstance(policy.admit(requests[0], 0.0), Admit)
    rig = Rig(policy=policy, seats=2, num_blocks=8)
    rig.add(*requests)
    rig.run()
    assert all(len(request.token_ids) == 8 for request in requests)


def test_an_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="fair, fcfs, priority, slo"):
        make_policy("lifo", SETTING)


def test_one_step_of_priority_is_worth_a_minute() -> None:
    policy = Priority()
    early = make_request("a", arrival_time=0.0, priority=1)
    better = make_request("b", arrival_time=AGING_S - 1, priority=0)
    late = make_request("c", arrival_time=AGING_S + 1, priority=0)
    assert policy.rank(better, 0.0) < policy.rank(early, 0.0) < policy.rank(late, 0.0)


def test_defaults_leave_everything_as_configured() -> None:
    policy, request = Policy(), make_request("a", arrival_time=3.0)
    assert policy.rank(request, 9.0) == (3.0,)
    assert policy.token_budget([request], 0.0) is None
    assert policy.num_drafts(request, ()) is None
    assert not policy.rank_is_fixed
