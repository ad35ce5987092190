"""Are as many drafts checked as pay where the host takes most of a step, and the next one is
planned before the last result is known?

The price of a step is wrong on purpose: it knows of no host, and each draft comes for nothing.
"""

from __future__ import annotations

from random import Random

import pytest

from ridgeline.scheduler.scheduler import DraftLengths
from ridgeline.speculation.controller import DraftLengthController
from ridgeline.speculation.step_times import StepTimes, row_bucket
from ridgeline.step import ScheduledRequest, StepPlan
from tests.speculation.hosted import MICRO, Flat, Machine, Text, run
from tests.speculation.test_controller import correction, ran

HOST_BOUND = Machine(
    lambda k: (270 + 7 * k if k else 170) * MICRO, lambda k: (150 + 10 * k if k else 110) * MICRO
)
DEVICE_BOUND = Machine(
    lambda k: (80 + 2 * k if k else 60) * MICRO, lambda k: (240 + 10 * k if k else 180) * MICRO
)
MACHINES = pytest.mark.parametrize("machine", [HOST_BOUND, DEVICE_BOUND], ids=["host", "device"])
IN_FLIGHT = pytest.mark.parametrize("in_flight", [1, 2])

STORIES = Text(0.1, 0.2, 0.5)
COPIES = Text(0.95, 0.9, 0.95)
SOME = Text(0.5, 0.7, 0.9)
SELDOM_GOOD = Text(0.15, 0.7, 0.9)


def looked_up() -> DraftLengthController:
    return DraftLengthController(
        Flat().seconds, acceptance=0.5, max_drafts=8, max_verified_tokens=64, looks_ahead=True
    )


def best(machine: Machine, text: Text, in_flight: int) -> tuple[float, float]:
    """Tokens per second of the best number, and without drafts."""
    ran = {
        k: run(machine, text, DraftLengths(k), in_flight=in_flight, seed=9).tokens_per_s
        for k in (0, 1, 2, 3, 4, 6, 8)
    }
    return max(ran.values()), ran[0]


@pytest.mark.every_pair
@MACHINES
@IN_FLIGHT
@pytest.mark.parametrize("before", [COPIES, SOME], ids=["copies", "some"])
def test_what_is_seldom_found_and_right_is_left_alone(
    machine: Machine, in_flight: int, before: Text
) -> None:
    """After answers whose drafts were good, too: what steps take was learned among those."""
    chooser = looked_up()
    run(machine, before, chooser, in_flight=in_flight, seed=1)
    off = run(machine, STORIES, DraftLengths(0), in_flight=in_flight, seed=2, num_requests=40)
    ran = run(machine, STORIES, chooser, in_flight=in_flight, seed=2, num_requests=40)
    assert ran.tokens_per_step < 1.06
    assert ran.tokens_per_s >= 0.97 * off.tokens_per_s, (ran, "seed 2")


@MACHINES
@IN_FLIGHT
def test_never_slower_from_the_first_request_on(machine: Machine, in_flight: int) -> None:
    off = run(machine, STORIES, DraftLengths(0), in_flight=in_flight, seed=3)
    ran = run(machine, STORIES, looked_up(), in_flight=in_flight, seed=3)
    assert ran.tokens_per_s >= 0.97 * off.tokens_per_s, (ran, "seed 3")


@pytest.mark.every_pair
@MACHINES
@IN_FLIGHT
@pytest.mark.parametrize("text", [COPIES, SOME, SELDOM_GOOD], ids=["copies", "some", "seldom"])
def test_good_drafts_are_checked(machine: Machine, in_flight: int, text: Text) -> None:
    """With the last result known, even better: nothing is checked where nothing was found."""
    most, _ = best(machine, text, in_flight)
    chooser = looked_up()
    run(machine, STORIES, chooser, in_flight=in_flight, seed=4, num_requests=5)
    run(machine, text, chooser, in_flight=in_flight, seed=5, num_requests=5)
    ran = run(machine, text, chooser, in_flight=in_flight, seed=6, num_requests=40)
    assert ran.tokens_per_s >= 0.95 * most, (ran, most, "seeds 4 to 6")


@pytest.mark.every_value
@pytest.mark.parametrize("right", [0.3, 0.6, 0.85])
@IN_FLIGHT
def test_drafts_of_a_small_model(in_flight: int, right: float) -> None:
    machine = Machine(
        lambda k: (260 + 3 * k if k else 170) * MICRO,
        lambda k: (140 + 45 * k if k else 110) * MICRO,
    )
    text = Text(1.0, right, right, is_drafted=True)
    most, off = best(machine, text, in_flight)
    chooser = DraftLengthController(
        Flat(54 * MICRO).seconds, acceptance=0.7, max_drafts=8, max_verified_tokens=64
    )
    run(machine, text, chooser, in_flight=in_flight, seed=7, num_requests=5)
    ran = run(machine, text, chooser, in_flight=in_flight, seed=8, num_requests=40)
    assert ran.tokens_per_s >= 0.96 * most, (ran, most, "seeds 7 and 8")
    assert ran.tokens_per_s >= 0.98 * off, (ran, off, "seeds 7 and 8")


