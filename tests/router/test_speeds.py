"""Are the speeds of foreign servers found from the times of their first tokens?"""

from __future__ import annotations

from random import Random

import pytest

from ridgeline.router.speeds import Correction, FittedSpeed, ReadingSpeed, slot_wait_s


def test_nothing_seen_nothing_known() -> None:
    assert FittedSpeed().speed == ReadingSpeed()


def test_a_line_is_found_in_noise_and_followed_when_it_moves() -> None:
    fitted, rng = FittedSpeed(), Random(1)
    for rate, step_s in ((5000.0, 0.03), (800.0, 0.2)):
        for _ in range(400):
            num_tokens = rng.randrange(1, 4000)
            fitted.saw(num_tokens, (step_s + num_tokens / rate) * rng.uniform(0.9, 1.1))
        assert fitted.speed.tokens_per_s == pytest.approx(rate, rel=0.1)
        assert fitted.speed.step_s == pytest.approx(step_s, abs=0.04)


@pytest.mark.parametrize("seen", [[(100, 0.5)] * 9, [(10, 1.0), (2000, 0.1)], [(1000, 1e-9)]])
def test_what_is_no_line_gives_usable_numbers(seen: list[tuple[int, float]]) -> None:
    fitted = FittedSpeed()
    for num_tokens, seconds in seen:
        fitted.saw(num_tokens, seconds)
    assert 1 <= fitted.speed.tokens_per_s <= 1e7
    assert 0 < fitted.speed.step_s < 10


def test_equal_prompts_are_foretold_exactly() -> None:
    fitted = FittedSpeed()
    for _ in range(9):
        fitted.saw(100, 0.5)
    assert 100 / fitted.speed.tokens_per_s + fitted.speed.step_s == pytest.approx(0.5, rel=0.01)


def test_one_slow_step_is_forgotten_and_slow_steps_are_not() -> None:
    once, always = Correction(), Correction()
    assert once.ratio(0.0, 0.0, 0.0) == 1.0
    assert once.ratio(1.0, 3.0, 0.01) == pytest.approx(4 / 1.01)
    assert once.ratio(61.0, 3.0, 0.01) == pytest.approx(1.0, abs=0.06)
    ratio = 1.0
    for second in range(100):
        ratio = always.ratio(float(second), 2.0 * second, 1.0 * second)
    assert ratio == pytest.approx(2.0, rel=0.05)
    assert always.ratio(100.0, 0.1, 0.1) > 1, "the engine was started again"


def test_who_comes_behind_full_slots_waits_for_one_to_be_free() -> None:
    """Eight slots, answers of 40 tokens at 0.1 s: a slot is free every 0.5 s."""
    assert slot_wait_s(7, 8, 40, 0.1) == 0.0
    assert slot_wait_s(8, 8, 40, 0.1) == pytest.approx(0.5)
    assert slot_wait_s(11, 8, 40, 0.1) == pytest.approx(2.0)
