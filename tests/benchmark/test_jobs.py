"""Are the workloads what they are called?"""

from __future__ import annotations

from random import Random

import pytest

from ridgeline.benchmark import jobs
from ridgeline.benchmark.jobs import Job, Lengths
from ridgeline.errors import ConfigError


def test_lengths_that_fit_are_left_alone() -> None:
    assert jobs.fit(1024, 512, 1536) == Lengths(1024, 512)


@pytest.mark.parametrize(
    ("asked", "context", "expected"),
    [((1024, 512), 512, (342, 170)), ((512, 1), 512, (511, 1)), ((8, 1000), 10, (1, 9))],
)
def test_others_shrink_together(
    asked: tuple[int, int], context: int, expected: tuple[int, int]
) -> None:
    found = jobs.fit(*asked, context)
    assert (found.prompt, found.output) == expected
    assert f"scaled to {expected[0]} + {expected[1]}" in found.note


def test_no_context_at_all() -> None:
    with pytest.raises(ConfigError, match="too short"):
        jobs.fit(8, 8, 1)


def test_uniform_prompts_are_fresh_and_inside_the_vocabulary() -> None:
    found = jobs.uniform(Random(1), 20, Lengths(30, 4), 50)
    assert {(len(job.prompt), job.num_output_tokens) for job in found} == {(30, 4)}
    assert len({job.prompt for job in found}) == 20
    ids = {token_id for job in found for token_id in job.prompt}
    assert (min(ids), max(ids)) == (jobs.FIRST_ORDINARY_ID, 49)
    assert set(jobs.random_prompt(Random(1), 50, 4)) == {0, 1, 2, 3}


def test_mixed_lengths_fit_the_context() -> None:
    found = jobs.mixed(Random(2), 300, 100, 1024, 500, 1000)
    lengths = [len(job.prompt) for job in found] + [job.num_output_tokens for job in found]
    assert (min(lengths), max(lengths)) == (100, 250)
    assert {job.temperature for job in found} == {0.6}


def test_poisson_arrivals_have_the_rate_and_the_spread_of_poisson() -> None:
    found = jobs.poisson(Random(3), [Job((1,), 1)] * 4000, 5.0)
    times = [job.arrival_s for job in found]
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert variance == pytest.approx(mean**2, rel=0.1)
    with pytest.raises(ConfigError, match="above 0"):
        jobs.poisson(Random(3), found, 0.0)


def test_log_uniform_has_as_many_in_each_decade() -> None:
    rng = Random(4)
    drawn = [jobs.log_uniform(rng, 10, 1000) for _ in range(4000)]
    assert min(drawn) == 10
    assert 980 < max(drawn) <= 1000
    below = sum(length < 100 for length in drawn) / len(drawn)
    assert below == pytest.approx(0.5, abs=0.03)


def test_equal_seeds_give_equal_work() -> None:
    first, second = (jobs.log_uniform_outputs(Random(9), 10, 8, 10, 1000, 500) for _ in range(2))
    assert first == second
    assert jobs.num_output_tokens(first) == sum(job.num_output_tokens for job in first)
