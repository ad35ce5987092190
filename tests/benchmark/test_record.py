"""Are the summaries of a run right?"""

from __future__ import annotations

import pytest

from ridgeline.benchmark.run import (
    JobTimes,
    Run,
    StepSeen,
    percentile,
    spread_ms,
    steady_steps,
    throughput_of,
)


def test_times_of_one_request_count_from_when_it_was_due() -> None:
    times = JobTimes(10.0, [12.0, 12.5, 13.5, 14.0])
    assert (times.ttft_s, times.e2e_s) == (2.0, 4.0)
    assert times.tpot_s == pytest.approx(2.0 / 3)
    assert times.gaps_s == [0.5, 1.0, 0.5]
    assert JobTimes(0.0, [1.0]).tpot_s == 0.0


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.5, 3.0), (0.75, 4.0), (0.9, 4.6), (1.0, 5.0)]
)
def test_percentiles(share: float, expected: float) -> None:
    assert percentile([5.0, 1.0, 4.0, 2.0, 3.0], share) == pytest.approx(expected)
    assert percentile([], share) == 0.0


def test_spread_is_in_milliseconds() -> None:
    spread = spread_ms([0.001, 0.002, 0.003])
    assert [spread.p50, spread.mean] == pytest.approx([2.0, 2.0])
    assert spread.p90 == pytest.approx(2.8)


def test_rate_of_a_run() -> None:
    run = Run(1.0, 3.0, jobs=[JobTimes(1.0, [1.5, 2.0]), JobTimes(1.0, [3.0])])
    assert (run.wall_s, run.num_tokens, run.tokens_per_s) == (2.0, 3, 1.5)


def test_steady_steps_are_the_longest_run_of_full_ones() -> None:
    rows = [0, 2, 2, 1, 2, 2, 2, 2, 1, 2]
    steps = [StepSeen(float(i), 3 * num, num) for i, num in enumerate(rows)]
    assert [step.ended_s for step in steady_steps(steps, 2)] == [4.0, 5.0, 6.0, 7.0]
    assert steady_steps(steps, 3) == []


def test_the_pace_of_steps() -> None:
    steps = [StepSeen(3.0, 4, 2, 10.0), StepSeen(5.0, 2, 2, 30.0, drafts=True)]
    throughput = throughput_of(1.0, steps)
    assert (throughput.tokens_per_s, throughput.tokens_per_step) == (1.5, 3.0)
    assert (throughput.bytes_per_s, throughput.bytes_per_step, throughput.drafts) == (
        10.0,
        20.0,
        True,
    )
    unknown = throughput_of(1.0, [steps[0], StepSeen(5.0, 2, 2)])
    assert (unknown.bytes_per_s, unknown.bytes_per_step, unknown.drafts) == (None, None, False)
