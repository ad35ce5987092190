"""Tenants who share an engine: does a calm one notice a flood, and has each its share?"""

from __future__ import annotations

from collections import defaultdict

import pytest

from ridgeline.scheduler.policies.fair import Fair
from ridgeline.step import Listener, StepPlan
from tests.scheduler.policies.virtual_time import Arrival, Linear, Times, World
from tests.scheduler.rig import Rig, make_request
from tests.simulated_world import Saturated

PRICER = Linear(0.06, 4e-4, 4e-7)  # steps ten times as long as usual: a minute has a thousand
SEATS, BUDGET = 16, 1024


class Shares(Listener):
    """Seconds of steps by tenant between two times, counted here anew: of a step's time what all
    rows use together by tokens, and what its context costs to each row."""

    def __init__(self, world: World, begin: float, end: float) -> None:
        self.world, self.begin, self.end = world, begin, end
        self.seconds: defaultdict[bytes, float] = defaultdict(float)

    def on_plan(self, plan: StepPlan, now: float) -> None:
        if not self.begin <= now < self.end:
            return
        num_tokens = sum(entry.num_tokens for entry in plan.scheduled)
        together = max(PRICER.base_s, PRICER.per_token_s * num_tokens)
        for entry in plan.scheduled:
            tenant = self.world.engine.scheduler.requests[entry.request_id].tenant
            context = PRICER.per_context_s * (entry.start + entry.num_tokens)
            self.seconds[tenant] += together * entry.num_tokens / num_tokens + context


def run(*streams: list[Arrival], seen: tuple[float, float] = (0.0, 0.0)) -> tuple[Shares, World]:
    world = World(
        Fair(PRICER), PRICER, max_num_seqs=SEATS, max_num_batched_tokens=BUDGET, max_in_flight=1
    )
    shares = Shares(world, *seen)
    world.engine.listeners.append(shares)
    world.run(sorted((a for stream in streams for a in stream), key=lambda a: a.at))
    return shares, world


def flood(tenant: bytes, count: int, prompt: int, output: int, **fields: object) -> list[Arrival]:
    return [Arrival(0.0, prompt, output, tenant, **fields) for _ in range(count)]  # type: ignore[arg-type]


def eights(tenant: bytes, count: int, prompt: int, output: int) -> list[Arrival]:
    """Calls with n=8."""
    return [
        Arrival(0.0, prompt, output, tenant, is_fork=i > 0) for _ in range(count) for i in range(8)
    ]


def firsts(world: World, arrivals: list[Arrival]) -> list[float]:
    times = {t.arrived_at: t for t in world.times.values()}
    found: list[Times] = [times[a.at] for a in arrivals]
    return [t.ttft_s for t in found]


@pytest.mark.parametrize(
    "loud",
    [eights(b"loud", 5, 300, 300), flood(b"loud", 30, 4000, 2), flood(b"loud", 40, 20, 400)],
    ids=["n=8", "long prompts", "long answers"],
)
@pytest.mark.parametrize("num_prompt", [30, 900])
def test_a_calm_tenant_hardly_notices_a_flood(loud: list[Arrival], num_prompt: int) -> None:
    calm = [Arrival(5.0 + 9 * i, num_prompt, 20, b"calm") for i in range(4)]
    alone = firsts(run(calm)[1], calm)
    _, world = run(loud, calm)
    longest = max(seconds for _, seconds in world.device.steps)
    for one, both in zip(alone, firsts(world, calm), strict=True):
        assert both <= max(2 * one, longest) + longest  # the step that runs, and its own


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0)])
def test_a_minute_of_seconds_goes_by_weight(weights: tuple[float, float]) -> None:
    """One reads long prompts, the other writes long answers: it is the seconds that are shared."""
    readers = flood(b"a", 200, 900, 4, weight=weights[0])
    writers = flood(b"b", 60, 30, 300, weight=weights[1])
    shares, _ = run(readers, writers, seen=(0.0, 60.0))
    for tenant, weight in zip((b"a", b"b"), weights, strict=True):
        share = shares.seconds[tenant] / sum(shares.seconds.values())
        assert share == pytest.approx(weight / sum(weights), rel=0.1)


def test_eight_answers_cost_eight() -> None:
    """One asks for eight answers at a time, one for single ones: both get the same."""
    shares, _ = run(eights(b"a", 40, 40, 100), flood(b"b", 320, 40, 100), seen=(0.0, 60.0))
    assert shares.seconds[b"a"] == pytest.approx(shares.seconds[b"b"], rel=0.1)


def test_who_was_idle_has_no_credit() -> None:
    """It comes after the others have shared the engine for long, and gets its third from there."""
    late = [Arrival(60.0, 30, 100, b"late") for _ in range(100)]
    others = flood(b"a", 300, 30, 100) + flood(b"b", 300, 30, 100)
    shares, _ = run(others, late, seen=(62.0, 122.0))
    assert shares.seconds[b"late"] / sum(shares.seconds.values()) == pytest.approx(1 / 3, rel=0.1)


def test_making_way_loses_little_work() -> None:
    """Who comes late soon holds half of the seats; of what is computed little is computed twice."""
    loud = flood(b"loud", 60, 30, 200)
    calm = [Arrival(10.0, 30, 200, b"calm") for _ in range(60)]
    _, world = run(loud, calm)
    computed = sum(new for shape, _ in world.device.steps for new, _ in shape)
    assert 0 < world.engine.scheduler.num_preemptions < 60
    assert computed < 1.02 * sum(a.num_prompt + a.num_output for a in (*loud, *calm))


def test_a_full_cache_makes_way_too() -> None:
    rig = Rig(num_blocks=20, block_size=4, policy=Fair(), seats=8)
    rig.add(*[make_request(f"loud{i}", 16, 40, tenant=b"loud") for i in range(5)])
    for _ in range(3):
        rig.step()
    rig.add(make_request("calm", 16, 4, tenant=b"calm"))
    plans = [rig.step() for _ in range(3)]
    assert any(entry.request_id == "calm" for plan in plans for entry in plan.scheduled)


def test_debts_are_forgotten_when_nobody_is_left() -> None:
    policy = Fair()
    rig = Rig(policy=policy, seats=2, num_blocks=64)
    rig.add(*[make_request(f"{t}{i}", tenant=t.encode()) for t in "ab" for i in range(3)])
    rig.run()
    assert not policy._lanes


@pytest.mark.parametrize("seed", [2, 4])
def test_shares_are_within_a_tenth_over_a_thousand_steps(seed: int) -> None:
    Saturated(seed).run(1000)


def test_only_who_is_below_its_share_gains_a_seat_of_who_is_above() -> None:
    policy = Fair()
    for name in (b"a", b"b", b"c"):
        policy.admit(make_request(name.decode(), tenant=name), 0.0)
        policy.on_line(name, ())
    held = {b"a": 9 / 16, b"b": 6 / 16, b"c": 1 / 16}
    assert policy.yields(b"c", 1 / 16, held) == b"a"
    assert policy.yields(b"b", 1 / 16, held) is None
    assert policy.yields(b"c", 1 / 16, {b"a": 5 / 16, b"b": 5 / 16, b"c": 5 / 16}) is None