def checking(k: int) -> StepPlan:
    """A step that checks so many drafts of one row."""
    return StepPlan(1, (ScheduledRequest("a", 100, k + 1, (), samples=True, num_draft=k),))


def have_run(
    times: StepTimes, plan: StepPlan, factor: float, num: int, *, is_overlapped: bool = False
) -> None:
    """So many of these steps took `factor` times what any step is priced at."""
    price = Flat().seconds(1, 100, 0)
    for _ in range(num):
        times.on_priced(ran(plan, price * factor, is_overlapped=is_overlapped))


def test_two_steps_that_overlap_say_what_one_takes_only_if_they_are_alike() -> None:
    times = StepTimes(Flat().seconds, (0, 1, 2))
    for k in (0, 2, 0, 2, 0, 2):
        have_run(times, checking(k), 3.0, 1, is_overlapped=True)
    assert correction(times, 1, 0) == 1.0
    for k, factor in ((2, 9.0), (2, 7.0), *[(2, 4.0)] * 20, (0, 9.0)):
        have_run(times, checking(k), factor, 1, is_overlapped=True)
    assert correction(times, 1, 2) == pytest.approx(4.0, rel=0.02)
    have_run(times, checking(0), 9.0, 1, is_overlapped=False)  # it waited for a result
    have_run(times, checking(0), 2.0, 1, is_overlapped=True)
    assert correction(times, 1, 0) <= 1.0  # it never counted


def test_what_has_not_run_lately_has_become_slower_as_what_has() -> None:
    times = StepTimes(Flat().seconds, (0, 1))
    have_run(times, checking(0), 2.0, 8)
    have_run(times, checking(1), 3.0, 60)
    assert correction(times, 1, 0) == pytest.approx(2.0)
    have_run(times, checking(1), 6.0, 60)  # the machine has others to serve
    assert correction(times, 1, 1) == pytest.approx(6.0, rel=0.02)
    assert correction(times, 1, 0) == pytest.approx(4.0, rel=0.02)


def test_the_first_check_behind_other_steps_says_nothing() -> None:
    """Where steps overlap: a draft reads prompts in it, or what came out of steps without it."""
    times = StepTimes(Flat().seconds, (0, 2))
    prompt = ScheduledRequest("p", 0, 40, (), samples=True)
    for _ in range(8):
        for before in (StepPlan(1, (prompt,)), checking(0)):
            have_run(times, before, 3.0, 1, is_overlapped=True)
            have_run(times, checking(2), 60.0, 1, is_overlapped=True)
            have_run(times, checking(2), 4.0, 3, is_overlapped=True)
    assert correction(times, 1, 2) == pytest.approx(4.0)


def test_what_is_new_while_the_machine_is_slow_is_no_slower_than_the_others() -> None:
    times = StepTimes(Flat().seconds, (0, 1, 2))
    have_run(times, checking(0), 2.0, 40)
    have_run(times, checking(1), 6.0, 6)  # three times what such steps take else
    have_run(times, checking(0), 6.0, 40)
    assert correction(times, 1, 1) == pytest.approx(6.0, rel=0.02)
    have_run(times, checking(0), 2.0, 40)
    assert correction(times, 1, 0) == pytest.approx(2.0, rel=0.02)
    assert correction(times, 1, 1) == pytest.approx(2.0, rel=0.02)


def test_what_is_known_well_does_not_follow_a_machine_that_swings() -> None:
    """Its slowdown is another each time another number of drafts follows, up to twofold."""
    times, rng = StepTimes(Flat().seconds, (0, 1, 2)), Random(5)
    cost = {0: 1.0, 1: 1.5, 2: 1.8}
    kinds = [0, 1, 2] * 40
    rng.shuffle(kinds)
    for k in kinds:
        have_run(times, checking(k), cost[k] * rng.choice((1.0, 2.0)), 12)
    have_run(times, checking(0), 1.0, 40)
    found = {k: times.seconds(row_bucket(1), 100)[k] / times.prices(1, 100, k) for k in cost}
    assert found[0] == pytest.approx(1.0, rel=0.02)
    assert found[1] == pytest.approx(1.5, rel=0.12), found
    assert found[2] == pytest.approx(1.8, rel=0.12), found


def test_one_that_was_tried_in_a_bad_moment_is_tried_again() -> None:
    """Two thousand steps later it has a price again as if it had never run: it was compared twice,
    as it came and as it went."""
    times = StepTimes(Flat().seconds, (0, 1))
    have_run(times, checking(0), 1.0, 40)
    have_run(times, checking(1), 1.9, 4)
    price = Flat().seconds(1, 100, 1)
    assert times.seconds(row_bucket(1), 100)[1] == pytest.approx(1.9 * price, rel=0.02)
    have_run(times, checking(0), 1.0, 2100)
    assert times.seconds(row_bucket(1), 100)[1] < price
