"""Do the intervals have the properties that define them?"""

from __future__ import annotations

from math import sqrt
from random import Random
from statistics import stdev

import pytest

from ridgeline.errors import InternalError
from ridgeline.evaluation.intervals import Z95, clustered_share, ratio, wilson


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (5, 10), (10, 10), (95, 100), (199, 200)])
def test_wilson_ends_are_the_shares_that_the_score_test_just_allows(successes: int, n: int) -> None:
    for end in wilson(successes, n):
        # At an end p the observed share is Z95 standard errors (those of p) away.
        assert (successes / n - end) ** 2 == pytest.approx(Z95**2 * end * (1 - end) / n, abs=1e-12)
    low, high = wilson(successes, n)
    assert low < high


def test_wilson_without_a_success_in_closed_form() -> None:
    assert wilson(0, 10) == pytest.approx((0.0, Z95**2 / (10 + Z95**2)))
    assert wilson(10, 10) == pytest.approx((10 / (10 + Z95**2), 1.0))


def test_wilson_knows_nothing_from_nothing_and_refuses_nonsense() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    for successes, n in ((3, 2), (-1, 2)):
        with pytest.raises(InternalError, match="between 0 and n"):
            wilson(successes, n)


def test_wilson_contains_the_share() -> None:
    for n in range(1, 60):
        for successes in range(n + 1):
            low, high = wilson(successes, n)
            assert 0 <= low <= successes / n <= high <= 1


def test_ratio_with_equal_units_is_the_mean_and_its_error() -> None:
    values = [3.0, 5.0, 4.0, 9.0, 1.0]
    found = ratio(values, [1] * 5)
    assert found.value == pytest.approx(4.4)
    assert found.standard_error == pytest.approx(stdev(values) / sqrt(5))
    low, high = found.interval()
    assert (low, high) == pytest.approx(
        (4.4 - Z95 * stdev(values) / sqrt(5), 4.4 + Z95 * stdev(values) / sqrt(5))
    )


def test_one_unit_has_no_interval() -> None:
    assert ratio([6.0], [3]).value == 2.0
    assert ratio([6.0], [3]).interval() == (None, None)


def test_ratio_error_agrees_with_drawing_the_sample_again() -> None:
    rng = Random(5)
    print("seed 5")

    def draw() -> tuple[list[float], list[float]]:
        below = [rng.randint(5, 50) for _ in range(80)]
        return [b * rng.gauss(2, 0.5) for b in below], [float(b) for b in below]

    samples = [ratio(*draw()) for _ in range(400)]
    errors = [found.standard_error or 0.0 for found in samples]
    spread = stdev([found.value for found in samples])
    assert sum(errors) / len(errors) == pytest.approx(spread, rel=0.15)


def test_a_share_of_clusters_that_agree_within_is_less_sure() -> None:
    one_by_one = clustered_share([1, 0] * 50, [1] * 100)
    assert one_by_one == pytest.approx((0.5, *wilson(50, 100)), abs=0.002)
    together = clustered_share([10, 0] * 5, [10] * 10)
    assert together[0] == 0.5
    # Ten clusters of ten equal tokens tell as much as about ten tokens.
    assert together[1:] == pytest.approx(wilson(5, 10), abs=0.02)
    assert clustered_share([4, 6], [4, 6]) == (1.0, *wilson(10, 10))
    assert clustered_share([0, 0], [4, 6]) == (0.0, *wilson(0, 10))
