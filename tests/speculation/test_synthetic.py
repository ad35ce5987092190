"""Drafts that are right as often as they are told to be."""

from __future__ import annotations

import pytest
import torch

from ridgeline.errors import ConfigError
from ridgeline.kernels.drafts import accept, make_history
from ridgeline.speculation.contract import DraftStep
from ridgeline.speculation.synthetic import Synthetic, synthetic_ids
from tests.conftest import TEST_DEVICE

WHERE = torch.device(TEST_DEVICE)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_right_so_often(rate: float) -> None:
    num = 20_000
    ids = torch.arange(num, device=WHERE) % 97
    draft_tokens = torch.arange(num, device=WHERE) % 89
    keys = torch.arange(num, device=WHERE) % 7
    positions = torch.arange(num, device=WHERE) // 7
    got = synthetic_ids(ids, draft_tokens, keys, positions, rate)
    share = (got == draft_tokens).double().mean().item()
    assert abs(share - rate) <= 5 * (rate * (1 - rate) / num) ** 0.5
    assert ((got >= 0) & (got < 97)).all()
    assert torch.equal(got, synthetic_ids(ids, draft_tokens, keys, positions, rate))


def test_the_coin_belongs_to_the_row_and_the_position() -> None:
    num = 64
    ids, draft_tokens = torch.full((num,), 5, device=WHERE), torch.full((num,), 9, device=WHERE)
    positions, zeros = torch.arange(num, device=WHERE), torch.zeros_like(ids)
    first = synthetic_ids(ids, draft_tokens, zeros, positions, 0.5)
    assert not torch.equal(first, synthetic_ids(ids, draft_tokens, zeros + 1, positions, 0.5))
    assert not torch.equal(first, synthetic_ids(ids, draft_tokens, zeros, positions + 1, 0.5))


def test_a_place_without_a_draft_keeps_its_id() -> None:
    ids = torch.tensor([4, 0, 7], device=WHERE)
    zeros = torch.zeros_like(ids)
    assert synthetic_ids(ids, zeros - 1, zeros, zeros, 1.0).tolist() == [4, 0, 7]
    wrong = synthetic_ids(ids, ids, zeros, zeros, 0.0)  # the model's word is the draft
    assert ((wrong != ids) & (wrong >= 0) & (wrong <= 7)).all()


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_step_gets_none_or_all_of_them(rate: float) -> None:
    method = Synthetic(rate, max_draft_tokens=4, max_rows=4, device=WHERE)
    history = make_history(4, 32, 4, WHERE)
    history.lens_N[1:3] = torch.tensor([5, 9])
    rows, limits = torch.tensor([1, 2], device=WHERE), torch.tensor([3, 2], device=WHERE)
    tables = torch.zeros(1, 4, 8, dtype=torch.int32, device=WHERE)
    assert method.draft(DraftStep(rows, limits, history, tables, 4, None), 3) is None
    assert history.found_N.tolist() == [0, 3, 3, 0]
    drafts_B4 = torch.full((2, 4), -1, device=WHERE)
    for place, (row, length) in enumerate(((1, 5), (2, 9))):
        drafts_B4[place, :3] = history.tokens_NL[row, length : length + 3]
    ids = torch.full((8,), 3, device=WHERE)
    positions = torch.arange(8, device=WHERE)
    ids = synthetic_ids(ids, drafts_B4.flatten(), positions * 0, positions, rate)
    out = torch.zeros(2, 7, dtype=torch.int64, device=WHERE)
    accept(ids, torch.ones(8, dtype=torch.bool, device=WHERE), rows, limits, history, out)
    assert out[:, 0].tolist() == ([4, 3] if rate else [1, 1])


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_that_is_none(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"rate must be in 0 \.\. 1"):
        Synthetic(rate, max_draft_tokens=4, max_rows=4, device=WHERE)
