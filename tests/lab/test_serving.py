"""Do figures of the fleet keep the laws of queues, and those of a published design?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ridgeline.errors import ConfigError, DoesNotFit, RequestFault
from ridgeline.lab.page import Answer, read_inputs
from ridgeline.lab.pages.serving import PAGE, Drawing, fleet_of


def told(**inputs: Any) -> Iterator[float | Answer[Drawing]]:
    return PAGE.answer(read_inputs(PAGE, inputs))  # type: ignore[return-value]


def first(**inputs: Any) -> Answer[Drawing]:
    """The run alone; what follows is given up, as when a slider moves on."""
    steps = told(**inputs)
    found = next(step for step in steps if isinstance(step, Answer))
    steps.close()  # type: ignore[attr-defined]
    return found


def whole(**inputs: Any) -> Answer[Drawing]:
    *before, last = told(**inputs)
    shares = [step for step in before if isinstance(step, float)]
    assert shares == sorted(shares)
    assert isinstance(last, Answer)
    return last


def value(found: Answer[Drawing], name: str) -> float:
    return next(one.value for one in found.figures if one.name == name)


SMALL: dict[str, Any] = {"model": "llama-3.1-8b", "weights": "bf16", "tp": 1, "num_output": 60}


def test_littles_law() -> None:
    """Requests in the fleet = arrivals a second x time in it, in a run that is long."""
    found = first(**SMALL, rate=20.0, requests=1000, gpus=2)
    drawing = found.drawing
    e2e = sum(end - came for came, _, _, end, *_ in drawing.requests) / len(drawing.requests)
    assert found.guess is not None
    assert found.guess.value == pytest.approx(20.0 * e2e, rel=0.06)
    middle = [sum(n) for n in zip(drawing.waiting, drawing.prefill, drawing.decode, strict=True)]
    assert sum(middle[60:180]) / 120 == pytest.approx(20.0 * e2e, rel=0.15)


def test_everybody_who_comes_is_somewhere_and_leaves() -> None:
    drawing = first(**SMALL, rate=20.0, requests=100, gpus=2).drawing
    assert drawing.waiting[-1] == drawing.prefill[-1] == drawing.decode[-1] == 0
    for at, *counts in zip(
        drawing.times, drawing.waiting, drawing.prefill, drawing.decode, strict=True
    ):
        inside = sum(came <= at < end for came, _, _, end, *_ in drawing.requests)
        assert sum(counts) == pytest.approx(inside, abs=1)  # times are rounded
    assert drawing.e2e == sorted(drawing.e2e)
    assert max(drawing.cache) <= 1


def test_the_capacity_of_a_published_design() -> None:
    """70B in fp8 on eight H100 with batch 64: another's calibrated model says 19.8 requests/s of
    500 + 200 tokens, and its text 25; at the text's own 20 ms a step it is 15.9."""
    found = whole(gpus=8, tp=8, weights="fp8", max_num_seqs=64, rate=25.0, requests=300)
    assert found.drawing.capacity == pytest.approx(19.8, rel=0.15)
    assert "the queue grows" in found.sentence
    assert [one.is_saturated for one in found.drawing.rates] == [False] * 5 + [True]
    p99 = [one.p99_s for one in found.drawing.rates]
    assert p99 == sorted(p99)


def test_static_batches_give_way_sooner() -> None:
    common = {**SMALL, "gpus": 1, "max_num_seqs": 8, "requests": 150, "rate": 5.0}
    static, other = whole(**common, batching="static"), whole(**common)
    assert (static.drawing.capacity or 0) < 0.75 * (other.drawing.capacity or 0)


def test_a_lost_replica_makes_requests_begin_anew() -> None:
    lost, kept = first(**SMALL, outage=True, rate=30.0), first(**SMALL, rate=30.0)
    assert lost.drawing.outage is not None
    assert "had to begin anew" in lost.sentence
    assert value(lost, "answered, p99") > value(kept, "answered, p99")
    start, end = lost.drawing.outage
    late = [replica for came, *_, replica in lost.drawing.requests if start < came < end]
    assert late
    assert 0 not in late


def test_a_router_that_looks_for_beginnings_finds_them() -> None:
    common = {**SMALL, "gpus": 4, "prefixes": 16, "num_input": 3000, "rate": 12.0}
    by_prefix, by_chance = first(**common, router="prefix-aware"), first(**common, router="random")
    assert value(by_prefix, "first token, p99") < value(by_chance, "first token, p99")


def test_prompts_that_are_read_apart_delay_no_token() -> None:
    """And what is said of replicas that do both is what they do."""
    common = {**SMALL, "rate": 4.0, "num_input": 8000, "num_output": 200, "gpus": 4}
    apart, both = first(**common, readers=2), first(**common)
    assert value(apart, "time per token, p99") < value(both, "time per token, p99")
    for name in ("time per token, p99", "first token, p99"):
        assert value(apart, f"unseparated: {name}") == value(both, name)
    # 32 layers x 2 x 8 heads x 128 x 2 B = 131,072 B a token, over 450 GB/s and its latency.
    assert value(apart, "handing over a cache") == pytest.approx(8000 * 131_072 / 450e9, rel=0.4)
    assert value(apart, "handing over a cache") > 8000 * 131_072 / 450e9
    drawing = apart.drawing
    assert {reader for *_, reader, _ in drawing.requests} == {0, 1}
    assert {answers for *_, answers in drawing.requests} == {2, 3}
    assert drawing.waiting[-1] == drawing.prefill[-1] == drawing.decode[-1] == 0


def test_a_separated_fleet_gives_way_where_its_weaker_side_does() -> None:
    """That is answering here: 8 requests in 59 steps, as the first token comes from the other."""
    common = {**SMALL, "max_num_seqs": 8, "num_input": 200, "gpus": 2, "rate": 5.0, "requests": 50}
    found = whole(**common, readers=1)
    fleet = fleet_of(read_inputs(PAGE, {**common, "readers": 1}))  # type: ignore[arg-type]
    step_s = fleet.pricer.seconds(((1, 230),) * 8)
    assert found.drawing.capacity == pytest.approx(8 / (59 * step_s), rel=0.1)


def test_edges() -> None:
    with pytest.raises(RequestFault, match=r"gpus is 3; it must be a multiple of tp \(2\)"):
        first(gpus=3)
    with pytest.raises(DoesNotFit, match="does not fit"):
        first(weights="bf16", tp=1)
    with pytest.raises(ConfigError, match="readers is 2 of 2 replicas; each side needs one"):
        first(readers=2)
    with pytest.raises(ConfigError, match=r"readers: .* set it to 0, or change that"):
        first(readers=1, outage=True)
    with pytest.raises(RequestFault, match="acceptance must be between 0 and 1"):
        first(acceptance=2.0)
    drafted = first(**SMALL, drafts=3, acceptance=0.9, rate=2.0, requests=50)
    plain = first(**SMALL, rate=2.0, requests=50)
    assert value(drafted, "time per token, p99") < value(plain, "time per token, p99")
