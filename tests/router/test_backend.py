"""When is a backend left in peace, and how does it look to the policy?"""

from __future__ import annotations

import pytest

from ridgeline.router.backend import (
    Arrivals,
    Backend,
    Breaker,
    Load,
    Placed,
    RetryBudget,
    replicas_wanted,
)
from ridgeline.router.prefixes import Prefixes, names_of

PROMPT = "x" * 4096
NAMES = names_of(PROMPT)


def backend(load: Load | None = None) -> Backend:
    return Backend("http://a:1", Prefixes(1 << 20), is_up=True, load=load)


def place(one: Backend, now: float, *, streams: bool = True) -> Placed:
    view = one.view(NAMES, one.num_tokens(len(PROMPT)), now)
    return one.place(NAMES, len(PROMPT), view, now, streams=streams)


def test_three_failures_in_a_row_open_and_pauses_double_up_to_a_minute() -> None:
    breaker, now = Breaker(), 100.0
    for _ in range(2):
        breaker.failed(now)
        breaker.failed(now)
        assert breaker.admits(now)
        breaker.succeeded()
    for _ in range(3):
        breaker.failed(now)
    for pause in (5.0, 10.0, 20.0, 40.0, 60.0, 60.0):
        assert not breaker.admits(now + pause - 0.01)
        now += pause
        assert breaker.admits(now)
        assert breaker.sent()
        assert not breaker.admits(now), "one is tried, not two"
        breaker.failed(now, was_probe=True)
    now += 60
    assert breaker.sent()
    breaker.succeeded()
    assert breaker.admits(now)
    assert not breaker.is_open
    for _ in range(3):
        breaker.failed(now)
    assert breaker.admits(now + 5)


def test_a_probe_whose_client_leaves_decides_nothing() -> None:
    breaker = Breaker()
    breaker.late(0.0)
    assert breaker.sent()
    breaker.undecided()
    assert breaker.admits(5.0)


def test_failures_of_what_was_sent_before_do_not_lengthen_the_pause() -> None:
    breaker = Breaker()
    for _ in range(9):
        breaker.failed(0.0)
    assert breaker.num_opened == 1
    assert breaker.admits(5.0)


def test_a_budget_gives_ten_and_then_one_for_ten() -> None:
    budget = RetryBudget()
    assert sum(budget.take() for _ in range(20)) == 10
    for _ in range(25):
        budget.request()
    assert sum(budget.take() for _ in range(20)) == 2
    for _ in range(10_000):
        budget.request()
    assert sum(budget.take() for _ in range(20)) == 10


def test_what_is_sent_counts_until_it_is_read_and_is_cached_from_then_on() -> None:
    one = backend()
    first = place(one, 0.0)
    assert first.num_to_read == 1024
    assert first.predicted_s == pytest.approx(1.044)
    waiting = one.view(NAMES, 1024, 0.0)
    assert (waiting.num_waiting, waiting.num_pending_tokens) == (1, 1024)
    assert waiting.num_cached_tokens == 1024
    one.begun(first, 2.0)
    running = one.view(NAMES, 1024, 2.0)
    assert (running.num_running, running.num_waiting, running.num_pending_tokens) == (1, 0, 0)
    one.ended(first)
    assert one.view(NAMES, 1024, 2.0).num_requests == 0
    one.lost("gone")
    assert one.view(NAMES, 1024, 2.0).num_cached_tokens == 0
    assert not one.view(NAMES, 1024, 2.0).is_ready


def test_an_answer_that_is_not_streamed_is_taken_as_read_when_it_should_be() -> None:
    one = backend()
    place(one, 0.0, streams=False)
    assert one.view((), 1, 1.0).num_waiting == 1
    assert one.view((), 1, 1.1).num_waiting == 0


def test_what_a_server_of_ours_says_beats_what_was_seen() -> None:
    told = backend(Load(7, 2, 1.5, 4000.0, 0.01))
    told.begun(place(told, 0.0), 9.0)
    view = told.view((), 1000, 9.0)
    assert (view.num_running, view.num_waiting, view.slot_wait_s) == (7, 2, 1.5)
    assert view.first_token_s(1000) == pytest.approx(1.5 + 0.25 + 0.01)
    seen = backend(Load(0, 0, 0.0, None, None))
    seen.begun(place(seen, 0.0), 2.048)
    assert seen.speed.tokens_per_s == pytest.approx(500)


def test_answers_correct_the_length_of_tokens_and_what_is_held() -> None:
    one = backend()
    for num_cached in (0, 500, 0):
        placed = place(one, 0.0)
        one.begun(placed, 1.0)
        one.used(placed, 512, num_cached)
        one.ended(placed)
    assert 4.0 < one.characters_per_token < 8.0
    assert one.num_tokens(4096) < 1024


def test_what_came_keeps_servers_busy_at_the_speed_that_they_tell() -> None:
    """1,000 prompt tokens and four answers a second, at 10,000 tokens a second and 0.05 s each:
    0.3 of one server, of whose time 0.7 is meant to be used."""
    arrivals, load = Arrivals(20.0), Load(3, 0, 0.0, 10_000.0, 0.01, 0.05)
    assert arrivals.need(0.0, [load]) == 0
    for number in range(80):
        arrivals.add(number / 4, 250)
    assert arrivals.need(19.75, [load]) == pytest.approx(0.3 / 0.7, rel=0.02)
    assert arrivals.need(19.75, []) is None
    assert arrivals.need(19.75, [Load(3, 0, 0.0, None, None)]) is None
    late = Load(3, 10, None, 5_000.0, 0.02, 0.1)
    waiting = 10 * 0.1 / 5.0
    assert arrivals.need(19.75, [late]) == pytest.approx((0.6 + waiting) / 0.7, rel=0.02)
    assert arrivals.need(60.0, [load]) == 0


def test_a_server_is_given_up_when_the_others_have_room() -> None:
    assert replicas_wanted(None, 2, 1, 4) == 2
    assert replicas_wanted(2.01, 2, 1, 4) == 3
    assert replicas_wanted(9.0, 2, 1, 4) == 4
    assert replicas_wanted(0.9, 2, 1, 4) == 2, "one would be nearly full"
    assert replicas_wanted(0.7, 2, 1, 4) == 1
    assert replicas_wanted(0.0, 3, 2, 4) == 2
