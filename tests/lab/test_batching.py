"""Are wasted slots those of the textbook, and latencies those of a schedule made by hand?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from ridgeline.errors import RequestFault
from ridgeline.lab.page import Answer, read_inputs
from ridgeline.lab.pages.batching import PAGE, Drawing, Inputs, workload


def answered(**inputs: Any) -> Answer[Drawing]:
    *progress, last = PAGE.answer(read_inputs(PAGE, inputs))  # type: ignore[misc]
    assert progress == sorted(progress)
    assert isinstance(last, Answer)
    return last


def steps_by_hand(lengths: Sequence[int], slots: int) -> int:
    """Of a server that gives each free slot to the next request, where a request needs as many
    steps as its answer has tokens."""
    free = [0] * slots
    for length in lengths:
        free.sort()
        free[0] += length
    return max(free)


def static_by_hand(lengths: Sequence[int], slots: int) -> tuple[int, int]:
    """Steps, and slots that are empty in them; the last batch may not be full."""
    batches = [lengths[i : i + slots] for i in range(0, len(lengths), slots)]
    steps = sum(max(batch) for batch in batches)
    return steps, steps * slots - sum(lengths)


def test_the_textbook_case() -> None:
    """Eight slots, answers of 7 x 20 and 500: 7 x (500 - 20) = 3,360 of 4,000, 84 %; 168 requests
    of 20 tokens are just as many."""
    found = answered()
    static, other = found.drawing.static, found.drawing.continuous
    assert static.num_idle == 3360
    assert (static.num_steps, other.num_steps, other.num_idle) == (500 + 21 * 20, 500, 0)
    assert found.figures[0].value == 3360
    assert found.figures[1].value == pytest.approx(84)
    assert "3,360 of 7,360 slot-steps" in found.sentence
    assert found.guess is not None
    assert found.guess.value == 3360


def test_the_batch_alone_gains_nothing() -> None:
    found = answered(waiting=0)
    assert found.drawing.static.num_idle == found.drawing.continuous.num_idle == 3360
    assert found.drawing.static.slot_share == pytest.approx(0.16)
    assert "3,360 of 4,000 slot-steps empty (84 %)" in found.sentence
    assert "as many steps" in found.sentence


@pytest.mark.parametrize(("slots", "waiting", "seed"), [(4, 30, 1), (16, 57, 2), (2, 3, 3)])
def test_uneven_answers_take_the_steps_that_a_list_says(
    slots: int, waiting: int, seed: int
) -> None:
    asked = {"lengths": "uneven", "slots": slots, "waiting": waiting, "seed": seed, "longest": 90}
    found = answered(**asked).drawing
    lengths = [one.num_output for one in workload(Inputs(**asked))]  # type: ignore[arg-type]
    assert (found.static.num_steps, found.static.num_idle) == static_by_hand(lengths, slots)
    assert found.continuous.num_steps == steps_by_hand(lengths, slots)
    assert found.continuous.num_idle == found.continuous.num_steps * slots - sum(lengths)


def test_pieces_fill_each_slot_from_the_first_step_to_the_last() -> None:
    found = answered(waiting=20).drawing
    for lane in (found.static, found.continuous):
        assert sum(steps for *_, steps in lane.pieces) == lane.num_steps * found.slots
        for slot in range(found.slots):
            own = [piece for piece in lane.pieces if piece[0] == slot]
            assert all(a[4] == b[3] for a, b in pairwise(own))
            assert own[-1][4] == pytest.approx(lane.end_s)


def test_chunks_bound_the_longest_step() -> None:
    """16,000 tokens of a prompt: at least 2 x 8 G x 16,000 FLOP on 989 TFLOP/s in one step."""
    asked: dict[str, Any] = {"long_prompt": 16000, "waiting": 8, "longest": 60}
    chunked, whole = answered(**asked), answered(**asked, chunked_prefill=False)
    assert whole.drawing.continuous.longest_step_s > 2 * 7e9 * 16000 / 989e12
    assert chunked.drawing.continuous.longest_step_s < 0.2 * whole.drawing.continuous.longest_step_s


def test_a_small_cache_preempts_and_computes_again() -> None:
    small = answered(lengths="uneven", waiting=40, small_cache=True, cache=30).drawing.continuous
    roomy = answered(lengths="uneven", waiting=40, cache=30).drawing.continuous
    assert roomy.preemptions == []
    assert len(small.preemptions) > 0 < small.num_again
    assert small.end_s > roomy.end_s


def test_planning_ahead_refills_a_step_late() -> None:
    """Each of 7 slots is refilled 24 times, and each time a step late."""
    found = answered(plans_ahead=True).drawing.continuous
    assert found.num_steps - 500 == found.num_idle / 8 == 24


def test_edges() -> None:
    with pytest.raises(RequestFault, match="shortest is 30; it must be at most longest"):
        answered(shortest=30, longest=20)
    least = answered(slots=2, waiting=0, longest=2, shortest=1, prompt=1).drawing
    assert (least.static.num_steps, least.static.num_idle) == (2, 1)
    most = answered(waiting=64, longest=1000, shortest=1000, slots=16, rate=200.0).drawing
    assert most.continuous.slot_share > 0.9
