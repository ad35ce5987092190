"""The bundled text: enough of it, the same each time, and none of the test in calibration."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline import demo
from ridgeline.evaluation.calibration import Marked, bundled_tokens, text_tokens
from ridgeline.evaluation.worlds import Split
from ridgeline.text.chat import load_chat_template
from ridgeline.text.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_model import make_tiny_model


def tokenizer_of(folder: Path) -> Tokenizer:
    found = load_tokenizer(folder)
    assert found is not None
    return found


def demo_tokens(split: Split, num: int) -> Marked:
    folder = demo.folder("chat")
    tokenizer = tokenizer_of(folder)
    return bundled_tokens(tokenizer, load_chat_template(folder, tokenizer), split, num)


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_bundled_text_is_long_enough_and_always_the_same(split: Split) -> None:
    found = demo_tokens(split, 3000)
    assert len(found.token_ids) == len(found.is_scored) >= 3000
    assert found == demo_tokens(split, 3000)
    assert demo_tokens(split, 6000).token_ids[:3000] == found.token_ids[:3000]


def test_the_splits_differ() -> None:
    assert demo_tokens("train", 1000).token_ids[:1000] != demo_tokens("test", 1000).token_ids[:1000]


def test_answers_and_stories_are_scored_and_questions_are_not() -> None:
    tokenizer = tokenizer_of(demo.folder("chat"))
    found = demo_tokens("test", 4000)
    given = [i for i, s in zip(found.token_ids, found.is_scored, strict=True) if not s]
    scored = [i for i, s in zip(found.token_ids, found.is_scored, strict=True) if s]
    end, user = tokenizer.eos_token_id, tokenizer.piece_to_id("<|user|>")
    assert user in given
    assert user not in scored
    assert scored.count(end or -1) >= 10
    assert tokenizer.bos_token_id not in scored
    assert 0.3 < len(scored) / len(found.token_ids) < 0.9


def test_a_model_without_chat_gets_stories_alone(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", chat_template=False, weights=False)
    tokenizer = tokenizer_of(folder)
    found = bundled_tokens(tokenizer, None, "train", 4000)
    assert found.token_ids[0] == tokenizer.bos_token_id == 1
    second = found.token_ids.index(1, 1)
    assert found.token_ids[second - 1] == tokenizer.eos_token_id
    assert found.is_scored[:3] == (False, True, True)


def test_a_text_is_scored_as_it_is(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(make_tiny_model(tmp_path / "m", weights=False))
    found = text_tokens(tokenizer, "Tom sat.")
    assert tokenizer.decode(found.token_ids) == "Tom sat."
    assert found.is_scored == (True,) * len(found.token_ids)
