"""Do the shares of all requests sum to what the steps took, exactly?"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ridgeline.cost.pricer import StepPrice
from ridgeline.cost.roofline import step_cost
from ridgeline.observe.requests import NANO, RequestCosts
from ridgeline.observe.run import Run
from ridgeline.step import Listener, PricedStep, ScheduledRequest, StepPlan, StepShape
from tests.observe.priced import small_pricer
from tests.observe.recorded import RecordedWorld
from tests.observe.test_time_breakdown import Ticking


def random_shape(rng: random.Random) -> StepShape:
    rows = [(1, rng.randrange(200)) for _ in range(rng.randrange(6))]
    rows += [(rng.randint(2, 60), rng.randrange(60)) for _ in range(rng.randrange(4))]
    return tuple(rows) or ((1, 0),)


@pytest.mark.parametrize("seed", range(6))
def test_the_meter_says_what_the_cost_model_says(seed: int) -> None:
    print("seed", seed)
    rng, pricer = random.Random(seed), small_pricer()
    for _ in range(20):
        shape = random_shape(rng)
        num_logits = rng.randint(0, len(shape))
        price = pricer.price(shape, num_logits)
        cost = step_cost(pricer.setup, shape, num_logits)
        assert price.expected_s == pytest.approx(cost.expected_s, rel=1e-9)
        assert price.ideal_s == pytest.approx(cost.ideal_s, rel=1e-9)
        assert (price.flops, price.bytes) == pytest.approx((cost.flops, cost.bytes), rel=1e-12)
        attention = [op.op for op in cost.ops if op.op.kind.endswith("attention")]
        own = [pricer.own_work(new, before) for new, before in shape]
        assert sum(f for f, _ in own) == sum(op.count * op.flops for op in attention)
        assert sum(b for _, b in own) == sum(op.count * op.kv_bytes for op in attention)


@pytest.mark.parametrize("seed", range(6))
def test_shares_over_requests_sum_to_the_whole_exactly(seed: int, tmp_path: Path) -> None:
    """In a world with forks, beams, drafts, preemptions, aborts and faults; half of them ask."""
    print("seed", seed)
    world = RecordedWorld(seed, tmp_path / "log")
    world.clock = world.engine.clock = Ticking(seed)  # type: ignore[assignment]
    pricer = small_pricer()
    run, request_costs, asked = Run(pricer.price), RequestCosts(pricer), _Asking(seed)
    run.listeners += [request_costs, asked]
    asked.request_costs = request_costs
    world.engine.listeners += [run, asked]
    world.run(120)
    world.file.close()
    found = [
        request_cost
        for name in asked.names
        if (request_cost := request_costs.get(name)) is not None
    ]
    assert len(found) > 3
    for field in ("device_ns", "flops", "bytes"):
        parts = sum(getattr(request_cost, field) for request_cost in (*found, request_costs.others))
        assert parts == asked.whole[field]
        assert all(getattr(request_cost, field) >= 0 for request_cost in found)


class _Asking(Listener):
    """Asks for every second request, and adds up the steps by itself."""

    request_costs: RequestCosts

    def __init__(self, seed: int) -> None:
        self.names: set[str] = set()
        self.count = 0
        self.whole = {"device_ns": 0, "flops": 0, "bytes": 0}

    def on_add(self, request: object, now: float, fault: object) -> None:
        name = request.request_id  # type: ignore[attr-defined]
        self.count += 1
        if fault is None and name not in self.names and self.count % 2:
            self.names.add(name)
            self.request_costs.ask(name)

    def on_priced(self, step: PricedStep) -> None:
        self.whole["device_ns"] += round((step.ended - step.began) * NANO)
        self.whole["flops"] += round(step.price.flops)
        self.whole["bytes"] += round(step.price.bytes)


def priced(rows: list[tuple[str, int, int]], seconds: float) -> PricedStep:
    """A step of (id, tokens, start) that took so long."""
    pricer = small_pricer()
    plan = StepPlan(1, tuple(ScheduledRequest(i, s, n, ((),), True) for i, n, s in rows))
    price = pricer.price(plan.shape, len(rows))
    return PricedStep(plan, len(rows), 0.0, 0.0, seconds, 0.0, price, (), 0.0)


def test_equal_rows_get_equal_shares_and_a_longer_context_a_larger_one() -> None:
    request_costs = RequestCosts(small_pricer())
    for name in ("a", "b", "c"):
        request_costs.ask(name)
    request_costs.on_priced(priced([("a", 1, 3), ("b", 1, 3), ("c", 1, 20)], 3.0))
    a, b, c = (request_costs.get(name) for name in ("a", "b", "c"))
    assert a is not None
    assert b is not None
    assert c is not None
    assert abs(a.device_ns - b.device_ns) <= 1
    assert a.device_ns < c.device_ns < 1.1 * a.device_ns
    assert a.device_ns + b.device_ns + c.device_ns == 3 * NANO


def test_a_prompt_of_100_tokens_pays_about_100_times_what_a_token_pays() -> None:
    request_costs = RequestCosts(small_pricer())
    request_costs.ask("a")
    request_costs.on_priced(priced([("a", 1, 10), ("b", 100, 0)], 1.0))
    a = request_costs.get("a")
    assert a is not None
    assert request_costs.others.device_ns == pytest.approx(100 * a.device_ns, rel=0.2)
    request_costs.close("a")
    assert request_costs.get("a") is None


@pytest.mark.parametrize("seed", range(4))
def test_shares_follow_the_price_of_the_work(seed: int) -> None:
    """Each share is within a nanosecond of its part by price, all sum to the whole, and whether
    others have asked too changes nothing."""
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(50):
        shape = random_shape(rng)
        rows = [(f"r{i}", new, before) for i, (new, before) in enumerate(shape)]
        step = priced(rows, rng.random())
        shares = []
        for name, _, _ in rows:
            alone = RequestCosts(small_pricer())
            alone.ask(name)
            alone.on_priced(step)
            mine = alone.get(name)
            assert mine is not None
            assert mine.device_ns + alone.others.device_ns == round(step.seconds * NANO)
            shares.append(mine.device_ns)
        together = RequestCosts(small_pricer())
        for name, _, _ in rows:
            together.ask(name)
        together.on_priced(step)
        found = [request_cost.device_ns for i, _, _ in rows if (request_cost := together.get(i))]
        assert sum(found) == round(step.seconds * NANO)
        assert found[:-1] == shares[:-1]
        assert abs(found[-1] - shares[-1]) <= len(rows)


def test_a_step_that_nobody_asked_about_goes_to_the_others() -> None:
    request_costs = RequestCosts(small_pricer())
    step = priced([("a", 1, 10)], 0.5)
    request_costs.on_priced(step)
    request_costs.ask("b")
    request_costs.on_priced(step)
    assert request_costs.others.device_ns == NANO
    assert request_costs.others.flops == 2 * round(step.price.flops)
    assert isinstance(step.price, StepPrice)
