"""Without chunked prefill a prompt is computed in one step, or waits for one."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.errors import RequestFault
from tests.scheduler.rig import Rig, entries, make_request


def whole(budget: int = 20, **options: Any) -> Rig:
    return Rig(num_blocks=60, budget=budget, chunked_prefill=False, **options)


def test_a_prompt_that_does_not_fit_waits_for_the_next_step() -> None:
    rig = whole()
    rig.add(make_request("a", 9, 4), make_request("b", 9, 4), make_request("c", 9, 4))
    plans = rig.run()
    assert {n: e.num_tokens for n, e in entries(plans[0]).items()} == {"a": 9, "b": 9}
    assert {n: e.num_tokens for n, e in entries(plans[1]).items()} == {"a": 1, "b": 1, "c": 9}
    chunked = Rig(num_blocks=60, budget=20)
    chunked.add(make_request("a", 9, 4), make_request("b", 9, 4), make_request("c", 9, 4))
    assert entries(chunked.plan())["c"].num_tokens == 2


def test_what_is_cached_need_not_fit() -> None:
    rig = whole(budget=22, block_size=4, seats=2)
    prompt = tuple(range(17))
    rig.add(make_request("a", prompt=prompt, max_tokens=2))
    rig.run()
    rig.add(make_request("b", 9, 4), make_request("c", prompt=prompt, max_tokens=4))
    plan = entries(rig.plan())
    assert {name: (e.start, e.num_tokens) for name, e in plan.items()} == {
        "b": (0, 9),
        "c": (16, 1),
    }


def test_nobody_overtakes_a_prompt_that_waits() -> None:
    rig = whole(seats=3)
    rig.add(make_request("a", 9, 4), make_request("b", 12, 4), make_request("c", 2, 4))
    assert entries(rig.step()).keys() == {"a"}
    assert entries(rig.step()).keys() == {"a", "b", "c"}


def test_a_request_that_no_step_could_compute_is_refused() -> None:
    """Beside the decodes of all other seats, and after its last preemption."""
    rig = whole(budget=20, seats=4)
    rig.add(make_request("a", 9, 9))
    with pytest.raises(RequestFault, match="max_num_batched_tokens 21") as caught:
        rig.add(make_request("b", 10, 9))
    assert caught.value.code == "context_length_exceeded"


def test_preempted_requests_come_back_whole() -> None:
    rig = Rig(num_blocks=9, block_size=4, budget=40, seats=3, chunked_prefill=False)
    for name in "abc":
        rig.add(make_request(name, 9, 12))
    plans = rig.run()
    assert rig.scheduler.num_preemptions > 0
    opened = [entries(plan)[row.request_id] for plan in plans for row in plan.new]
    assert all(entry.samples for entry in opened)
