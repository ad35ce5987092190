"""Do the counters count what users feel?"""

from __future__ import annotations

import random

import pytest

from ridgeline.errors import InternalError
from ridgeline.observe.latency import Histogram, Latency, SequenceTimes


def test_histogram_against_a_plain_count() -> None:
    seed = 7
    print("seed", seed)
    rng = random.Random(seed)
    bounds = (0.1, 0.5, 1.0, 2.5)
    values = [rng.choice([*bounds, rng.uniform(0, 4)]) for _ in range(500)]
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    assert histogram.count == 500
    assert histogram.sum == pytest.approx(sum(values))
    expected = [(str(b), sum(v <= b for v in values)) for b in bounds] + [("+Inf", 500)]
    assert histogram.cumulative() == expected


def test_histogram_takes_no_negative_time_and_no_disordered_bounds() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(-5.0)
    assert histogram.cumulative()[0] == ("1.0", 1)
    assert histogram.sum == 0.0
    with pytest.raises(InternalError):
        Histogram((2.0, 1.0))
    with pytest.raises(InternalError):
        Histogram((1.0, 1.0))


def test_latency_of_one_sequence() -> None:
    latency, times = Latency(), SequenceTimes(10.0, queued=10.1)
    latency.on_start(times, 10.5)
    latency.on_start(times, 11.0)  # again, after a preemption: not a second wait
    latency.on_tokens(times, 1, 12.0)
    latency.on_tokens(times, 0, 12.1)  # a step without a token is no gap
    latency.on_tokens(times, 2, 13.0)
    latency.on_end(times, 14.0)
    assert latency.queue.count == 1
    assert latency.queue.sum == pytest.approx(0.4)
    assert (latency.first_token.count, latency.first_token.sum) == (1, 2.0)
    assert (latency.between_tokens.count, latency.between_tokens.sum) == (2, 1.0)
    assert (latency.whole_request.count, latency.whole_request.sum) == (1, 4.0)


def test_first_tokens_that_come_together_count_once_as_first() -> None:
    latency, times = Latency(), SequenceTimes(0.0)
    latency.on_tokens(times, 3, 2.0)
    assert (latency.first_token.count, latency.first_token.sum) == (1, 2.0)
    assert (latency.between_tokens.count, latency.between_tokens.sum) == (2, 0.0)
    assert latency.queue.count == 0  # nobody has said when it was scheduled


def test_a_fork_is_not_in_the_queue_while_its_prompt_is_computed() -> None:
    latency, times = Latency(), SequenceTimes(0.0)
    latency.on_start(times, 3.0)
    assert (times.started, latency.queue.count) == (3.0, 0)
