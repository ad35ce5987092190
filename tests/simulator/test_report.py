"""Timelines turned into figures: each against a value worked out by hand."""

from __future__ import annotations

import pytest

from ridgeline.errors import ConfigError
from ridgeline.simulator.report import (
    RequestTimeline,
    Slo,
    StepSample,
    Summary,
    mean_in_system,
    percentile,
    spread,
    summarize,
    thinned,
    used_blocks,
)


def timeline(
    name: str, arrival: float, first: float | None, end: float | None, num_output: int = 11
) -> RequestTimeline:
    return RequestTimeline(
        name, arrival, 100, num_output, started_s=first, first_token_s=first, finished_s=end
    )


FAST = timeline("fast", 0.0, 1.0, 2.0)  # TTFT 1, TPOT 0.1, E2E 2
SLOW = timeline("slow", 1.0, 4.0, 9.0)  # TTFT 3, TPOT 0.5, E2E 8
LOST = timeline("lost", 2.0, None, None)
LOST.refused = "too long"


def step(start: float, end: float, rows: int, used: int, **more: float) -> StepSample:
    return StepSample(start, end, 10, rows, rows * 10, rows, 0, used, **more)  # type: ignore[arg-type]


STEPS = [step(0.0, 4.0, 2, 50), step(5.0, 9.0, 1, 30)]


def summary(**options: object) -> Summary:
    given = {"num_slots": 4, "num_blocks": 100} | options
    return summarize([FAST, SLOW, LOST], STEPS, **given)  # type: ignore[arg-type]


def test_the_times_of_one_request() -> None:
    assert (SLOW.ttft_s, SLOW.e2e_s, SLOW.queue_s) == (3.0, 8.0, 3.0)
    assert SLOW.tpot_s == pytest.approx(0.5)
    assert (LOST.ttft_s, LOST.tpot_s, LOST.e2e_s, LOST.is_finished) == (None, None, None, False)
    assert timeline("one", 0.0, 1.0, 1.0, num_output=1).tpot_s is None
    assert SLOW.as_json()["e2e_s"] == 8.0


def test_percentiles_lie_between_their_neighbours() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([7.0], 0.99) == 7.0
    found = spread([3.0, None, 1.0, 2.0])
    assert (found.mean, found.p50, found.max) == (2.0, 2.0, 3.0)
    assert found.p99 == pytest.approx(2.98)
    assert spread([None]).p50 is None


def test_rates_count_what_finished() -> None:
    got = summary()
    assert (got.num_requests, got.num_finished, got.num_refused) == (3, 2, 1)
    assert got.duration_s == 9.0
    assert got.requests_per_s == pytest.approx(2 / 9)
    assert got.output_tokens_per_s == pytest.approx(22 / 9)
    assert got.input_tokens_per_s == pytest.approx(200 / 9)


def test_use_of_places_time_and_blocks() -> None:
    got = summary()
    assert got.busy_share == pytest.approx(8 / 9)
    assert got.num_steps == 20
    assert got.slot_share == pytest.approx((10 * 2 + 10 * 1) / (20 * 4))
    assert got.num_idle_slot_steps == 20 * 4 - 30
    assert got.kv_mean_share == pytest.approx((50 * 4 + 30 * 4) / 8 / 100)
    assert got.kv_max_share == 0.5


def test_goodput_needs_both_promises_kept() -> None:
    assert summary().goodput_per_s is None
    assert summary(slo=Slo()).slo_share is None
    assert summary(slo=Slo(ttft_s=1.0)).goodput_per_s == pytest.approx(1 / 9)
    assert summary(slo=Slo(ttft_s=3.0, tpot_s=0.5)).slo_share == pytest.approx(2 / 3)
    assert summary(slo=Slo(ttft_s=3.0, tpot_s=0.09)).goodput_per_s == 0.0


def test_one_token_keeps_any_promise_between_tokens() -> None:
    assert Slo(tpot_s=1e-6).is_kept(timeline("one", 0.0, 1.0, 1.0, num_output=1))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_promise_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="TPOT"):
        Slo(tpot_s=value)


def test_money_is_what_the_whole_run_cost() -> None:
    got = summary(usd_per_hour=36.0)  # 9 seconds cost 0.09 dollars
    assert got.usd_per_million_output == pytest.approx(0.09 / 22 * 1e6)
    assert got.usd_per_million_tokens == pytest.approx(0.09 / 222 * 1e6)


def test_nothing_at_all_has_no_figures() -> None:
    got = summarize([], [], num_slots=1, num_blocks=1, usd_per_hour=1.0, slo=Slo(ttft_s=1.0))
    assert (got.requests_per_s, got.ttft_s.p50, got.usd_per_million_output) == (0.0, None, None)


def test_replicas_have_blocks_each() -> None:
    steps = [step(0.0, 4.0, 2, 50), step(0.0, 5.0, 1, 70, replica=1), step(5.0, 6.0, 1, 10)]
    assert list(used_blocks(steps, 2)) == [(4.0, 50, 0), (5.0, 50, 70), (6.0, 10, 70)]
    got = summarize([FAST], steps, num_slots=4, num_blocks=100, num_replicas=2)
    assert got.kv_max_share == pytest.approx(120 / 200)
    assert got.busy_share == pytest.approx((5 + 5) / (6 * 2))


def test_requests_inside_are_averaged_over_time() -> None:
    """2 s of one and 8 s of the other in 10 s; half as many within the first 2 s and so on."""
    assert mean_in_system([FAST, SLOW], 0.0, 10.0) == pytest.approx(1.0)
    assert mean_in_system([FAST, SLOW], 0.0, 2.0) == pytest.approx(1.5)


def test_curves_are_thinned_to_their_ends() -> None:
    assert thinned(list(range(1001)), 11) == list(range(0, 1001, 100))
    assert thinned([1, 2], 11) == [1, 2]
