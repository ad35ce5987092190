"""Is the coarse picture of the engine right where the answer is known?"""

from __future__ import annotations

import random

import pytest

from ridgeline.scheduler.policies.forecast import Speed, Waiter, first_tokens, largest, speed_of
from tests.scheduler.policies.virtual_time import Linear


@pytest.mark.parametrize("seed", range(20))
def test_largest_is_close_to_the_limit_and_never_above(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        most = rng.randint(1, 9000)
        limit, guess = rng.randint(0, most + 5), rng.randint(1, 9000)
        asked: list[int] = []

        def fits(n: int, limit: int = limit, asked: list[int] = asked) -> bool:
            asked.append(n)
            return n <= limit

        found = largest(most, guess, fits)
        best = min(limit, most)
        assert best - best // 8 <= found <= best, (seed, most, limit, guess)
        assert all(1 <= n <= most for n in asked)
        assert len(set(asked)) == len(asked)
        assert len(asked) <= 30


def test_a_good_guess_saves_questions() -> None:
    asked: list[int] = []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= 500

    assert largest(8192, 490, fits) >= 470
    assert len(asked) <= 3


def test_prompt_rates_lie_between_the_known_points() -> None:
    speed = Speed(0.03, 0.02, (0, 10, 20), (1000.0, 600.0, 100.0))
    assert [speed.prompt_rate(n) for n in (0, 5, 10, 15, 20, 99)] == [1000, 800, 600, 350, 100, 100]
    assert speed.num_rows == 20


def test_steps_as_fast_as_promised() -> None:
    pricer = Linear(base_s=0.01, per_token_s=1e-4, per_context_s=1e-7)
    speed = speed_of(pricer, 0.03, context=1000, most_rows=1000, most_tokens=8192, prompt_share=1.0)
    for rows, rate in zip(speed.rows, speed.rates, strict=True):
        chunk = rate * pricer.seconds((*((1, 1000),) * rows, (100, 0)))
        assert rows == 0 or pricer.seconds(((1, 1000),) * rows) <= 0.03
        assert chunk >= 1
    assert list(speed.rates) == sorted(speed.rates, reverse=True)
    # 0.01 + 1000 * 1e-7 * n <= 0.03
    assert speed.num_rows == pytest.approx(150, rel=0.08)
    # a step of so many decodes and as many prompt tokens takes all that it may
    assert speed.token_s == speed.step_s == 0.03


def test_a_loose_promise_says_nothing_about_how_long_steps_are() -> None:
    pricer = Linear(base_s=0.01, per_token_s=1e-4, per_context_s=1e-7)
    sizes = {"context": 1000, "most_rows": 8, "most_tokens": 512}
    speed = speed_of(pricer, 60.0, prompt_share=4.0, **sizes)
    assert speed.num_rows == 8
    assert speed.step_s == pricer.seconds((*((1, 1000),) * 8, (512, 0)))
    assert speed.token_s == pricer.seconds((*((1, 1000),) * 8, (32, 0)))


def test_there_is_always_room_for_one() -> None:
    sizes = {"context": 9, "most_rows": 5, "most_tokens": 64}
    assert speed_of(Linear(), 1e-9, prompt_share=1.0, **sizes).num_rows == 1


def test_prompts_are_read_in_turn_and_seats_are_waited_for() -> None:
    speed = Speed(0.1, 0.05, (0, 2), (100.0, 100.0))
    line = [Waiter(100, 0.2, 5.0), Waiter(50, 0.2, 5.0), Waiter(100, 3.0, 5.0)]
    assert first_tokens(speed, 10.0, [], line) == [11.0, 11.5, 19.0]  # a seat is free at 16
    assert first_tokens(speed, 10.0, [12.0, 30.0], line[:2]) == [13.0, 18.5]
    assert first_tokens(speed, 10.0, [], []) == []


def test_reading_is_slower_beside_decodes() -> None:
    speed = Speed(0.1, 0.05, (0, 1, 2), (1000.0, 100.0, 10.0))
    alone = first_tokens(speed, 0.0, [], [Waiter(100, 0.0, 1.0)])
    beside = first_tokens(speed, 0.0, [9.0], [Waiter(100, 0.0, 1.0)])
    assert alone == [0.1]
    assert beside == [1.0]
