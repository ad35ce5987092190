"""Do the estimator's figures agree with each other, and stay above the floors of arithmetic?"""

from __future__ import annotations

from itertools import pairwise

import pytest

from ridgeline.errors import RequestFault
from ridgeline.lab.page import read_inputs
from ridgeline.lab.pages.estimator import PAGE, Inputs, answer


def figures(inputs: Inputs) -> dict[str, float]:
    return {one.name: one.value for one in answer(inputs).figures}


def test_no_token_is_faster_than_its_weights_are_read() -> None:
    """8.03 B parameters of 2 B at 3,350 GB/s: 4.79 ms (the memory wall of the teaching texts)."""
    found = figures(Inputs(requests=1))
    floor = found["Floor of that: weights alone"]
    assert floor == pytest.approx(8.03e9 * 2 / 3350e9 * 1e3, rel=1e-3)
    assert found["Between two tokens"] > 0.9 * floor  # the embedding is not read whole


def test_rates_prices_and_times_agree() -> None:
    inputs = Inputs(requests=8, price=2.5)
    found, drawing = figures(inputs), answer(inputs).drawing
    assert drawing.all == pytest.approx(8 * inputs.output / drawing.whole_s)
    assert drawing.whole_s == pytest.approx(
        drawing.ttft_s + (inputs.output - 1) / drawing.each, rel=1e-6
    )
    dollars = 2.5 / (drawing.all * 3600) * 1e6  # dollars an hour over tokens an hour
    assert found["A million answer tokens"] == pytest.approx(dollars)
    assert found["Tokens for a dollar"] == pytest.approx(1e6 / dollars)
    assert sum(part.seconds for part in drawing.token_parts) == pytest.approx(
        found["Between two tokens"] / 1e3
    )


def test_the_cost_table_of_the_teaching_texts() -> None:
    """$2.50 an hour at 800 tok/s are $0.868: at another rate, that times 800 / rate."""
    inputs = Inputs(price=2.5)
    drawing = answer(inputs).drawing
    assert drawing.dollars is not None
    assert drawing.dollars.mid == pytest.approx(0.868 * 800 / drawing.all, rel=1e-3)


def test_more_requests_share_a_step() -> None:
    points = answer(Inputs()).drawing.points
    assert [p.requests for p in points] == sorted(p.requests for p in points)
    assert all(b.each < a.each for a, b in pairwise(points))
    assert points[-1].all > 10 * points[0].all
    assert points[-1].requests <= answer(Inputs()).drawing.max_requests


def test_what_does_not_fit_says_what_would() -> None:
    found = answer(Inputs(model="llama-3.1-70b"))
    assert "does not fit" in found.sentence
    assert found.drawing.ways
    assert sum(item.bytes for item in found.drawing.items) > found.drawing.capacity_bytes
    assert not found.drawing.points


def test_lengths_beyond_the_model_are_refused_by_name() -> None:
    with pytest.raises(RequestFault, match="positions for 4,096") as fault:
        answer(Inputs(model="llama-2-7b", prompt=4000, output=200))
    assert fault.value.param == "prompt"


@pytest.mark.parametrize("preset", [preset.name for preset in PAGE.presets])
def test_presets_are_inputs(preset: str) -> None:
    chosen = next(one for one in PAGE.presets if one.name == preset)
    assert answer(read_inputs(PAGE, chosen.inputs)).sentence  # type: ignore[arg-type]
