"""Is a wait foretold, and does what was foretold decide who is refused and who is failed?"""

from __future__ import annotations

import asyncio

import pytest

from ridgeline.server.active_request import ActiveRequest
from ridgeline.server.config import Limits
from ridgeline.server.deadlines import ServiceRate, check_wait, enforce
from ridgeline.server.errors import ApiError

LIMITS = Limits(queue_timeout_s=60.0, run_timeout_s=600.0)


def known_rate(num_steps: int = 100) -> ServiceRate:
    """64 tokens each tenth of a second while somebody waits, 100 tokens an answer."""
    rate = ServiceRate()
    for _ in range(300):
        rate.on_end(100)
    for step in range(num_steps + 1):
        rate.on_step(step * 0.1, 64, is_full=True)
    return rate


async def active(at: float = 0.0) -> ActiveRequest:
    return ActiveRequest((), streams=True, max_bytes=1000, arrival=at)


def failure(rate: ServiceRate, num_before: int, now: float) -> str | None:
    async def wait() -> str | None:
        made = await active()
        check_wait(made, LIMITS, rate, num_before, 100)
        enforce([made], LIMITS, now, rate)
        return None if made.error is None else made.error.code

    return asyncio.run(wait())


def test_a_wait_is_what_those_before_it_take() -> None:
    assert known_rate().wait_s(640) == pytest.approx(100.0)
    assert known_rate().run_s(50) == pytest.approx(5.0)
    assert known_rate(10).wait_s(640) is None


def test_steps_in_which_nobody_waits_do_not_count() -> None:
    rate = known_rate()
    rate.on_step(500.0, 1, is_full=False)
    rate.on_step(900.0, 64, is_full=True)
    assert rate.wait_s(640) == pytest.approx(100.0)


def test_who_waits_as_foretold_is_not_failed() -> None:
    assert failure(known_rate(), 640, 190.0) is None
    assert failure(known_rate(), 640, 210.0) == "queue_timeout"


def test_without_a_forecast_the_fixed_time_holds() -> None:
    assert failure(ServiceRate(), 640, 59.0) is None
    assert failure(ServiceRate(), 640, 61.0) == "queue_timeout"


def test_what_was_not_known_at_arrival_is_foretold_later() -> None:
    async def go() -> None:
        made, rate = await active(), known_rate()
        check_wait(made, LIMITS, ServiceRate(), 640, 100)
        enforce([made], LIMITS, 150.0, rate)
        assert made.error is None

    asyncio.run(go())


def test_who_would_surely_wait_too_long_is_refused_at_once() -> None:
    """Half of a wait of 1180 s and its own 10 s are 600 s."""

    async def go() -> None:
        made, rate = await active(), known_rate()
        check_wait(made, LIMITS, rate, 7550, 100)
        with pytest.raises(ApiError, match="try again in 16 s") as caught:
            check_wait(made, LIMITS, rate, 7755, 100)
        assert caught.value.code == "overloaded"
        assert (b"retry-after", b"16") in caught.value.headers

    asyncio.run(go())


def test_time_to_run_counts_from_the_first_step() -> None:
    async def go() -> None:
        made = await active()
        made.started, made.began = True, 500.0
        enforce([made], LIMITS, 1099.0, ServiceRate())
        assert made.error is None
        enforce([made], LIMITS, 1101.0, ServiceRate())
        assert made.error is not None

    asyncio.run(go())
