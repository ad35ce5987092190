"""Generated work: rates, spread of gaps, seeds, lengths, and tokens that share what they should."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import mean, pstdev

import pytest

from ridgeline.errors import ConfigError
from ridgeline.simulator.workload import (
    DEFAULT_CV,
    Arrival,
    Lengths,
    Workload,
    all_at_once,
    at_rate,
    fixed,
    generate,
    in_order,
    mean_rate,
    rearranged,
)


def made(arrivals: str, rate: float = 5.0, count: int = 20_000, seed: int = 1) -> Workload:
    rng = Random(seed)
    return generate(
        rng,
        rate=rate,
        num_requests=count,
        num_input=fixed(10),
        num_output=Lengths(1, 9),
        arrivals=arrivals,
    )


def gaps(workload: Workload) -> list[float]:
    return [b.time_s - a.time_s for a, b in pairwise(workload)]


@pytest.mark.parametrize(
    ("arrivals", "cv"), [("poisson", 1.0), ("bursty", DEFAULT_CV), ("uniform", 0.0)]
)
def test_gaps_have_the_mean_and_the_spread_of_their_kind(arrivals: str, cv: float) -> None:
    found = gaps(made(arrivals))
    assert mean(found) == pytest.approx(1 / 5, rel=0.06)
    assert pstdev(found) / mean(found) == pytest.approx(cv, rel=0.06, abs=1e-9)
    assert min(found) >= 0


def test_poisson_gaps_forget() -> None:
    """The chance to wait longer than two means is exp(-2)."""
    found = gaps(made("poisson"))
    assert sum(gap > 0.4 for gap in found) / len(found) == pytest.approx(0.1353, abs=0.01)


def test_the_same_seed_makes_the_same_work() -> None:
    assert made("bursty", count=50) == made("bursty", count=50)
    assert made("bursty", count=50) != made("bursty", count=50, seed=2)


def test_lengths_cover_their_range() -> None:
    work = made("uniform", count=2000)
    assert {a.num_output for a in work} == set(range(1, 10))
    assert {a.num_input for a in work} == {10}
    assert Lengths(1, 9).mean == 5


def test_rates_can_be_changed_and_keep_the_pattern() -> None:
    work = made("poisson", count=100)
    faster = at_rate(work, 50.0)
    assert mean_rate(faster) == pytest.approx(50.0)
    factor = mean_rate(work) / 50.0
    assert gaps(faster) == pytest.approx([gap * factor for gap in gaps(work)])


def test_requests_can_arrive_anew() -> None:
    work = tuple(Arrival(5.0, n, n, (n,), f"r{n}") for n in range(1, 2001))
    again = rearranged(work, Random(3), 8.0, "poisson")
    assert [(a.num_input, a.prefix_hashes, a.id) for a in again] == [
        (a.num_input, a.prefix_hashes, a.id) for a in work
    ]
    assert mean_rate(again) == pytest.approx(8.0, rel=0.08)
    with pytest.raises(ConfigError, match="rate"):
        rearranged(work, Random(3), 0.0, "poisson")


def test_order_ids_and_start_are_set_right() -> None:
    work = in_order([Arrival(9.0, 1, 1), Arrival(7.0, 2, 2, id="mine")])
    assert [(a.time_s, a.id, a.num_input) for a in work] == [(0.0, "mine", 2), (2.0, "1", 1)]


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate"):
        made("poisson", rate=rate, count=2)


@pytest.mark.parametrize("count", [0, -3, 10**9])
def test_a_count_that_is_none_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="requests"):
        made("poisson", count=count)


def test_unknown_arrivals_are_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="poisson, bursty, uniform"):
        made("chaotic", count=1)


@pytest.mark.parametrize("bounds", [(0, 4), (5, 4), (-1, 1), (1, 1 << 40)])
def test_lengths_that_are_none_are_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="length"):
        Lengths(*bounds)


def test_what_arrives_at_once_has_no_rate() -> None:
    with pytest.raises(ConfigError, match="at once"):
        at_rate(all_at_once([(1, 1), (2, 2)]), 3.0)


# ---------------------------------------------------------------------- tokens


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def test_equal_hashes_make_equal_tokens_and_nothing_else_does() -> None:
    first = Arrival(0.0, 1300, 1, (7, 8, 9)).tokens(0)
    second = Arrival(0.0, 1500, 1, (7, 8, 10)).tokens(1)
    assert (len(first), len(second)) == (1300, 1500)
    assert common(first, second) == 1024


def test_without_hashes_nothing_is_shared() -> None:
    first, second = (Arrival(0.0, 64, 1).tokens(n) for n in (0, 1))
    assert common(first, second) == 0
    assert len(first) == 64


def test_what_the_hashes_leave_out_is_of_its_own() -> None:
    first, second = (Arrival(0.0, 1000, 1, (3,)).tokens(n) for n in (0, 1))
    assert common(first, second) == 512


def test_known_tokens_are_taken_as_they_are() -> None:
    assert Arrival(0.0, 3, 1, prompt=(5, 6, 7)).tokens(4) == (5, 6, 7)
