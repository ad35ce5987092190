"""Sampling parameters as numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ridgeline.request import MAX_LOGIT_BIAS
from ridgeline.sampling.controls import MAX_ENTRIES, row_controls
from ridgeline.sampling.row import sampling_row
from tests.sampling.build import params


def test_each_row_and_its_entries() -> None:
    rows = [
        sampling_row("a", params(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1), 3),
        sampling_row("b", params(logit_bias={7: 2.0, 4: -1.0, 90: 1.0}), 3),
        sampling_row("c", params(top_k=5, top_p=0.5, min_p=0.1, frequency_penalty=0.5), 3),
        sampling_row(
            "d", params(min_tokens=2, stop_token_ids=[7, 2, 50], logit_bias={7: 3.0, 8: 1.0}), 3
        ),
        sampling_row("e", params(stop_token_ids=[7]), 3),
    ]
    rows[2].counts_slot = 6
    made = row_controls(rows, 50)
    assert made.whole_5R[0].tolist() == [row.key for row in rows]
    assert made.whole_5R[1:].T.tolist() == [
        [50, -1, 0, 0],
        [50, -1, 0, 2],
        [5, 6, 2, 2],
        [50, -1, 2, 5],
        [50, -1, 5, 5],
    ]
    assert made.places_2N.tolist() == [[4, 7, 2, 7, 8], [-1, -1, 5, 5, -1]]
    assert made.values_N.tolist() == [-1.0, 2.0, 0.0, 3.0, 1.0]
    assert made.floats_7R[:, 0].tolist() == [1.0, 0.0, 1.0, -math.inf, 1.0, 0.0, 0.0]
    want = np.array([1.0, 1.0, 0.5, math.log(0.1), 1.0, 0.5, 0.0], np.float32)
    assert made.floats_7R[:, 2].tolist() == want.tolist()
    assert not made.is_too_long


def test_rows_of_padding_are_greedy_and_count_nothing() -> None:
    made = row_controls([sampling_row("a", params(top_k=3), 1)], 20).padded(3, 20)
    assert made.whole_5R[:, 1:].T.tolist() == [[0, 20, -1, 0, 0]] * 2
    assert made.floats_7R[:, 1:].T.tolist() == [[1.0, 0.0, 1.0, -math.inf, 1.0, 0.0, 0.0]] * 2
    assert made.whole_5R[1, 0] == 3
    assert row_controls([], 20).padded(2, 20).whole_5R.shape == (5, 2)


@pytest.mark.parametrize(("extra", "is_too_long"), [(0, False), (1, True)])
def test_as_many_entries_as_there_is_room_for(extra: int, is_too_long: bool) -> None:
    bias = dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)
    rows = [sampling_row("r", params(logit_bias=bias), 1)] * (MAX_ENTRIES // MAX_LOGIT_BIAS)
    rows += [sampling_row("s", params(logit_bias={1: 1.0}), 1)] * extra
    made = row_controls(rows, MAX_LOGIT_BIAS)
    assert made.num_entries == MAX_ENTRIES + extra
    assert made.is_too_long is is_too_long
