"""Do captured steps read of each row how it is drawn, and its drafts by which noise?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from ridgeline.executor.batch import SamplingRows
from ridgeline.executor.device_rows import DeviceDraws
from ridgeline.executor.draft_batch import DraftRows
from ridgeline.executor.transfer import transfer_to
from ridgeline.kernels.noise import draft_keys, stream_key
from ridgeline.request import SamplingParams
from ridgeline.sampling.batch import host_draws
from ridgeline.sampling.row import sampling_row
from tests.conftest import TEST_DEVICE

DEVICE = torch.device(TEST_DEVICE)
ROWS = [
    sampling_row("greedy", SamplingParams(temperature=0.0, seed=1), 5),
    sampling_row("seeded", SamplingParams(temperature=0.5, seed=2), 5),
    sampling_row("random", SamplingParams(temperature=2.0), 5),
]


def test_all_parts_come_in_one_copy_and_each_row_as_often_as_asked() -> None:
    draws = DeviceDraws([8, 4], transfer_to(DEVICE), DEVICE, num_flags=5)
    rows = host_draws(ROWS)
    draws.put(0, rows, 2)
    draws.put(1, rows)
    draws.put_flags(np.array([True, False, True]))
    assert draws.parts[0].temperatures_R.tolist() == [1.0] * 8  # not sent yet
    draws.send()
    places, draft_tokens = draws.parts
    keys = [row.key for row in ROWS]
    assert places.keys_R.tolist() == [*np.repeat(keys, 2).tolist(), 0, 0]
    assert places.temperatures_R.tolist() == [1.0, 1.0, 0.5, 0.5, 2.0, 2.0, 1.0, 1.0]
    assert places.noisy_R.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert draft_tokens.keys_R.tolist() == [*keys, 0]
    assert draft_tokens.temperatures_R.tolist() == [1.0, 0.5, 2.0, 1.0]
    assert draft_tokens.noisy_R.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert draws.flags_B.tolist() == [True, False, True, False, False]
    draws.put(0, host_draws(ROWS[1:2]), 3)
    draws.send()
    assert places.keys_R.tolist()[:4] == [keys[1]] * 3 + [keys[1]]  # and what was behind stays
    assert places.first(2).temperatures_R.tolist() == [0.5, 0.5]


def test_drafts_of_seeded_rows_are_drawn_with_their_own_noise() -> None:
    """And those that odds decide on with noise that nothing else knows."""
    kept = cast(SamplingRows, SimpleNamespace(rows=[SimpleNamespace(sampling=r) for r in ROWS]))
    draws = DraftRows(kept, True, np.zeros((2, 4), np.int64), [0, 0, 0]).draws
    assert draws.by_odds_R.tolist() == [False, False, True]
    own: list[Any] = draws.places_R.keys_R.tolist()
    drafted: list[Any] = draws.drafts_R.keys_R.tolist()
    assert drafted[:2] == own[:2] == [stream_key(1), stream_key(2)]
    seeded = torch.tensor([False])
    assert drafted[2] == draft_keys(torch.tensor(own[2:]), seeded).item() != own[2]
    assert draws.drafts_R.temperatures_R.tolist() == [1.0, 0.5, 2.0]
