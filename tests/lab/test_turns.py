"""Do answers take turns, a bounded number of places, and a share of a processor?"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ridgeline.lab import turns
from ridgeline.lab.turns import AT_ONCE, MAX_OF_ONE, MAX_OPEN, Place, Refused, Turns


def test_places_are_bounded_for_one_and_for_all() -> None:
    found = Turns()
    own = [found.take("me") for _ in range(MAX_OF_ONE)]
    with pytest.raises(Refused, match=r"of yours .* ask again in 1 s") as refused:
        found.take("me")
    assert refused.value.status == 429
    others = [found.take(i) for i in range(MAX_OPEN - MAX_OF_ONE)]
    with pytest.raises(Refused, match="others have too many") as refused:
        found.take("somebody")
    assert refused.value.status == 503
    others[0].close()
    others[0].close()
    last = found.take("somebody")
    with pytest.raises(Refused):
        found.take("nobody")
    for place in (*own, *others, last):
        place.close()
    assert not found._held


class Steps:
    """Steps that end when they are let, in the order in which they began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_end = threading.Semaphore(0)

    def step(self, name: str) -> str:
        self.begun.append(name)
        assert self.may_end.acquire(timeout=30)
        return name

    async def until_begun(self, num: int) -> None:
        while len(self.begun) < num:
            await asyncio.sleep(0.001)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_client_with_many_steps_waits_for_the_others() -> None:
    async def asking() -> None:
        found, steps = Turns(), Steps()
        greedy, other = found.take("greedy"), found.take("other")

        def ask(place: Place, name: str) -> asyncio.Task[str]:
            return asyncio.create_task(place.run(steps.step, name))

        first = [ask(greedy, f"greedy {i}") for i in range(AT_ONCE + 3)]
        await steps.until_begun(AT_ONCE)
        last = ask(other, "other")
        await asyncio.sleep(0)
        first[AT_ONCE].cancel()  # who has gone is passed over
        for num in range(AT_ONCE + 1, AT_ONCE + 4):
            steps.may_end.release()
            await steps.until_begun(num)
        assert len(steps.begun) == AT_ONCE + 3
        assert steps.begun.index("other") in (AT_ONCE, AT_ONCE + 1)
        assert f"greedy {AT_ONCE}" not in steps.begun
        steps.may_end.release(AT_ONCE)
        assert await last == "other"
        await asyncio.gather(*first, return_exceptions=True)
        assert found._num_computed == 0

    run(asking)


def test_beside_an_engine_answers_have_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the time in the long run: here of a clock that is set."""
    now = [0.0]
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    def work(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(turns, "monotonic", lambda: now[0])
    monkeypatch.setattr(turns, "sleep", sleep)

    async def asking() -> None:
        found = Turns(share=0.2)
        place = found.take("me")
        for _ in range(12):
            await place.run(work, 1.0)
        assert not slept  # 10 s are free, and 12 s earned 2.4 s more
        await place.run(work, 5.0)
        with pytest.raises(Refused, match="has had its share of this server") as refused:
            found.take("other")
        assert refused.value.retry_s == 18  # 3.6 s too many: 10 - 17 + 0.2 x 17
        began = now[0]
        for _ in range(50):
            await place.run(work, 1.0)
        assert now[0] - began == pytest.approx(18 + 50 / 0.2, rel=0.05)

    run(asking)
