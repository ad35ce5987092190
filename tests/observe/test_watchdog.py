"""Is a step called overdue by its own price, once, and not before?"""

from __future__ import annotations

from ridgeline.observe.watchdog import StepInFlight, Watchdog


def test_the_deadline_is_a_multiple_with_a_floor() -> None:
    watchdog = Watchdog(multiple=20.0, floor_s=5.0)
    assert watchdog.deadline_s(StepInFlight(1, 0.0, 0.01)) == 5.0
    assert watchdog.deadline_s(StepInFlight(1, 0.0, 2.0)) == 40.0


def test_an_overdue_step_is_told_as_long_as_it_lasts_and_counted_once() -> None:
    watchdog = Watchdog(multiple=10.0, floor_s=1.0)
    step = StepInFlight(7, 100.0, 0.5)
    assert watchdog.look(step, 105.0) is None
    for now in (105.5, 130.0):
        found = watchdog.look(step, now)
        assert found is not None
        assert (found.step_id, found.elapsed_s, found.deadline_s) == (7, now - 100.0, 5.0)
        watchdog.count(found, step.began)
    assert watchdog.num_overdue == 1
    again = StepInFlight(7, 900.0, 0.5)  # the same number in another life of the engine
    found = watchdog.look(again, 999.0)
    assert found is not None
    assert watchdog.count(found, again.began)
    assert watchdog.num_overdue == 2


def test_no_step_is_no_reason_to_worry() -> None:
    assert Watchdog(1.0, 0.0).look(None, 1e9) is None


def test_a_long_step_is_given_its_time() -> None:
    watchdog = Watchdog(multiple=3.0, floor_s=10.0)
    long, short = StepInFlight(1, 0.0, 100.0), StepInFlight(1, 0.0, 0.1)
    assert watchdog.is_within_price(long, 299.0)
    assert not watchdog.is_within_price(long, 301.0)
    assert not watchdog.is_within_price(short, 1.0)  # the floor is no promise
    assert not watchdog.is_within_price(None, 0.0)
