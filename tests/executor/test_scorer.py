from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ridgeline.errors import RequestFault
from ridgeline.executor import scorer as scorer_module
from ridgeline.request import SamplingParams
from tests.executor.rig import MAX_MODEL_LEN, VOCAB, Host, make_decoder, make_executor, make_scorer

WINDOWS: dict[str, Any] = {
    "model_type": "qwen2",
    "head_dim": None,
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "sliding_window": 6,
    "max_window_layers": 2,
}


def tokens(num: int) -> list[int]:
    rng = random.Random(num)
    return [rng.randrange(VOCAB) for _ in range(num)]


@pytest.mark.parametrize("changes", [{}, WINDOWS], ids=["full", "windows"])
def test_chunks_do_not_change_the_logits(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    scorer, ids = make_scorer(make_decoder(**changes)), tokens(75)
    whole = scorer.logits(ids)
    assert whole.shape == (75, VOCAB)
    assert whole.dtype == torch.float32
    assert whole.device.type == "cpu"
    monkeypatch.setattr(scorer_module, "CHUNK_TOKENS", 13)
    monkeypatch.setattr(scorer_module, "CHUNK_BYTES", 4 * VOCAB * 4)
    torch.testing.assert_close(scorer.logits(ids), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scorer.logits(ids[:1]), whole[:1], rtol=1e-4, atol=1e-4)


def test_a_running_engine_is_not_disturbed() -> None:
    decoder = make_decoder()
    answers = []
    for is_scored in (False, True):
        host = Host(make_executor(decoder))
        host.add("r", tokens(20), SamplingParams(seed=1, top_p=0.9))
        host.run({"r": 20})
        for _ in range(6):
            host.decode(["r"], 1)
            if is_scored:
                make_scorer(decoder).logits(tokens(50))
        answers.append(host.output("r"))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("ids", "code"),
    [
        ([], "empty_input"),
        ([1, VOCAB], "invalid_token_id"),
        ([-1, 5], "invalid_token_id"),
        ([1] * (MAX_MODEL_LEN + 1), "context_length_exceeded"),
    ],
    ids=["none", "too large", "negative", "too long"],
)
def test_bad_input(ids: list[int], code: str) -> None:
    with pytest.raises(RequestFault) as caught:
        make_scorer(make_decoder()).logits(ids)
    assert caught.value.code == code


def test_the_longest_text_that_fits() -> None:
    logits = make_scorer(make_decoder()).logits(tokens(MAX_MODEL_LEN))
    assert bool(logits.isfinite().all())
