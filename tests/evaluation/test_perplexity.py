"""Is perplexity exp of the mean loss, as the logits themselves give it?"""

from __future__ import annotations

from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, ConfigError
from ridgeline.evaluation.intervals import Z95, ratio
from ridgeline.evaluation.perplexity import (
    Scored,
    Window,
    perplexity_rows,
    score,
    windows,
)
from tests.conftest import TEST_DEVICE
from tests.tiny_model import make_tiny_model

TEXTS = ("One day a cat sat down.", "The dog, too, sat: caf\u00e9!", "x")


def open_tiny(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), device=TEST_DEVICE, max_num_seqs=8, num_blocks=200, **options)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return open_tiny(make_tiny_model(tmp_path_factory.mktemp("tiny")))


def direct_nll(llm: LLM, ids: list[int]) -> float:
    table = torch.log_softmax(llm.logits(ids).double(), -1)
    return -sum(table[i, token].item() for i, token in enumerate(ids[1:]))


def test_it_is_exp_of_the_mean_loss(llm: LLM) -> None:
    assert llm.tokenizer is not None
    prompts = [[1, *llm.tokenizer.encode(text, add_special_tokens=False)] for text in TEXTS]
    losses = [direct_nll(llm, ids) for ids in prompts]
    tokens = sum(len(ids) - 1 for ids in prompts)
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    per_token, per_byte = perplexity_rows("t", score(llm, windows(llm, TEXTS), progress=False))
    assert (per_token.metric, per_byte.metric) == ("perplexity", "byte_perplexity")
    assert per_token.value == pytest.approx(exp(sum(losses) / tokens), rel=1e-4)
    assert per_byte.value == pytest.approx(exp(sum(losses) / num_bytes), rel=1e-4)
    # This tokenizer has one token for each byte.
    assert (per_token.n, per_byte.n) == (tokens, num_bytes) == (num_bytes, num_bytes)
    error = ratio(losses, [len(ids) - 1 for ids in prompts]).standard_error
    assert error is not None
    assert per_token.low == pytest.approx(per_token.value * exp(-Z95 * error), rel=1e-3)
    assert per_token.high == pytest.approx(per_token.value * exp(Z95 * error), rel=1e-3)


def test_long_texts_are_cut_into_windows_that_score_every_token_once(tmp_path: Path) -> None:
    llm = open_tiny(make_tiny_model(tmp_path / "m"), max_model_len=32)
    text = "".join(chr(97 + i % 26) for i in range(100))
    cut = windows(llm, [text])
    assert [len(w.token_ids) for w in cut] == [31, 31, 31, 11]  # 1 + 30, and 1 to generate
    assert [w.num_scored for w in cut] == [w.num_bytes for w in cut] == [30, 30, 30, 10]
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode([i for w in cut for i in w.token_ids[1:]]) == text
    assert {w.token_ids[0] for w in cut} == {llm.tokenizer.bos_token_id}
    got = [one.nll for one in score(llm, cut, progress=False)]
    want = [direct_nll(llm, list(w.token_ids)) for w in cut]
    assert got == pytest.approx(want, rel=1e-4)


def test_without_a_beginning_token_the_end_token_stands_in_front(llm: LLM) -> None:
    assert llm.tokenizer is not None
    before = llm.tokenizer.bos_token_id, llm.tokenizer.eos_token_id
    try:
        llm.tokenizer.bos_token_id = None
        assert windows(llm, ["ab"])[0].token_ids[0] == 2
        llm.tokenizer.eos_token_id = None
        (window,) = windows(llm, ["abc"])
        assert (window.num_scored, window.num_bytes) == (2, 2)
        assert windows(llm, ["a"]) == []
    finally:
        llm.tokenizer.bos_token_id, llm.tokenizer.eos_token_id = before


def test_one_window_has_no_interval_and_a_hopeless_model_a_finite_figure() -> None:
    window = Window((1, 5, 6), 2)
    row = perplexity_rows("t", [Scored(window, 2.0)])[0]
    assert row.value == pytest.approx(exp(1.0))
    assert (row.low, row.high) == (None, None)
    row = perplexity_rows("t", [Scored(window, 1e9), Scored(window, 1e9)])[0]
    assert row.value < float("inf")


def test_no_tokenizer_no_perplexity(tmp_path: Path) -> None:
    llm = open_tiny(make_tiny_model(tmp_path / "m", tokenizer=False))
    with pytest.raises(ConfigError, match="no tokenizer"):
        windows(llm, ["a"])
